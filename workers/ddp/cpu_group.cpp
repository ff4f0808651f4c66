#include "ddp/cpu_group.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

#include "ddp/cpu_backend.h"
#include "ddp/progress_thread.h"
#include "ddp/work.h"

namespace ddp {

namespace {

using Progress = ProcessGroupOptions::Progress;

// The messages are made only when they are thrown: formatting one takes longer than a small collective.

void require_buffer(const char* call, const Buffer& buffer) {
    if (buffer.data == nullptr && buffer.count > 0)
        throw InvalidInput(fmt::format("{}: the buffer is null", call));
    if (buffer.device.kind == Device::Kind::Cpu) return;
    throw InvalidInput(fmt::format("{}: the cpu backend takes host memory, the buffer lies on CUDA device {}",
                                   call, buffer.device.index));
}

void require_reducible(const char* call, const Buffer& buffer, ReduceOp op) {
    if (cpu::is_reducible(buffer.dtype, op)) return;
    throw InvalidInput(fmt::format("{}: no {} of {} buffers", call, name_of(op), name_of(buffer.dtype)));
}

void require_root(const char* call, int root, int size) {
    if (root >= 0 && root < size) return;
    throw InvalidInput(fmt::format("{}: root {} is not a rank of 0-{}", call, root, size - 1));
}

void require_n_times(const char* call, const char* large_name, const Buffer& large, const Buffer& small,
                     int n) {
    if (large.dtype != small.dtype) {
        throw InvalidInput(fmt::format("{}: one buffer is {}, the other {}", call, name_of(small.dtype),
                                       name_of(large.dtype)));
    }
    const std::size_t needed = small.count * static_cast<std::size_t>(n);
    if (large.count == needed) return;
    throw InvalidInput(fmt::format("{}: {} has {} elements, {} ranks of {} need {}", call, large_name,
                                   large.count, n, small.count, needed));
}

/// Checks arguments and decides which thread runs a collective; the backend does the rest.
class CpuGroup final : public ProcessGroup {
  public:
    CpuGroup(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
             const ProcessGroupOptions& options)
        : backend_(std::move(segment), env, options.timeout) {
        const bool has_spare_core = backend_.roster().cpus >= 2 * backend_.size();
        const bool threaded = options.progress == Progress::Auto ? has_spare_core && backend_.size() > 1
                                                                 : options.progress == Progress::Thread;
        if (threaded) progress_.emplace();
    }

    int rank() const override { return backend_.rank(); }
    int size() const override { return backend_.size(); }
    std::string describe() const override {
        return backend_.describe() + (progress_ ? ", progress thread" : "");
    }
    double communication_seconds() const override { return backend_.communication_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        backend_.report_progress(step, samples);
    }

    Work all_reduce(Buffer buffer, ReduceOp op) override {
        require_buffer("all_reduce", buffer);
        require_reducible("all_reduce", buffer, op);
        return run([this, buffer, op] { backend_.all_reduce(buffer, op); });
    }
    Work broadcast(Buffer buffer, int root) override {
        require_buffer("broadcast", buffer);
        require_root("broadcast", root, size());
        return run([this, buffer, root] { backend_.broadcast(buffer, root); });
    }
    Work all_gather(Buffer output, Buffer input) override {
        require_buffer("all_gather", output);
        require_buffer("all_gather", input);
        require_n_times("all_gather", "output", output, input, size());
        return run([this, output, input] { backend_.all_gather(output, input); });
    }
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        require_buffer("reduce_scatter", output);
        require_buffer("reduce_scatter", input);
        require_n_times("reduce_scatter", "input", input, output, size());
        require_reducible("reduce_scatter", input, op);
        return run([this, output, input, op] { backend_.reduce_scatter(output, input, op); });
    }
    Work barrier() override {
        return run([this] { backend_.barrier(); });
    }
    std::span<std::byte> allocate_shared(std::size_t bytes) override {
        std::span<std::byte> region;
        run([&] { region = backend_.allocate_shared(bytes); }).wait();
        return region;
    }
    std::vector<std::string> all_gather_bytes(std::string_view mine) override {
        std::vector<std::string> all;
        run([&] { all = backend_.all_gather_bytes(mine); }).wait();
        return all;
    }

  private:
    template <class Collective>
    Work run(Collective collective) {
        if (!progress_) return run_here(collective);
        auto state = std::make_shared<Work::State>();
        progress_->post([state, collective] {
            std::exception_ptr failure;
            try {
                collective();
            } catch (...) {
                failure = std::current_exception();
            }
            state->finish(std::move(failure));
        });
        return Work(std::move(state));
    }
    template <class Collective>
    static Work run_here(Collective& collective) {
        try {
            collective();
            return Work();
        } catch (...) {
            auto state = std::make_shared<Work::State>();
            state->finish(std::current_exception());
            return Work(std::move(state));
        }
    }

    cpu::CpuBackend backend_;
    std::optional<ProgressThread> progress_;  // last: it ends before the backend that its tasks use
};

}  // namespace

std::unique_ptr<ProcessGroup> make_cpu_group(std::shared_ptr<SegmentMap> segment,
                                             const ddprun::WorkerEnv& env,
                                             const ProcessGroupOptions& options) {
    return std::make_unique<CpuGroup>(std::move(segment), env, options);
}

}  // namespace ddp
