#include "ddp/group/create.h"

#include <fmt/core.h>

#include <bit>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/cuda/memory.h"
#include "ddp/shm/cpu_backend.h"
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
    [[nodiscard]] std::byte* host_of(const ConstBuffer& buffer) const {
        const auto* const data = static_cast<const std::byte*>(buffer.data);
        if (!is_pinned || data < device.get() || data + buffer.bytes() > device.get() + host.size())
            return nullptr;
        return host.data() + (data - device.get());
    }
};

/// Each call is one task of a thread: wait for the program's stream, copy, run the collective on the host,
/// copy back.
class StagedGroup final : public ProcessGroup {
  public:
    StagedGroup(StagedParts parts, const ddprun::WorkerEnv& env, const ProcessGroupOptions& options)
        : parts_(std::move(parts)),
          env_(env),
          options_(options),
          owned_backend_(new cpu::CpuBackend(parts_.segment, env, options.timeout)) {
        begin();
    }
    StagedGroup(const StagedGroup& parent, std::unique_ptr<cpu::Backend> backend)
        : parts_(parent.parts_),
          env_(parent.env_),
          options_(parent.options_),
          owned_backend_(backend.release()) {
        begin();
    }

    void* stream() const override { return options_.stream; }
    std::string describe() const override {
        return fmt::format("staged (device memory through the host, rank {} on device {}; {})", env_.rank,
                           parts_.device, backend_.describe());
    }
    double communication_seconds() const override { return backend_.node().steps.communication_seconds(); }
    double waiting_seconds() const override { return backend_.node().steps.waiting_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        backend_.node().report_progress(step, samples);
    }

  private:
    void require_quiet() override {
        if (latest_ != nullptr && !latest_->is_done())
            throw Error(
                fmt::format("rank {}: a collective is in flight; wait for its Work first", env_.rank));
        backend_.node().steps.throw_if_broken();
    }
    Work start(std::span<const Operation> operations) override {
        const Call call = call_of(operations);
        Work work =
            post(name_of(call),
                 [this, copy = std::vector(operations.begin(), operations.end())](const Attempt& attempt) {
                     for (const Operation& operation : copy) run(attempt, operation);
                 });
        // The host ends a barrier, so waiting for it blocks.
        if (call.operation == ddprun::SegmentOp::Barrier) work.synchronize();
        return work;
    }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        run_now("allocate_shared", [&] {
            regions_.push_back(std::make_unique<Region>(gpu_, backend_.allocate_shared(bytes)));
            regions_.back()->device.clear(copies_->get());
            copies_->synchronize();
        });
        return {regions_.back()->device.get(), bytes};
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override {
        std::vector<std::string> all;
        run_now(mark == kSplitMark ? "split" : "all_gather_bytes",
                [&] { all = backend_.all_gather_bytes(mine, mark); });
        return all;
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) override {
        std::unique_ptr<cpu::Backend> backend;
        run_now("split", [&] {
            backend = backend_.split(part.members, [&](const std::string& mine) {
                return backend_.all_gather_bytes(mine, kSplitMark);
            });
        });
        return backend == nullptr ? nullptr : std::make_unique<StagedGroup>(*this, std::move(backend));
    }

    void begin() {
        set_identity({.rank = backend_.rank(),
                      .size = backend_.size(),
                      .device = {Device::Kind::Cuda, parts_.device},
                      .backend = "staged",
                      .world_rank = env_.rank,
                      .timeout = options_.timeout});
        run_now("opening the device", [this] {
            cuda::check(cudaSetDevice(parts_.device), "choosing the CUDA device");
            cuda::leave_captures_alone();
            gpu_ = cuda::Gpu::of(parts_.device);
            copies_.emplace(gpu_, cuda::Priority::High);
            copied_.emplace();
        });
    }
    /// The name and the time limit of a wait.
    struct Attempt {
        std::string name;
        std::chrono::nanoseconds limit;
    };
    /// Runs the task on the thread, after the program's stream.
    template <class Task>
    Work post(const std::string& call, Task task) {
        refuse_capture(call);
        // The calling thread may use another device, or none yet.
        const cuda::DeviceScope here(parts_.device);
        const auto ready = std::make_shared<cuda::Event>();
        ready->record(static_cast<cuda::Stream>(options_.stream));
        const auto state = latest_ = std::make_shared<Work::State>();
        thread_->post([this, state, ready, task = std::move(task),
                       attempt = Attempt{fmt::format("rank {}: {}", env_.rank, call), timeout()}] {
            std::exception_ptr failure;
            try {
                wait_for_program(*ready, attempt);
                backend_.node().set_timeout(attempt.limit);
                task(attempt);
            } catch (...) {
                // Peers must not wait for a collective that this rank will not call.
                failure = std::current_exception();
                backend_.node().steps.mark_broken(failure);
            }
            state->finish(failure);
        });
        return Work(state);
    }
    void run_now(const std::string& call, const std::function<void()>& task) {
        post(call, [&task](const Attempt&) { task(); }).synchronize();
    }

    /// Copies the input to the host, runs the operation there, copies the output back.
    void run(const Attempt& attempt, const Operation& operation) {
        Operation host = operation;
        std::size_t copies = 0;
        const auto fetch = [&](const ConstBuffer& buffer) {
            Buffer there{host_of(buffer, copies++), buffer.count, buffer.dtype, {}};
            copy(attempt.name, there.data, buffer.data, buffer.bytes());
            return there;
        };
        const auto place_for = [&](const Buffer& buffer) {
            return Buffer{host_of(buffer, copies++), buffer.count, buffer.dtype, {}};
        };
        if (operation.in.count > 0) host.in = fetch(operation.in);
        if (operation.out.data == operation.in.data) host.out = writable(host.in);
        else if (operation.out.count > 0) host.out = place_for(operation.out);
        for (Message& one : host.messages)
            one.buffer =
                one.direction == Message::Direction::Send ? fetch(one.buffer) : place_for(one.buffer);
        if (copies > 0) wait_for_copies(attempt);
        backend_.run(host);
        copy(attempt.name, operation.out.data, host.out.data, operation.out.bytes());
        for (std::size_t i = 0; i < host.messages.size(); ++i) {
            const Buffer &device = operation.messages[i].buffer, &there = host.messages[i].buffer;
            if (host.messages[i].direction == Message::Direction::Recv)
                copy(attempt.name, device.data, there.data, device.bytes());
        }
        if (copies > 0) wait_for_copies(attempt);
    }
    void copy(const std::string& name, void* to, const void* from, std::size_t bytes) const {
        if (bytes > 0)
            cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, copies_->get()), name.c_str());
    }
    /// Page-locked memory for buffer `which` of a collective, kept for the next one.
    void* host_of(const ConstBuffer& device, std::size_t which) {
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
    /// A lost peer does not end this wait: the copies need no peer, and the group's end unmaps their memory.
    void wait_for_copies(const Attempt& attempt) const {
        copied_->record(copies_->get());
        poll(*copied_, attempt, [] {});
    }
    void wait_for_program(const cuda::Event& ready, const Attempt& attempt) const {
        poll(ready, attempt,
             [&] { throw_if_lost(parts_.segment->header(), attempt.name + ": waiting for the device"); });
    }
    /// Polls instead of blocking: a device that hangs must not keep this rank past its time-out.
    template <class Check>
    void poll(const cuda::Event& event, const Attempt& attempt, Check between) const {
        constexpr std::chrono::microseconds kPoll{20};
        const auto deadline = ddprun::deadline_after(MonotonicClock::now(), attempt.limit);
        for (cudaError_t code; (code = event.query()) != cudaSuccess; std::this_thread::sleep_for(kPoll)) {
            if (code != cudaErrorNotReady) cuda::check(code, attempt.name.c_str());
            between();
            if (MonotonicClock::now() >= deadline)
                throw TimeoutError(fmt::format("{}: the device did not reach it within {}", attempt.name,
                                               ddprun::format_duration(attempt.limit)));
        }
    }

    void refuse_capture(const std::string& call) const {
        if (!cuda::is_capturing(static_cast<cuda::Stream>(options_.stream))) return;
        throw InvalidInput(
            fmt::format("{}: the staged backend works on the host and cannot be part of a CUDA "
                        "graph: train without one, or with backend nccl",
                        call));
    }

    const StagedParts parts_;
    const ddprun::WorkerEnv env_;
    const ProcessGroupOptions options_;
    const OwnedByProcess<cpu::Backend> owned_backend_;
    cpu::Backend& backend_ = *owned_backend_;
    std::shared_ptr<Work::State> latest_;  ///< of the latest call
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
