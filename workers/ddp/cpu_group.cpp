#include "ddp/cpu_group.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

#include "ddp/argument_checks.h"
#include "ddp/cpu_backend.h"
#include "ddp/division.h"
#include "ddp/progress_thread.h"
#include "ddp/work.h"

namespace ddp {

namespace {

using Progress = ProcessGroupOptions::Progress;

/// Checks arguments and decides which thread runs a collective; the backend does the rest.
class CpuGroup final : public ProcessGroup {
  public:
    CpuGroup(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
             const ProcessGroupOptions& options)
        : env_(env), wanted_(options.progress), backend_(std::move(segment), env, options.timeout) {
        choose_thread();
    }
    CpuGroup(const CpuGroup& parent, const cpu::Division& part)
        : env_(parent.env_),
          wanted_(parent.wanted_),
          backend_(parent.backend_, part.members, part.share, parent.env_) {
        choose_thread();
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
        require_host_buffer("all_reduce", buffer);
        require_reducible("all_reduce", buffer, op);
        return run([this, buffer, op] { backend_.all_reduce(buffer, op); });
    }
    Work broadcast(Buffer buffer, int root) override {
        require_host_buffer("broadcast", buffer);
        require_root("broadcast", root, size());
        return run([this, buffer, root] { backend_.broadcast(buffer, root); });
    }
    Work all_gather(Buffer output, Buffer input) override {
        require_host_buffer("all_gather", output);
        require_host_buffer("all_gather", input);
        require_n_times("all_gather", "output", output, input, size());
        return run([this, output, input] { backend_.all_gather(output, input); });
    }
    Work reduce_scatter(Buffer output, Buffer input, ReduceOp op) override {
        require_host_buffer("reduce_scatter", output);
        require_host_buffer("reduce_scatter", input);
        require_n_times("reduce_scatter", "input", input, output, size());
        require_reducible("reduce_scatter", input, op);
        return run([this, output, input, op] { backend_.reduce_scatter(output, input, op); });
    }
    Work reduce(Buffer buffer, int root, ReduceOp op) override {
        require_host_buffer("reduce", buffer);
        require_root("reduce", root, size());
        require_reducible("reduce", buffer, op);
        return run([this, buffer, root, op] { backend_.reduce(buffer, root, op); });
    }
    Work gather(Buffer output, Buffer input, int root) override {
        require_host_buffer("gather", input);
        require_root("gather", root, size());
        if (rank() == root) {
            require_host_buffer("gather", output);
            require_n_times("gather", "output", output, input, size());
        }
        return run([this, output, input, root] { backend_.gather(output, input, root); });
    }
    Work scatter(Buffer output, Buffer input, int root) override {
        require_host_buffer("scatter", output);
        require_root("scatter", root, size());
        if (rank() == root) {
            require_host_buffer("scatter", input);
            require_n_times("scatter", "input", input, output, size());
        }
        return run([this, output, input, root] { backend_.scatter(output, input, root); });
    }
    Work all_to_all(Buffer output, Buffer input) override {
        require_host_buffer("all_to_all", output);
        require_host_buffer("all_to_all", input);
        require_slices("all_to_all", output, input, size());
        return run([this, output, input] { backend_.all_to_all(output, input); });
    }
    Work send(Buffer buffer, int to) override {
        require_host_buffer("send", buffer);
        require_peer("send", to, rank(), size());
        return run([this, buffer, to] { backend_.send(buffer, to); });
    }
    Work recv(Buffer buffer, int from) override {
        require_host_buffer("recv", buffer);
        require_peer("recv", from, rank(), size());
        return run([this, buffer, from] { backend_.recv(buffer, from); });
    }
    std::unique_ptr<ProcessGroup> split(int color, int key) override {
        std::optional<cpu::Division> part;
        run([&] { part = cpu::divide(backend_, color, key); }).wait();
        if (!part) return nullptr;
        return std::make_unique<CpuGroup>(*this, *part);
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
    static void require_host_buffer(const char* call, const Buffer& buffer) {
        require_buffer(call, buffer);
        if (buffer.device.kind == Device::Kind::Cpu) return;
        throw InvalidInput(
            fmt::format("{}: the cpu backend takes host memory, the buffer lies on CUDA device {}", call,
                        buffer.device.index));
    }

    void choose_thread() {
        const bool has_spare_core = backend_.roster().cpus >= 2 * backend_.size();
        const bool threaded =
            wanted_ == Progress::Auto ? has_spare_core && backend_.size() > 1 : wanted_ == Progress::Thread;
        if (threaded) progress_.emplace();
    }

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

    const ddprun::WorkerEnv env_;
    const Progress wanted_;
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
