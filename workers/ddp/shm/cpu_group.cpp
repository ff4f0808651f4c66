#include <fmt/core.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "ddp/shm/cpu_backend.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/work.h"

namespace ddp::cpu {

namespace {

using Progress = ProcessGroupOptions::Progress;

/// The collectives of a group and of those split off, of one rank.
struct Outstanding {
    std::atomic<int> in_flight = 0;  ///< that progress threads have not finished
    std::mutex mutex;
    std::exception_ptr failure;  ///< of the first that has failed

    void fail(std::exception_ptr with) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::move(with);
    }
    void require_none(int rank) {
        if (in_flight.load(std::memory_order_acquire) > 0)
            throw Error(fmt::format("rank {}: a collective is in flight; wait for its Work first", rank));
        const std::lock_guard lock(mutex);
        if (failure) std::rethrow_exception(failure);
    }
};

/// Decides which thread runs a collective; the backend runs it.
class CpuGroup final : public ProcessGroup {
  public:
    CpuGroup(std::unique_ptr<Backend> backend, int world_rank, Progress wanted,
             std::chrono::nanoseconds timeout, std::shared_ptr<Outstanding> outstanding)
        : world_rank_(world_rank),
          wanted_(wanted),
          backend_(backend.release()),
          outstanding_(std::move(outstanding)) {
        take_identity(timeout);
    }

    std::string describe() const override {
        return backend_->describe() + (progress_ ? ", progress thread" : "");
    }
    double communication_seconds() const override { return node_.steps.communication_seconds(); }
    double waiting_seconds() const override { return node_.steps.waiting_seconds(); }
    std::span<std::byte> shared_by_all(std::span<std::byte> mine) override {
        return static_cast<int>(node_.size) == size() ? node_.shared_by_all(mine) : std::span<std::byte>();
    }
    bool is_over() const override { return node_.segment->header().aborted.load() != 0; }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        node_.report_progress(step, samples);
    }

  private:
    void require_quiet() override {
        outstanding_->require_none(world_rank_);
        node_.steps.throw_if_broken();
    }
    Work start(std::span<const Operation> operations) override {
        const auto run_all = [this](const auto& all) {
            try {
                for (const Operation& operation : all) {
                    trace::Begun message;  // Lockstep traces collectives
                    if (trace::is_on() && operation.is_message())
                        message = trace::begin_collective(operation.call, 0, now_ns());
                    backend_->run(operation);
                    trace::end(message);
                }
            } catch (...) {
                outstanding_->fail(std::current_exception());
                throw;
            }
        };
        if (!progress_) return run_here([&] { run_all(operations); });
        return post([run_all, copy = std::vector(operations.begin(), operations.end())] { run_all(copy); });
    }
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        std::span<std::byte> region;
        run([&] { region = backend_->allocate_shared(bytes); }).wait();
        return region;
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override {
        std::vector<std::string> all;
        run([&] { all = backend_->all_gather_bytes(mine, mark); }).wait();
        return all;
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) override {
        std::unique_ptr<Backend> backend;
        const auto exchange = [&](const std::string& mine) {
            return backend_->all_gather_bytes(mine, kSplitMark);
        };
        run([&] { backend = backend_->split(part.members, exchange); }).wait();
        return backend == nullptr ? nullptr : group_over(std::move(backend));
    }
    std::unique_ptr<ProcessGroup> do_create_part(const std::vector<std::uint32_t>& members,
                                                 const std::string& name) override {
        std::unique_ptr<Backend> backend;
        const auto exchange = [&](const std::string& mine) { return exchange_among(members, mine); };
        run([&] {
            for (const std::string& other : exchange(name)) {
                if (!other.empty() && other != name)
                    throw MismatchError(fmt::format("rank {}: create_part: this rank makes {}, another {}",
                                                    world_rank_, name, other));
            }
            backend = backend_->split(members, exchange);
        }).wait();
        return group_over(std::move(backend));
    }
    std::unique_ptr<ProcessGroup> group_over(std::unique_ptr<Backend> backend) const {
        return std::make_unique<CpuGroup>(std::move(backend), world_rank_, wanted_, identity().timeout,
                                          outstanding_);
    }
    /// Exchanges texts of `members` by messages, in which no other rank takes part: lengths, then texts.
    std::vector<std::string> exchange_among(const std::vector<std::uint32_t>& members, std::string mine) {
        std::vector<std::string> texts(static_cast<std::size_t>(backend_->size()));
        std::vector<std::int64_t> lengths(texts.size());
        std::int64_t length = static_cast<std::int64_t>(mine.size());
        const auto exchange = [&](const Buffer& given, const auto& place_of) {
            Operation batch{.call = {.root = kBatchMark, .operation = ddprun::SegmentOp::Send}};
            for (const std::uint32_t member : members) {
                const int peer = static_cast<int>(member);
                if (peer == rank()) continue;
                batch.messages.push_back({Message::Direction::Send, given, peer});
                batch.messages.push_back({Message::Direction::Recv, place_of(member), peer});
            }
            if (!batch.messages.empty()) backend_->run(batch);
        };
        const auto whole = [](std::string& text) { return Buffer{text.data(), text.size(), DType::U8, {}}; };
        exchange(buffer_of(std::span(&length, 1)),
                 [&](std::uint32_t member) { return buffer_of(std::span(&lengths[member], 1)); });
        exchange(whole(mine), [&](std::uint32_t member) {
            texts[member].resize(static_cast<std::size_t>(lengths[member]));
            return whole(texts[member]);
        });
        texts[static_cast<std::size_t>(rank())] = std::move(mine);
        return texts;
    }

    void take_identity(std::chrono::nanoseconds timeout) {
        const bool has_spare_core = node_.cpus.cpus >= 2 * node_.cpus.ranks;
        const bool threaded =
            wanted_ == Progress::Auto ? has_spare_core && backend_->size() > 1 : wanted_ == Progress::Thread;
        if (threaded) progress_ = make_owned<ProgressThread>();
        set_identity({.rank = backend_->rank(),
                      .size = backend_->size(),
                      .world_rank = world_rank_,
                      .timeout = timeout});
    }

    template <class Collective>
    Work run(const Collective& collective) {
        return progress_ ? post(collective) : run_here(collective);
    }
    template <class Collective>
    Work post(Collective collective) {
        auto state = std::make_shared<Work::State>();
        outstanding_->in_flight.fetch_add(1, std::memory_order_relaxed);
        progress_->post([this, state, collective = std::move(collective), limit = timeout()] {
            std::exception_ptr failure;
            try {
                node_.set_timeout(limit);
                collective();
            } catch (...) {
                failure = std::current_exception();
            }
            outstanding_->in_flight.fetch_sub(1, std::memory_order_release);
            state->finish(std::move(failure));
        });
        return Work(std::move(state));
    }
    template <class Collective>
    Work run_here(const Collective& collective) {
        try {
            node_.set_timeout(timeout());
            collective();
            return Work();
        } catch (...) {
            auto state = std::make_shared<Work::State>();
            state->finish(std::current_exception());
            return Work(std::move(state));
        }
    }

    const int world_rank_;
    const Progress wanted_;
    OwnedByProcess<Backend> backend_;
    Node& node_ = backend_->node();
    const std::shared_ptr<Outstanding> outstanding_;
    OwnedByProcess<ProgressThread> progress_;  // last: its thread ends before the backend that its tasks use
};

}  // namespace

std::unique_ptr<ProcessGroup> make_group(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options) {
    return make_group(std::make_unique<CpuBackend>(std::move(segment), env, options.timeout), env, options);
}

std::unique_ptr<ProcessGroup> make_group(std::unique_ptr<Backend> backend, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options) {
    return std::make_unique<CpuGroup>(std::move(backend), env.rank, options.progress, options.timeout,
                                      std::make_shared<Outstanding>());
}

}  // namespace ddp::cpu
