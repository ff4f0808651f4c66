#include "ddp/group/create.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/shm/cpu_backend.h"
#include "ddp/worker/call.h"
#include "ddp/worker/work.h"
#include "env/text.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;

/// Memory of allocate_shared: on the device, with its fixed copy in the CPU backend's shared memory.
struct Region {
    cuda::DeviceMemory device;
    std::span<std::byte> host;
    bool is_pinned;

    Region(const std::shared_ptr<const cuda::Gpu>& gpu, std::span<std::byte> host_memory)
        : device(gpu, host_memory.size()),
          host(host_memory),
          // Without page-locking, buffers are staged like any other.
          is_pinned(!host.empty() &&
                    cuda::succeeded(cudaHostRegister(host.data(), host.size(), cudaHostRegisterDefault))) {}
    ~Region() {
        if (is_pinned) cudaHostUnregister(host.data());
    }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    /// The copy of that buffer on the host; null when it is not in this region.
    [[nodiscard]] std::byte* host_of(const Buffer& buffer) const {
        const auto* const data = static_cast<const std::byte*>(buffer.data);
        if (!is_pinned || data < device.get() || data + buffer.bytes() > device.get() + host.size())
            return nullptr;
        return host.data() + (data - device.get());
    }
};

enum class Transfer : std::uint8_t { In, Out, InOut };
/// A device buffer in one collective: copied to the host before it, copied back after it, or both.
struct Staged {
    Buffer device;
    Transfer transfer;
};

/// Each call is one task of a thread: wait for the program's stream, copy, run the collective on the host,
/// copy back.
class StagedGroup final : public ProcessGroup {
  public:
    StagedGroup(StagedParts parts, const ddprun::WorkerEnv& env, const ProcessGroupOptions& options)
        : parts_(std::move(parts)),
          env_(env),
          options_(options),
          owned_backend_(make_owned<cpu::CpuBackend>(parts_.segment, env, options.timeout)) {
        begin();
    }
    StagedGroup(const StagedGroup& parent, const std::vector<std::uint32_t>& members, std::uint32_t share)
        : parts_(parent.parts_),
          env_(parent.env_),
          options_(parent.options_),
          owned_backend_(make_owned<cpu::CpuBackend>(parent.backend_, members, share)) {
        begin();
    }

    void* stream() const override { return options_.stream; }
    std::string describe() const override {
        return fmt::format("staged (device memory through the host, rank {} on device {}; {})", env_.rank,
                           parts_.device, backend_.describe());
    }
    double communication_seconds() const override { return backend_.communication_seconds(); }
    double waiting_seconds() const override { return backend_.waiting_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        backend_.report_progress(step, samples);
    }

  private:
    /// The host ends a barrier, so waiting for it blocks.
    Work do_barrier() override {
        Work work = start("barrier", {}, [this](const auto&) { backend_.barrier(); });
        work.synchronize();
        return work;
    }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        run("allocate_shared", [&] {
            regions_.push_back(std::make_unique<Region>(gpu_, backend_.allocate_shared(bytes)));
            regions_.back()->device.clear(copies_->get());
            copies_->synchronize();
        });
        return {regions_.back()->device.get(), bytes};
    }
    Work do_all_reduce(Buffer buffer, ReduceOp op) override {
        return start("all_reduce", {Staged{buffer, Transfer::InOut}},
                     [this, op](const auto& host) { backend_.all_reduce(host[0], op); });
    }
    Work do_broadcast(Buffer buffer, int root) override {
        return start("broadcast",
                     {root == rank() ? Staged{buffer, Transfer::In} : Staged{buffer, Transfer::Out}},
                     [this, root](const auto& host) { backend_.broadcast(host[0], root); });
    }
    Work do_all_gather(Buffer output, Buffer input) override {
        return start("all_gather", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [this](const auto& host) { backend_.all_gather(host[0], host[1]); });
    }
    Work do_reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        return start("reduce_scatter", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [this, op](const auto& host) { backend_.reduce_scatter(host[0], host[1], op); });
    }
    Work do_reduce(Buffer buffer, int root, ReduceOp op) override {
        return start("reduce",
                     {root == rank() ? Staged{buffer, Transfer::InOut} : Staged{buffer, Transfer::In}},
                     [this, root, op](const auto& host) { backend_.reduce(host[0], root, op); });
    }
    Work do_gather(Buffer output, Buffer input, int root) override {
        if (rank() != root) output = empty_buffer(input.dtype);
        return start("gather", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [this, root](const auto& host) { backend_.gather(host[0], host[1], root); });
    }
    Work do_scatter(Buffer output, Buffer input, int root) override {
        if (rank() != root) input = empty_buffer(output.dtype);
        return start("scatter", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [this, root](const auto& host) { backend_.scatter(host[0], host[1], root); });
    }
    Work do_all_to_all(Buffer output, Buffer input) override {
        return start("all_to_all", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [this](const auto& host) { backend_.all_to_all(host[0], host[1]); });
    }
    Work do_all_gather_v(Buffer output, Buffer input, Counts counts) override {
        return start("all_gather_v", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
                     [=, this](const auto& host) { backend_.all_gather_v(host[0], host[1], counts); });
    }
    Work do_reduce_scatter_v(Buffer output, Buffer input, Counts counts, ReduceOp op) override {
        return start(
            "reduce_scatter_v", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
            [=, this](const auto& host) { backend_.reduce_scatter_v(host[0], host[1], counts, op); });
    }
    Work do_all_to_all_v(Buffer output, Counts received, Buffer input, Counts sent) override {
        return start(
            "all_to_all_v", {Staged{output, Transfer::Out}, Staged{input, Transfer::In}},
            [=, this](const auto& host) { backend_.all_to_all_v(host[0], received, host[1], sent); });
    }
    Work do_send(Buffer buffer, int to) override {
        return start("send", {Staged{buffer, Transfer::In}},
                     [this, to](const auto& host) { backend_.send(host[0], to); });
    }
    Work do_recv(Buffer buffer, int from) override {
        return start("recv", {Staged{buffer, Transfer::Out}},
                     [this, from](const auto& host) { backend_.recv(host[0], from); });
    }
    Work do_batch(std::vector<Message> messages) override {
        std::vector<Staged> pieces;
        for (const Message& one : messages)
            pieces.push_back(
                {one.buffer, one.direction == Message::Direction::Send ? Transfer::In : Transfer::Out});
        return start("batch_send_recv", std::move(pieces),
                     [this, messages = std::move(messages)](const auto& host) {
                         std::vector<Message> on_host = messages;
                         for (std::size_t i = 0; i < on_host.size(); ++i) on_host[i].buffer = host[i];
                         backend_.batch(on_host);
                     });
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override {
        std::vector<std::string> all;
        run(mark == kSplitMark ? "split" : "all_gather_bytes",
            [&] { all = backend_.all_gather_bytes(mine, mark); });
        return all;
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) override {
        std::uint32_t share = 0;
        run("split", [&] { share = backend_.take_share(part.members); });
        if (part.members.empty()) return nullptr;
        return std::make_unique<StagedGroup>(*this, part.members, share);
    }

    void begin() {
        set_identity({.rank = backend_.rank(),
                      .size = backend_.size(),
                      .device = {Device::Kind::Cuda, parts_.device},
                      .backend = "staged",
                      .world_rank = env_.rank,
                      .timeout = options_.timeout});
        run("opening the device", [this] {
            cuda::check(cudaSetDevice(parts_.device), "choosing the CUDA device");
            cuda::leave_captures_alone();
            gpu_ = cuda::Gpu::of(parts_.device);
            copies_.emplace(gpu_, cuda::Priority::High);
            copied_.emplace();
        });
    }
    [[nodiscard]] Buffer empty_buffer(DType type) const { return {nullptr, 0, type, device()}; }

    template <class Collective>
    Work start(const char* call, std::vector<Staged> pieces, Collective collective) {
        refuse_capture(call);
        // The calling thread may use another device, or none yet.
        const cuda::DeviceScope here(parts_.device);
        const auto ready = std::make_shared<cuda::Event>();
        ready->record(static_cast<cuda::Stream>(options_.stream));
        const auto state = std::make_shared<Work::State>();
        thread_->post([this, state, ready, collective, pieces = std::move(pieces), limit = timeout(),
                       name = fmt::format("rank {}: {}", env_.rank, call)] {
            std::exception_ptr failure;
            try {
                carry_out({name, limit}, *ready, pieces, collective);
            } catch (...) {
                // Peers must not wait for a collective that this rank will not call.
                failure = std::current_exception();
                backend_.mark_broken(failure);
            }
            state->finish(failure);
        });
        return Work(state);
    }
    void run(const char* call, const std::function<void()>& task) {
        start(call, {}, [&task](const auto&) { task(); }).synchronize();
    }

    /// The name and the time limit of a wait.
    struct Attempt {
        std::string name;
        std::chrono::nanoseconds limit;
    };
    template <class Collective>
    void carry_out(const Attempt& attempt, const cuda::Event& ready, const std::vector<Staged>& pieces,
                   const Collective& collective) {
        wait_for(ready, attempt);
        std::vector<Buffer> host;
        for (const Staged& piece : pieces) {
            host.push_back({host_of(piece.device, host.size()), piece.device.count, piece.device.dtype, {}});
            if (piece.transfer != Transfer::Out)
                copy(attempt.name, host.back().data, piece.device.data, piece.device.bytes());
        }
        if (!pieces.empty()) wait_for_copies(attempt);
        backend_.set_timeout(attempt.limit);
        collective(host);
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            if (pieces[i].transfer != Transfer::In)
                copy(attempt.name, pieces[i].device.data, host[i].data, host[i].bytes());
        }
        if (!pieces.empty()) wait_for_copies(attempt);
    }
    void copy(const std::string& name, void* to, const void* from, std::size_t bytes) const {
        if (bytes > 0)
            cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, copies_->get()), name.c_str());
    }
    /// Page-locked memory for buffer `which` of a collective, kept for the next one.
    void* host_of(const Buffer& device, std::size_t which) {
        if (device.count == 0) return nullptr;
        for (const auto& region : regions_) {
            if (std::byte* const fixed = region->host_of(device)) return fixed;
        }
        if (which >= staging_.size()) staging_.resize(which + 1);
        std::optional<cuda::PinnedMemory>& staging = staging_[which];
        if (!staging || staging->bytes() < device.bytes()) {
            staging.reset();
            staging.emplace(gpu_, std::bit_ceil(device.bytes()));
        }
        return staging->get();
    }
    void wait_for_copies(const Attempt& attempt) const {
        copied_->record(copies_->get());
        wait_for(*copied_, attempt);
    }
    /// Polls instead of blocking: a device that hangs must not keep this rank past its time-out, nor from
    /// learning that a peer is lost.
    void wait_for(const cuda::Event& event, const Attempt& attempt) const {
        constexpr std::chrono::microseconds kPoll{20};
        const auto deadline = ddprun::deadline_after(MonotonicClock::now(), attempt.limit);
        for (cudaError_t code; (code = event.query()) != cudaSuccess; std::this_thread::sleep_for(kPoll)) {
            if (code != cudaErrorNotReady) cuda::check(code, attempt.name.c_str());
            throw_if_lost(parts_.segment->header(), attempt.name + ": waiting for the device");
            if (MonotonicClock::now() >= deadline)
                throw TimeoutError(fmt::format("{}: the device did not reach it within {}", attempt.name,
                                               ddprun::format_duration(attempt.limit)));
        }
    }

    void refuse_capture(const char* call) const {
        if (!cuda::is_capturing(static_cast<cuda::Stream>(options_.stream))) return;
        throw InvalidInput(
            fmt::format("{}: the staged backend works on the host and cannot be part of a CUDA "
                        "graph: train without one, or with backend nccl",
                        call));
    }

    const StagedParts parts_;
    const ddprun::WorkerEnv env_;
    const ProcessGroupOptions options_;
    const OwnedByProcess<cpu::CpuBackend> owned_backend_;
    cpu::CpuBackend& backend_ = *owned_backend_;
    // Used by the thread.
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::optional<cuda::OwnedStream> copies_;
    std::optional<cuda::Event> copied_;
    std::vector<std::unique_ptr<Region>> regions_;
    std::deque<std::optional<cuda::PinnedMemory>> staging_;
    const OwnedByProcess<ProgressThread> thread_ =
        make_owned<ProgressThread>();  // destroyed first: tasks in flight use all other members
};

}  // namespace

std::unique_ptr<ProcessGroup> make_staged_group(StagedParts parts, const ddprun::WorkerEnv& env,
                                                const ProcessGroupOptions& options) {
    return std::make_unique<StagedGroup>(std::move(parts), env, options);
}

}  // namespace ddp
