#include "ddp/staged_group.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ddp/argument_checks.h"
#include "ddp/cpu_backend.h"
#include "ddp/cuda/graph.h"
#include "ddp/diagnose.h"
#include "ddp/division.h"
#include "ddp/staged_queue.h"
#include "env/text.h"

namespace ddp {

namespace {

using staged::Part;

/// Memory of allocate_shared: on the device, with its fixed copy in the CPU backend's shared memory.
struct Region {
    std::shared_ptr<const cuda::Api> cuda;
    std::byte* device = nullptr;
    std::span<std::byte> host;
    bool is_pinned = false;

    Region(std::shared_ptr<const cuda::Api> api, std::span<std::byte> host_memory)
        : cuda(std::move(api)), host(host_memory) {
        void* address = nullptr;
        const std::size_t bytes = std::max<std::size_t>(host.size(), 1);
        cuda->check(cuda->malloc(&address, bytes),
                    fmt::format("allocating {} on the device", ddprun::format_bytes(bytes)).c_str());
        device = static_cast<std::byte*>(address);
        // Where it cannot be page-locked, buffers go through the pool like any other.
        is_pinned = !host.empty() && cuda->succeeded(cuda->host_register(host.data(), host.size(), 0));
    }
    ~Region() {
        if (is_pinned) cuda->host_unregister(host.data());
        cuda->free(device);
    }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    /// Where the copy of that buffer is; null when it is not one of this region.
    [[nodiscard]] std::byte* host_of(const Buffer& buffer) const {
        const auto* const data = static_cast<const std::byte*>(buffer.data);
        if (!is_pinned || data < device || data + buffer.bytes() > device + host.size()) return nullptr;
        return host.data() + (data - device);
    }
};

class StagedGroup final : public ProcessGroup {
  public:
    StagedGroup(StagedParts parts, const ddprun::WorkerEnv& env, const ProcessGroupOptions& options)
        : parts_(std::move(parts)),
          env_(env),
          options_(options),
          backend_(parts_.segment, env, options.timeout),
          pool_(parts_.cuda) {
        start_queue();
    }
    StagedGroup(const StagedGroup& parent, const cpu::Division& part)
        : parts_(parent.parts_),
          env_(parent.env_),
          options_(parent.options_),
          backend_(parent.backend_, part.members, part.share, parent.env_),
          pool_(parts_.cuda) {
        start_queue();
    }

    int rank() const override { return backend_.rank(); }
    int size() const override { return backend_.size(); }
    Device device() const override { return {Device::Kind::Cuda, parts_.device}; }
    void* stream() const override { return options_.stream; }
    std::string describe() const override {
        return fmt::format("staged (device memory through the host, rank {} on device {}; {})", env_.rank,
                           parts_.device, backend_.describe());
    }
    double communication_seconds() const override { return backend_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        backend_.report_progress(step, samples);
    }

    Work all_reduce(Buffer buffer, ReduceOp op) override {
        require("all_reduce", buffer);
        require_reducible("all_reduce", buffer, op);
        return start("all_reduce", {both_ways(buffer)},
                     [this, op](const auto& host) { backend_.all_reduce(host[0], op); });
    }
    Work broadcast(Buffer buffer, int root) override {
        require("broadcast", buffer);
        require_root("broadcast", root, size());
        return start("broadcast", {root == rank() ? into(buffer) : out_of(buffer)},
                     [this, root](const auto& host) { backend_.broadcast(host[0], root); });
    }
    Work all_gather(Buffer output, Buffer input) override {
        require("all_gather", output);
        require("all_gather", input);
        require_n_times("all_gather", "output", output, input, size());
        return start("all_gather", {out_of(output), into(input)},
                     [this](const auto& host) { backend_.all_gather(host[0], host[1]); });
    }
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        require("reduce_scatter", output);
        require("reduce_scatter", input);
        require_n_times("reduce_scatter", "input", input, output, size());
        require_reducible("reduce_scatter", input, op);
        return start("reduce_scatter", {out_of(output), into(input)},
                     [this, op](const auto& host) { backend_.reduce_scatter(host[0], host[1], op); });
    }
    Work reduce(Buffer buffer, int root, ReduceOp op) override {
        require("reduce", buffer);
        require_root("reduce", root, size());
        require_reducible("reduce", buffer, op);
        return start("reduce", {root == rank() ? both_ways(buffer) : into(buffer)},
                     [this, root, op](const auto& host) { backend_.reduce(host[0], root, op); });
    }
    Work gather(Buffer output, Buffer input, int root) override {
        require("gather", input);
        require_root("gather", root, size());
        if (rank() == root) {
            require("gather", output);
            require_n_times("gather", "output", output, input, size());
        } else {
            output = nothing(input.dtype);
        }
        return start("gather", {out_of(output), into(input)},
                     [this, root](const auto& host) { backend_.gather(host[0], host[1], root); });
    }
    Work scatter(Buffer output, Buffer input, int root) override {
        require("scatter", output);
        require_root("scatter", root, size());
        if (rank() == root) {
            require("scatter", input);
            require_n_times("scatter", "input", input, output, size());
        } else {
            input = nothing(output.dtype);
        }
        return start("scatter", {out_of(output), into(input)},
                     [this, root](const auto& host) { backend_.scatter(host[0], host[1], root); });
    }
    Work all_to_all(Buffer output, Buffer input) override {
        require("all_to_all", output);
        require("all_to_all", input);
        require_slices("all_to_all", output, input, size());
        return start("all_to_all", {out_of(output), into(input)},
                     [this](const auto& host) { backend_.all_to_all(host[0], host[1]); });
    }
    Work send(Buffer buffer, int to) override {
        require("send", buffer);
        require_peer("send", to, rank(), size());
        return start("send", {into(buffer)}, [this, to](const auto& host) { backend_.send(host[0], to); });
    }
    Work recv(Buffer buffer, int from) override {
        require("recv", buffer);
        require_peer("recv", from, rank(), size());
        return start("recv", {out_of(buffer)},
                     [this, from](const auto& host) { backend_.recv(host[0], from); });
    }
    /// Its end is a matter of the host, so waiting for it blocks.
    Work barrier() override {
        Work work = start("barrier", {}, [this](const auto&) { backend_.barrier(); });
        work.synchronize();
        return work;
    }
    std::unique_ptr<ProcessGroup> split(int color, int key) override {
        std::optional<cpu::Division> part;
        run("split", [&] { part = cpu::divide(backend_, color, key); });
        if (!part) return nullptr;
        return std::make_unique<StagedGroup>(*this, *part);
    }
    std::span<std::byte> allocate_shared(std::size_t bytes) override {
        std::span<std::byte> host;
        run("allocate_shared", [&] { host = backend_.allocate_shared(bytes); });
        const cuda::DeviceScope here(*parts_.cuda, parts_.device);
        const auto& region = regions_.emplace_back(std::make_unique<Region>(parts_.cuda, host));
        queue_->clear(region->device, bytes);
        return {region->device, bytes};
    }
    std::vector<std::string> all_gather_bytes(std::string_view mine) override {
        std::vector<std::string> all;
        run("all_gather_bytes", [&] { all = backend_.all_gather_bytes(mine); });
        return all;
    }

  private:
    void start_queue() {
        parts_.cuda->check(parts_.cuda->set_device(parts_.device), "choosing the CUDA device");
        queue_.emplace(staged::QueueParts{
            .cuda = parts_.cuda,
            .device = parts_.device,
            .user_stream = static_cast<cuda::Stream>(options_.stream),
            .timeout = options_.timeout,
            .throw_if_lost =
                [this] {
                    cpu::throw_if_lost(parts_.segment->header(),
                                       fmt::format("rank {}: waiting for the device", env_.rank));
                },
            .give_up = [this](std::exception_ptr why) { backend_.give_up(std::move(why)); }});
    }
    void require(const char* call, const Buffer& buffer) const {
        require_memory_of("staged", call, buffer, device(), env_.rank);
    }
    [[nodiscard]] Buffer nothing(DType type) const { return {nullptr, 0, type, device()}; }

    Part part_of(const Buffer& device) {
        Part part{.device = device, .host = {nullptr, device.count, device.dtype, {}}, .keeps = nullptr};
        for (const auto& region : regions_) {
            if (part.host.data == nullptr && device.count > 0) part.host.data = region->host_of(device);
        }
        if (part.host.data == nullptr && device.count > 0) {
            const cuda::DeviceScope here(*parts_.cuda, parts_.device);
            part.keeps = pool_.take(device.bytes());
            part.host.data = part.keeps.get();
        }
        return part;
    }
    Part into(const Buffer& device) {
        Part part = part_of(device);
        part.goes_in = true;
        return part;
    }
    Part out_of(const Buffer& device) {
        Part part = part_of(device);
        part.comes_out = true;
        return part;
    }
    Part both_ways(const Buffer& device) {
        Part part = into(device);
        part.comes_out = true;
        return part;
    }

    template <class Collective>
    Work start(const char* call, std::vector<Part> parts, Collective collective) {
        refuse_capture(call);
        std::vector<Buffer> host;
        for (const Part& part : parts) host.push_back(part.host);
        return queue_->start(named(call), std::move(parts),
                             [host = std::move(host), collective] { collective(host); });
    }
    void run(const char* call, std::function<void()> task) {
        refuse_capture(call);
        queue_->run(named(call), std::move(task));
    }
    [[nodiscard]] std::string named(const char* call) const {
        return fmt::format("rank {}: {}", env_.rank, call);
    }

    void refuse_capture(const char* call) const {
        if (!cuda::is_capturing(*parts_.cuda, static_cast<cuda::Stream>(options_.stream))) return;
        throw InvalidInput(
            fmt::format("{}: the staged backend works on the host and cannot be part of a CUDA "
                        "graph: train without one, or with backend nccl",
                        call));
    }

    const StagedParts parts_;
    const ddprun::WorkerEnv env_;
    const ProcessGroupOptions options_;
    cpu::CpuBackend backend_;
    staged::PinnedPool pool_;
    std::vector<std::unique_ptr<Region>> regions_;
    std::optional<staged::Queue> queue_;  // ends first: what is in flight uses all of the others
};

}  // namespace

std::unique_ptr<ProcessGroup> make_staged_group(StagedParts parts, const ddprun::WorkerEnv& env,
                                                const ProcessGroupOptions& options) {
    return std::make_unique<StagedGroup>(std::move(parts), env, options);
}

}  // namespace ddp
