#include "ddp/mpi/group.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "ddp/cuda/cast.h"
#include "ddp/mpi/load.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/operation.h"
#include "ddp/worker/private_memory.h"
#include "ddp/worker/work.h"
#include "env/io/library.h"
#include "env/text.h"

namespace ddp::mpi {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;

namespace {

void check(const char* why, const std::string& attempt) {
    if (why != nullptr) throw Error(fmt::format("{}: {}", attempt, why));
}

bool is_half(DType type) { return type == DType::BF16 || type == DType::F16; }

std::vector<float> widened(const ConstBuffer& buffer) {
    std::vector<float> wide(buffer.count);
    device::to_floats(*cuda::element_type(buffer.dtype), buffer.data, wide.data(), wide.size());
    return wide;
}

template <class T>
void divide(const Buffer& buffer, int by) {
    auto* const values = static_cast<T*>(buffer.data);
    for (std::size_t i = 0; i < buffer.count; ++i) values[i] /= static_cast<T>(by);
}

/// The settings that a group and its sub-groups share.
struct GroupSettings {
    std::string library;
    bool has_thread = false;
};

/// True when a thread for calls has a core: other ranks of the node may share this rank's affinity, or each
/// rank may have its own.
bool has_spare_core(const ddprun::WorkerEnv& env) {
    cpu_set_t own;
    const int cpus = ::sched_getaffinity(0, sizeof own, &own) == 0 ? CPU_COUNT(&own) : 1;
    return cpus >= 2 && ::sysconf(_SC_NPROCESSORS_ONLN) >= 2 * env.local_world_size;
}

bool wants_thread(const ProcessGroupOptions& options, const About& about, const ddprun::WorkerEnv& env) {
    using Progress = ProcessGroupOptions::Progress;
    if (options.progress == Progress::Thread && !about.takes_threads)
        throw InvalidInput(fmt::format(
            "backend mpi: {} was started for one thread: start it with MPI_THREAD_MULTIPLE, or ask for Progress::Inline",
            about.library));
    if (options.progress == Progress::Auto)
        return about.takes_threads && env.world_size > 1 && has_spare_core(env);
    return options.progress == Progress::Thread;
}

/// Counts by rank as MPI takes them, with their offsets.
struct IntCounts {
    explicit IntCounts(const Counts& sizes) {
        std::size_t at = 0;
        for (const std::size_t size : sizes) {
            if (at + size > static_cast<std::size_t>(std::numeric_limits<int>::max())) throw Error(kTooMany);
            counts.push_back(static_cast<int>(size));
            offsets.push_back(static_cast<int>(at));
            at += size;
        }
    }
    [[nodiscard]] Cut cut() const { return {counts.data(), offsets.data()}; }
    std::vector<int> counts, offsets;
};

/// Keeps memory until the process ends: MPI cannot cancel pending operations, and may still write there.
void keep_for_ever(std::shared_ptr<void> memory) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::shared_ptr<void>>;
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(memory));
}

class Group final : public ProcessGroup {
  public:
    Group(const Module& module, Communicator* communicator, const GroupSettings& settings,
          const ddprun::WorkerEnv& env, std::chrono::nanoseconds timeout)
        : module_(module), communicator_(communicator), settings_(settings), env_(env) {
        int rank = 0, size = 1;
        check(module.place(communicator, &rank, &size), fmt::format("rank {}: joining", env.rank));
        set_identity(
            {.rank = rank, .size = size, .backend = "mpi", .world_rank = env.rank, .timeout = timeout});
        if (env.segment_fd >= 0)
            segment_ =
                std::make_unique<SegmentMap>(ddprun::UniqueFd(::fcntl(env.segment_fd, F_DUPFD_CLOEXEC, 0)));
        if (settings_.has_thread) progress_ = make_owned<ProgressThread>();
    }
    ~Group() override {
        progress_.reset();
        if (is_in_forked_child()) return;
        if (broken_) keep_for_ever(std::make_shared<decltype(memory_)>(std::move(memory_)));
        module_.close(communicator_);
    }

    std::string describe() const override {
        return fmt::format("mpi ({}, {})", settings_.library,
                           progress_ ? "progress thread" : "in the calling thread");
    }
    double communication_seconds() const override { return static_cast<double>(inside_ns_) * 1e-9; }
    void report_progress(std::uint64_t step, std::uint64_t samples) override {
        if (segment_) ddp::report_progress(line(), step, samples);
    }

  private:
    std::span<std::byte> do_allocate_shared(std::size_t bytes) override {
        return {memory_.emplace_back(private_memory(bytes)).get(), bytes};
    }
    Work start(std::span<const ddp::Operation> operations) override {
        return run(call_of(operations),
                   [this, copy = std::vector(operations.begin(), operations.end())](Call call) {
                       for (const ddp::Operation& operation : copy) {
                           const std::uint64_t seq = std::exchange(call, operation.call).seq;
                           call.seq = seq;
                           carry_out(call, operation);
                       }
                   });
    }
    std::vector<std::string> do_all_gather_bytes(std::string_view mine, std::int16_t mark) override {
        const auto ranks = static_cast<std::size_t>(size());
        std::vector<std::string> all(ranks);
        run({.root = mark, .operation = SegmentOp::AllGather}, [&](const Call& call) {
            const std::uint64_t& length = temporary(std::uint64_t{mine.size()});
            std::vector<std::uint64_t>& lengths = temporary(std::vector<std::uint64_t>(ranks));
            execute(call, {{.operation = SegmentOp::AllGather,
                            .in = &length,
                            .out = lengths.data(),
                            .count = sizeof length}});
            const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
            std::string &padded = temporary(std::string(mine)),
                        &joined = temporary(std::string(longest * ranks, '\0'));
            padded.resize(longest);
            execute(call, {{.operation = SegmentOp::AllGather,
                            .in = padded.data(),
                            .out = joined.data(),
                            .count = longest}});
            for (std::size_t r = 0; r < ranks; ++r) all[r] = joined.substr(r * longest, lengths[r]);
        }).wait();
        return all;
    }
    std::unique_ptr<ProcessGroup> do_split(const SubGroup& part) override {
        Communicator* made = nullptr;
        run({.root = kSplitMark, .operation = SegmentOp::AllGather}, [&](const Call& call) {
            check(module_.split(communicator_, part.color, part.key, &made), named(call));
        }).wait();
        if (made == nullptr) return nullptr;
        return std::make_unique<Group>(module_, made, settings_, env_, identity().timeout);
    }

    void carry_out(const Call& call, const ddp::Operation& one) {
        const Buffer& out = one.out;
        const ConstBuffer& in = one.in;
        Operation operation{.operation = call.operation,
                            .in = in.data,
                            .out = out.data,
                            .count = call.bytes / size_of(call.dtype),
                            .dtype = call.dtype,
                            .peer = one.root};
        if (one.is_uneven()) {
            require_fitting_counts(call, one.counts());
            operation.count = in.count;
            operation.out_cut = cut_by(call.operation == SegmentOp::ReduceScatter ? one.sent : one.received);
            operation.in_cut = cut_by(one.sent);
        }
        switch (call.operation) {
            case SegmentOp::AllReduce:
                if (in.data == out.data) operation.in = nullptr;
                return reduce_by(call, operation, in, out);
            case SegmentOp::Reduce:
                if (rank() != one.root) return reduce_by(call, operation, in, temporary_buffer(in));
                operation.in = nullptr;
                return reduce_by(call, operation, in, out);
            case SegmentOp::ReduceScatter: {
                // A separate result, because output may be a slice of the input.
                const Buffer result = temporary_buffer(out);
                reduce_by(call, operation, in, result);
                if (out.count > 0) std::memcpy(out.data, result.data, out.bytes());
                return;
            }
            case SegmentOp::Broadcast:
                if (rank() == one.root) operation.out = writable(in).data;
                return execute(call, {operation});
            case SegmentOp::AllGather:
                if (in.data == one.slices_of_out().of(out, rank()).data) operation.in = nullptr;
                return execute(call, {operation});
            case SegmentOp::Gather:
                if (rank() == one.root && in.data == one.slices_of_out().of(out, rank()).data)
                    operation.in = nullptr;
                return execute(call, {operation});
            case SegmentOp::Scatter:
                if (rank() == one.root && out.data == one.slices_of_in().of(in, rank()).data)
                    operation.out = nullptr;
                return execute(call, {operation});
            case SegmentOp::AllToAll: return execute(call, {operation});
            case SegmentOp::Barrier: return execute(call, {{}});
            default: break;
        }
        with_messages(one, [&](std::span<const Message> messages) {
            std::vector<Operation> operations;
            for (const Message& message : messages) {
                const Buffer& buffer = message.buffer;
                operations.push_back({.operation = message.direction == Message::Direction::Send
                                                       ? SegmentOp::Send
                                                       : SegmentOp::Recv,
                                      .in = buffer.data,
                                      .out = buffer.data,
                                      .count = buffer.count,
                                      .dtype = buffer.dtype,
                                      .peer = message.peer});
            }
            execute(call, operations);
        });
    }
    Cut cut_by(const Counts& counts) { return temporary(IntCounts(counts)).cut(); }
    Buffer temporary_buffer(const ConstBuffer& like) {
        return {temporary(std::vector<std::byte>(like.bytes())).data(), like.count, like.dtype, {}};
    }
    void require_fitting_counts(const Call& call, const Counts& own) {
        Counts& mine = temporary(Counts{static_cast<std::size_t>(env_.rank)});
        mine.insert(mine.end(), own.begin(), own.end());
        Counts& joined = temporary(Counts(mine.size() * static_cast<std::size_t>(size())));
        static_assert(sizeof joined[0] == sizeof(std::int64_t));
        execute(call, {{.operation = SegmentOp::AllGather,
                        .in = mine.data(),
                        .out = joined.data(),
                        .count = mine.size(),
                        .dtype = DType::I64}});
        std::vector<Counts> all;
        for (auto at = joined.begin(); at != joined.end(); at += static_cast<long>(mine.size()))
            all.emplace_back(at, at + static_cast<long>(mine.size()));
        if (const std::string why = compare_counts(call.operation, all); !why.empty())
            throw MismatchError(name_of(call) + ": " + why);
    }

    /// Runs the call in order, here or in the progress thread; its Work holds the failure, as do those of all
    /// later calls.
    template <class CarryOut>
    Work run(const Call& call, CarryOut carry_out) {
        auto state = std::make_shared<Work::State>();
        const auto task = [this, state, call, carry_out, limit = timeout()] {
            limit_ = limit;
            state->finish(outcome_of(call, carry_out));
        };
        progress_ ? progress_->post(task) : task();
        return Work(std::move(state));
    }
    /// Gives the call its sequence number.
    template <class CarryOut>
    std::exception_ptr outcome_of(Call call, const CarryOut& carry_out) {
        call.seq = ++seq_;
        const std::int64_t began = now_ns();
        try {
            if (broken_) std::rethrow_exception(broken_);
            write_start(call, began);
            trace::Begun traced;
            if (trace::is_on())
                traced =
                    trace::begin_collective(call, has_line(call) ? traced_group_ : std::uint16_t{0}, began);
            carry_out(call);
            trace::end(traced);
            write_end(call, began);
        } catch (...) {
            if (!broken_) module_.abandon();
            broken_ = std::current_exception();
            for (std::shared_ptr<void>& one : temporaries_) keep_for_ever(std::move(one));
        }
        temporaries_.clear();
        return broken_;
    }
    /// Owns memory that MPI reads or writes during the current call.
    template <class T>
    T& temporary(T value) {
        const auto made = std::make_shared<T>(std::move(value));
        temporaries_.push_back(made);
        return *made;
    }

    /// Starts all operations and waits for all of them.
    void execute(const Call& call, const std::vector<Operation>& operations) {
        std::vector<Request*> open;
        for (const Operation& operation : operations)
            check(module_.begin(communicator_, &operation, &open.emplace_back()), named(call));
        const auto deadline = ddprun::deadline_after(MonotonicClock::now(), limit_);
        constexpr int kTurns = 64;  // polls of MPI for each reading of the clock
        for (int turn = 0; !open.empty(); ++turn) {
            std::erase_if(open, [&](Request* one) {
                bool done = false;
                check(module_.test(one, &done), named(call));
                return done;
            });
            if (open.empty() || turn % kTurns != kTurns - 1) continue;
            if (segment_) throw_if_lost(segment_->header(), named(call));
            if (MonotonicClock::now() >= deadline)
                throw TimeoutError(
                    fmt::format("{} did not finish within {}", named(call), ddprun::format_duration(limit_)));
            ::sched_yield();  // ranks may share cores
        }
    }

    /// 16-bit types are reduced as float; an average is a sum, divided where the result lies.
    void reduce_by(const Call& call, Operation operation, const ConstBuffer& from, const Buffer& to) {
        Buffer result = to;
        std::vector<float>* wide_out = nullptr;
        if (is_half(from.dtype)) {
            wide_out = &temporary(std::vector<float>(to.count));
            result = buffer_of(*wide_out);
            operation.in = temporary(widened(from)).data();
        }
        operation.out = result.data;
        operation.dtype = result.dtype;
        operation.op = without_division(call.op);
        execute(call, {operation});
        const bool is_mine = call.operation != SegmentOp::Reduce || operation.peer == rank();
        if (!is_mine) return;
        if (call.op == ReduceOp::Avg)
            result.dtype == DType::F64 ? divide<double>(result, size()) : divide<float>(result, size());
        if (wide_out != nullptr)
            device::round_floats(wide_out->data(), *cuda::element_type(to.dtype), to.data, to.count);
    }

    [[nodiscard]] std::string named(const Call& call) const {
        return fmt::format("rank {}: {}", env_.rank, to_string(call));
    }
    [[nodiscard]] ddprun::RankLine& line() const {
        return segment_->line(static_cast<std::uint32_t>(env_.local_rank));
    }
    // The launcher's line is for calls of the world, whose numbers are equal on all ranks.
    [[nodiscard]] bool has_line(const Call& call) const {
        const bool is_message = call.operation == SegmentOp::Send || call.operation == SegmentOp::Recv;
        return segment_ && size() == env_.world_size && !is_message;
    }
    void write_start(const Call& call, std::int64_t now) {
        if (!has_line(call)) return;
        line().bytes.store(call.bytes, std::memory_order_relaxed);
        line().operation.store(static_cast<std::uint32_t>(call.operation), std::memory_order_relaxed);
        line().started_ns.store(now, std::memory_order_relaxed);
        line().started_seq.store(++collectives_, std::memory_order_release);
    }
    void write_end(const Call& call, std::int64_t began) {
        inside_ns_ += now_ns() - began;
        if (!has_line(call)) return;
        line().finished_ns.store(now_ns(), std::memory_order_relaxed);
        line().comm_ns.store(inside_ns_, std::memory_order_relaxed);
        line().finished_seq.store(collectives_, std::memory_order_release);
    }

    const Module& module_;
    Communicator* const communicator_;
    const GroupSettings settings_;
    const ddprun::WorkerEnv env_;
    std::unique_ptr<SegmentMap> segment_;  ///< the launcher's; null without one
    std::vector<std::shared_ptr<std::byte>> memory_;
    std::uint64_t seq_ = 0, collectives_ = 0;
    std::atomic<std::int64_t> inside_ns_ = 0;
    std::exception_ptr broken_;
    const std::uint16_t traced_group_ = trace::current_group();
    std::vector<std::shared_ptr<void>> temporaries_;  ///< of the current call
    std::chrono::nanoseconds limit_{};                ///< of the current call
    OwnedByProcess<ProgressThread> progress_;
};

}  // namespace

std::unique_ptr<ProcessGroup> make_group(const Context& context, const ProcessGroupOptions& options) {
    const ddprun::WorkerEnv& env = context.env();
    const LoadedModule module = load_module();
    Communicator* world = nullptr;
    About about;
    {
        const ddprun::KeptSignals kept;  // MPI loads components, and with them libfabric
        check(module.entries->open(&world, &about), fmt::format("rank {}: backend mpi", env.rank));
    }
    const GroupSettings settings{about.library, wants_thread(options, about, env)};
    auto group = std::make_unique<Group>(*module.entries, world, settings, env, options.timeout);
    if (group->rank() == env.rank && group->size() == env.world_size) return group;
    throw InvalidInput(fmt::format(
        "backend mpi: {} (of {}) says rank {} of {}, the environment rank {} of {}{}{}: start the workers with the "
        "mpiexec of that MPI (under ddprun: one for each rank, with --pass-mpi-env), or build libddp's module "
        "with the MPI whose mpiexec started them",
        about.library, module.name, group->rank(), group->size(), env.rank, env.world_size,
        context.origin().empty() ? "" : " (" + context.origin() + ")",
        module.passed_over.empty() ? "" : "; the likelier module was not taken: " + module.passed_over));
}

}  // namespace ddp::mpi
