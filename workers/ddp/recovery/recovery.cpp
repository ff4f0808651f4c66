#include "ddp/recovery.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "ddp/checkpoint.h"
#include "ddp/cuda/cuda_api.h"
#include "ddp/ddp.h"
#include "ddp/lifeline.h"
#include "ddp/nccl/communicator.h"
#include "ddp/net/link.h"
#include "ddp/optimizer.h"
#include "ddp/recovery/kept.h"
#include "ddp/recovery/transfer.h"
#include "ddp/reduce/model_optimizer.h"
#include "ddp/trace/trace.h"
#include "ddp/worker/error_text.h"
#include "ddp/worker/lifeline_socket.h"
#include "env/clock.h"
#include "env/lifeline.h"
#include "env/print.h"
#include "env/text.h"

// A run is a loop over generations. In each one the ranks make a new group and exchange what they have
// (begin); a rank that has not the newest state gets it; then the body runs. Where a collective of the body
// fails, the rank destroys the group, says that it has let go, and waits for the next generation.
// docs/recovery.md has the argument why no committed unit is lost; these are its parts here:
//   - A failure reaches the body only as an exception of a collective, and commit() calls none: a process
//     completes commit() or ends. Where an exception comes out of commit(), the state is torn, and run()
//     passes every exception on.
//   - Ranks differ by one commit at most, because each unit has a collective in which all wait for all.
//   - Own values for c + 1 commits are in kept memory before that collective, so they are there if any rank
//   has
//     c + 1, whatever happens to this process. A rank may need its copy for c - 1, c or c + 1: three slots.
namespace ddp {

using ddprun::MonotonicClock;

namespace {

/// What a rank says of itself at the start of a generation.
struct Introduction {
    Holder holder;
    std::uint64_t layout = 0;      ///< hash of KeptState::layout
    std::uint32_t world_size = 0;  ///< of the last generation whose body it called; 0: of none
    bool is_used = false;          ///< it was in a generation before
    bool is_torn = false;          ///< it has a part of a state
};

enum class Made : std::uint8_t { None, Alive, Used };
/// Whether this process has a Recovery. Of a thread, because tests run ranks as threads.
constinit thread_local Made recovery_made = Made::None;

bool has_agent(const ddprun::WorkerEnv& env) {
    return env.kept_fd >= 0 && env.lifeline_fd >= 0 && env.segment_fd >= 0;
}

/// Whether groups are for device memory. ProcessGroup::create refuses what this takes for the host.
bool is_on_device(const ProcessGroupOptions& options) {
    return options.backend == "staged" || options.backend == "nccl" ||
           (options.backend == "auto" && options.device.kind == Device::Kind::Cuda);
}

/// Why a failure restarts all ranks; "" where the world can recover in place.
std::string refusal_of(const ddprun::WorkerEnv& env, const ProcessGroupOptions& options) {
    if (options.backend == "mpi")
        return "backend mpi: recovery in place is for backends cpu, nccl and staged";
    if (is_on_device(options) && env.local_world_size != env.world_size)
        return "GPUs of several nodes: recovery in place is for those of one node";
    if (is_on_device(options) && env.world_size == 1) return "one rank: no other has its state";
    const char* const on_gpus = std::getenv("DDP_RECOVER_ON_GPUS");
    if (is_on_device(options) && (on_gpus == nullptr || std::strcmp(on_gpus, "1") != 0))
        return "recovery in place has not run on a GPU yet (DDP_RECOVER_ON_GPUS=1 tries it)";
    return has_agent(env) ? "" : "no ddprun that recovers in place has started this program";
}

/// Abandoned links to other nodes that one process may leave open. Ranks reach their limits one after
/// another, so that the others can replace them.
std::size_t most_leaked_links(int rank) { return 4 + static_cast<std::size_t>(rank % 4); }

SamplerState position_in(const std::string& text) {
    SamplerState state;
    std::memcpy(&state.epoch, text.data(), sizeof state.epoch);
    std::memcpy(&state.consumed, text.data() + sizeof state.epoch, sizeof state.consumed);
    return state;
}

std::string text_of(const SamplerState& state) {
    std::string text(sizeof state.epoch + sizeof state.consumed, '\0');
    std::memcpy(text.data(), &state.epoch, sizeof state.epoch);
    std::memcpy(text.data() + sizeof state.epoch, &state.consumed, sizeof state.consumed);
    return text;
}

/// Sets a value to another one while this object lives, and to nothing afterwards.
template <class T>
class SetWhile {
  public:
    SetWhile(T& place, T value) : place_(place) { place_ = value; }
    ~SetWhile() { place_ = T(); }
    SetWhile(const SetWhile&) = delete;
    SetWhile& operator=(const SetWhile&) = delete;

  private:
    T& place_;
};

}  // namespace

class Recovery::Impl {
  public:
    Impl(const Context& given, ProcessGroupOptions group_options, Lifeline* program_lifeline)
        : context(given),
          options(std::move(group_options)),
          on_device(is_on_device(options)),
          refusal(refusal_of(given.env(), options)),
          lifeline(program_lifeline),
          memory(has_agent(given.env()) ? given.env().kept_fd : -1,
                 static_cast<std::uint32_t>(given.env().local_rank)) {
        if (!has_agent(given.env())) return;
        ::fcntl(given.env().kept_fd, F_SETFD, FD_CLOEXEC);
        socket = lifeline != nullptr ? socket_of(*lifeline)
                                     : std::make_shared<LifelineSocket>(given.env().lifeline_fd);
        report_state("in-place 0");
    }

    void run(const std::function<void(ProcessGroup&, const Start&)>& body) {
        if (std::exchange(has_run, true))
            fail("run() was called before; one run() covers the whole training");
        state.copy(Kind::Moving, moving);
        state.copy(Kind::Own, first_own);
        for (;;) {
            const std::exception_ptr failure = run_generation(body);
            if (!recovers()) {
                if (failure) std::rethrow_exception(failure);
                return;
            }
            if (!failure && !wait_for_release()) return;
            if (failure) wait_for_device();
            if (failure) await_generation(failure);
            enter_generation();
        }
    }

    void prepare() {
        require_running("prepare");
        if (!state.has(Kind::Own)) return;
        state.copy(Kind::Own, own);
        state.note(Kind::Own);
        memory.store(commits + 1, own);
        prepared_at = group->all_rank_calls_;
    }

    void commit(const std::function<void()>& change) {
        require_running("commit");
        require_complete_unit();
        is_in_change = true;
        const SetWhile in_commit(ProcessGroup::is_in_commit_, !is_refused_by_group);
        if (change) change();
        if (const std::string name = state.changed(Kind::Own); !name.empty())
            fail(fmt::format(
                "Own value {} changed after prepare(); prepare() comes after its last change in a unit",
                name));
        state.copy(Kind::Moving, moving);
        if (checks) state.note(Kind::Committed);
        finish_unit();
        is_in_change = false;
    }

    void add(KeptItem item) {
        if (has_run) fail(fmt::format("keep(\"{}\") was called after run()", item.name));
        if (std::ranges::any_of(item.tensors, [](const Tensor& one) { return one.part_begin.has_value(); }))
            refuse(kShardedRefusal);
        if (!on_device && std::ranges::any_of(
                              item.tensors, [](const Tensor& one) { return one.memory.device != Device{}; }))
            throw InvalidInput(fmt::format(
                "recovery: keep(\"{}\"): its memory is on a device, and the group's is not", item.name));
        state.add(std::move(item));
    }
    [[noreturn]] void fail(const std::string& why) const {
        throw Error(fmt::format("rank {}: recovery: {}", context.rank(), why));
    }
    void refuse(const char* why) {
        if (!refusal.empty()) return;
        refusal = why;
        report_state("");
    }

    Context context;
    ProcessGroupOptions options;
    const bool on_device;  ///< the groups are for device memory
    std::uint64_t commits = 0;
    std::string refusal;  ///< why a failure restarts all ranks; "": it does not
    /// What was made over the group cannot be recovered, on any rank: ranks may wait for each other in
    /// commit(), because nobody goes on after a loss.
    bool is_refused_by_group = false;

  private:
    static std::shared_ptr<LifelineSocket> socket_of(const Lifeline& lifeline) { return lifeline.socket_; }
    [[nodiscard]] bool recovers() const { return refusal.empty(); }

    /// Tells the launcher: `joined`, or the reason why this process cannot recover.
    void report_state(const std::string& joined) {
        if (socket != nullptr)
            report(ddprun::lifeline::kReady, refusal.empty() ? joined : "restart " + refusal);
    }
    void report(char kind, const std::string& payload) {
        socket->report(kind, payload, ddprun::deadline_after(MonotonicClock::now(), memory.limit()));
    }

    /// Runs the body in this generation. Returns the failure of a collective after which the next generation
    /// can follow; null when the body has returned.
    std::exception_ptr run_generation(const std::function<void(ProcessGroup&, const Start&)>& body) {
        try {
            const auto owned = ProcessGroup::create(context, options);
            owned->refuse_recovery_ = [this](const char* why) {
                is_refused_by_group = true;
                refuse(why);
            };
            const SetWhile has_group(group, owned.get());
            const bool has_survived = is_used;
            const Start start = begin();
            const std::string joined = fmt::format("in-place {}", context.generation());
            report_state(has_survived ? fmt::format("{} {}", joined, start.commits) : joined);
            begin_unit();
            world_size = static_cast<std::uint32_t>(context.world_size());
            body(*owned, start);
            require_unchanged();
            return nullptr;
        } catch (const PeerLostError&) {
            return outlived();
        } catch (const TimeoutError&) {
            return outlived();
        }
    }

    /// Called in a handler: the failure, where the next generation can follow it; else throws it on.
    [[nodiscard]] std::exception_ptr outlived() const {
        if (is_in_change || !recovers()) throw;
        return std::current_exception();
    }

    /// Brings all ranks to the newest state.
    Start begin() {
        const trace::Scope traced(trace::TraceKind::Recovery, "agree on the state");
        const std::vector<Introduction> all = exchange();
        std::vector<Holder> holders;
        for (const Introduction& one : all) holders.push_back(one.holder);
        Start start{.generation = context.generation()};
        start.world_changed = std::ranges::any_of(all, [&](const Introduction& one) {
            return one.world_size != 0 && one.world_size != static_cast<std::uint32_t>(context.world_size());
        });
        is_used = true;
        const std::uint64_t newest = newest_state(holders);
        if (newest == 0) return begin_new(all, start);
        known_commits = newest;
        const bool has_it = is_whole && commits == newest;
        start.commits = newest;
        start.state = has_it ? Start::State::Own : Start::State::Peers;
        if (has_it) state.restore(Kind::Moving, moving);
        if (const auto rounds = plan_transfers(holders); !rounds.empty()) transfer(rounds, newest);
        restore_own(newest);
        if (checks) state.note(Kind::Committed);
        return start;
    }

    std::vector<Introduction> exchange() {
        const std::string layout = state.layout();
        const std::uint64_t lost = std::max(memory.line().commits.load(), known_commits);
        const Introduction mine{.holder = {.commits = is_whole ? commits : lost,
                                           .is_whole = is_whole,
                                           .node = static_cast<std::uint32_t>(context.env().group_rank)},
                                .layout = std::hash<std::string>()(layout),
                                .world_size = world_size,
                                .is_used = is_used,
                                .is_torn = is_torn};
        const std::vector<Introduction> all = group->all_gather_values(mine);
        for (const Introduction& one : all) {
            if (one.layout != mine.layout) throw_layouts(layout);
        }
        return all;
    }

    /// All ranks see that layouts differ, and show the first difference from rank 0.
    [[noreturn]] void throw_layouts(const std::string& layout) {
        const std::vector<std::string> all = group->all_gather_bytes(layout);
        for (std::size_t rank = 1; rank < all.size(); ++rank) {
            // Each list ends with an empty line, and has no other.
            const auto zeros = ddprun::split(all[0], '\n'), others = ddprun::split(all[rank], '\n');
            const auto [zero, other] = std::ranges::mismatch(zeros, others);
            if (zero == zeros.end()) continue;
            throw MismatchError(
                fmt::format("recovery: rank 0 keeps {}, rank {} keeps {}; call keep() equally on all ranks",
                            zero->empty() ? "nothing" : *zero, rank, other->empty() ? "nothing" : *other));
        }
        throw MismatchError("recovery: ranks run different builds of libddp");
    }

    /// No rank is whole. Right where no process has changed its state yet: all are new, or they have not
    /// committed the first unit, which at most a lost rank has.
    Start begin_new(const std::vector<Introduction>& all, const Start& start) {
        std::uint64_t lost = 0;
        bool all_are_new = true, any_is_torn = false;
        for (const Introduction& one : all) {
            lost = std::max(lost, one.holder.commits);
            all_are_new = all_are_new && !one.is_used;
            any_is_torn = any_is_torn || one.is_torn;
        }
        if (any_is_torn || (lost > 1 && !all_are_new))
            fail(fmt::format("no rank has the state of {} committed units; all ranks start again", lost));
        state.restore(Kind::Moving, moving);
        state.restore(Kind::Own, first_own);
        memory.reset();
        return start;
    }

    void transfer(const std::vector<TransferRound>& rounds, std::uint64_t newest) {
        const trace::Scope traced(trace::TraceKind::Recovery, "transfer the state");
        const int first = static_cast<int>(rounds.front().front().from);
        const Device device = group->device();
        const std::vector<Tensor> tensors = state.tensors(device);
        const std::string texts = group->all_gather_bytes(group->rank() == first ? state.texts(device) : "")
                                      .at(static_cast<std::size_t>(first));
        for (const TransferRound& round : rounds) {
            const bool receives = std::ranges::any_of(
                round, [&](const Transfer& one) { return static_cast<int>(one.to) == group->rank(); });
            if (receives) is_whole = false, is_torn = true;
            run_round(*group, round, tensors, &memory.line().transferred);
            if (receives) {
                state.set_texts(device, texts);
                state.announce_loaded();
                state.copy(Kind::Moving, moving);
                take_commits(newest);
            }
            group->barrier().wait();
        }
    }

    void restore_own(std::uint64_t newest) {
        if (!state.has(Kind::Own)) return;
        if (memory.is_empty()) return begin_own_again(newest);
        if (!memory.has_copy(newest))
            fail(fmt::format("the kept memory has no copy of the Own values after {} units", newest));
        state.restore(Kind::Own, memory.copy_for(newest));
    }

    /// The kept memory is another node's than before.
    void begin_own_again(std::uint64_t newest) {
        state.restore(Kind::Own, first_own);
        memory.store(newest, first_own);
        ddprun::print(stderr,
                      "rank {}: recovery: its Own values ({}) have their first values, because its node has "
                      "no copy of them\n",
                      context.rank(), state.names(Kind::Own));
    }

    void take_commits(std::uint64_t count) {
        commits = count;
        memory.line().commits.store(count, std::memory_order_release);
        is_whole = true;
        is_torn = false;
    }

    void require_running(const char* call) const {
        if (group == nullptr) fail(fmt::format("{}() is called in the body of run()", call));
        if (ProcessGroup::is_in_commit_) fail(fmt::format("{}() was called inside commit()", call));
    }

    void require_complete_unit() {
        // Over NCCL this waits for the device: a collective that was aborted leaves anything in its buffers.
        if (!on_device || recovers()) group->require_quiet();
        const bool is_alone = group->size() == 1;
        if (group->all_rank_calls_ == unit_began_at && !is_alone)
            fail(fmt::format(
                "unit {} had no collective in which all ranks wait for each other; a unit needs one "
                "(all_reduce, all_gather, reduce_scatter, all_to_all, barrier) before commit()",
                commits + 1));
        if (state.has(Kind::Own) && !prepared_at)
            fail(fmt::format(
                "unit {} has no prepare(), and there are Own values; call it before the unit's last collective",
                commits + 1));
        if (state.has(Kind::Own) && prepared_at == group->all_rank_calls_ && !is_alone)
            fail(fmt::format("prepare() of unit {} came after its last collective; call it before that",
                             commits + 1));
        require_unchanged();
    }

    void require_unchanged() const {
        if (!checks) return;
        if (const std::string changed = state.changed(Kind::Committed); !changed.empty())
            fail(fmt::format(
                "{} changed outside of commit() after {} units; change it inside, or keep it as Moving or Own",
                changed, commits));
    }

    void begin_unit() {
        unit_began = MonotonicClock::now();
        unit_began_at = group->all_rank_calls_;
        prepared_at.reset();
    }

    void finish_unit() {
        ddprun::KeptLine& line = memory.line();
        const std::int64_t useful = (MonotonicClock::now() - unit_began).count();
        line.useful_ns.store(line.useful_ns.load(std::memory_order_relaxed) + useful,
                             std::memory_order_relaxed);
        line.slowest_ns.store(std::max(line.slowest_ns.load(std::memory_order_relaxed), useful),
                              std::memory_order_relaxed);
        line.generation.store(context.generation(), std::memory_order_relaxed);
        take_commits(commits + 1);
        begin_unit();
    }

    /// Waits until all ranks have finished. True: a rank was lost meanwhile, and a generation follows.
    bool wait_for_release() {
        report(ddprun::lifeline::kFinished, fmt::format("{}", context.generation()));
        socket->receive_until([&] { return is_released() || has_next() || socket->is_last(); },
                              ddprun::kNever);
        if (is_released()) return false;
        if (has_next()) return true;
        throw PeerLostError(
            fmt::format("rank {}: recovery: the job ended before all ranks had finished", context.rank()));
    }
    [[nodiscard]] bool is_released() const { return socket->released() == context.generation(); }
    [[nodiscard]] bool has_next() const {
        return socket->generation() && socket->generation()->number > context.generation();
    }

    /// Returns once nothing of the failed unit runs on the device, and could still write to the kept state.
    /// Otherwise, or where the device has an error, this process has to end.
    void wait_for_device() const {
        if (!on_device) return;
        constexpr std::chrono::seconds kLimit{2};
        int device = 0;
        cuda::check(cudaGetDevice(&device), "asking for the CUDA device");
        if (!nccl::aborts_return_within(kLimit))
            fail("ncclCommAbort did not return within 2 s; this process ends, to be replaced");
        const auto code = std::make_shared<std::atomic<cudaError_t>>(cudaSuccess);
        const bool has_ended = nccl::returns_within(kLimit, [device, code] {
            cudaSetDevice(device);
            *code = cudaDeviceSynchronize();
        });
        if (has_ended && *code == cudaSuccess) return;
        fail(fmt::format("work of the failed unit on CUDA device {}: {}; this process ends, to be replaced",
                         device, has_ended ? cuda::explain(*code) : "it did not end within 2 s"));
    }

    /// Says that this process has let go of its group, and waits for the next generation; throws `failure`
    /// where none comes.
    void await_generation(const std::exception_ptr& failure) {
        const trace::Scope traced(trace::TraceKind::Recovery, "wait for the next generation");
        std::string why;
        try {
            std::rethrow_exception(failure);
        } catch (const std::exception& error) {
            why = ddprun::excerpt(error.what(), 1000);
        }
        const std::size_t leaked = net::leaked_links();
        const bool is_worn = leaked >= most_leaked_links(context.rank());
        if (is_worn) why = fmt::format("worn: {} links to other nodes could not be closed", leaked);
        report(ddprun::lifeline::kLetGo, fmt::format("{} {} {}", context.generation(), commits, why));
        if (is_worn) fail(why + "; a new process replaces this one");
        const auto deadline = ddprun::deadline_after(MonotonicClock::now(), memory.limit());
        socket->receive_until([&] { return has_next() || socket->is_last(); }, deadline);
        if (!has_next()) std::rethrow_exception(failure);
    }

    /// Goes over to the generation that was announced: its environment, and its segment under the number of
    /// the old one's descriptor, which frees the old segment.
    void enter_generation() {
        LifelineSocket::Generation next = *std::move(socket->generation());
        socket->generation().reset();
        const ddprun::WorkerEnv& before = context.env();
        ddprun::EnvironmentList variables = next.variables;
        for (auto& variable : ddprun::to_environment(before)) variables.push_back(std::move(variable));
        const auto env = ddprun::worker_env_from([&](std::string_view name) -> std::optional<std::string> {
            for (const auto& [known, value] : variables) {
                if (known == name) return value;
            }
            return std::nullopt;
        });
        if (!env) fail(fmt::format("generation {}: {}", next.number, env.error().what));
        if (::dup3(next.segment.get(), env->segment_fd, O_CLOEXEC) < 0)
            fail(fmt::format("generation {}: its segment: {}", next.number, std::strerror(errno)));
        context = Context(*env, context.origin());
        set_reported_rank(context.rank());
        if (lifeline != nullptr) lifeline->follow(context);
    }

    Lifeline* lifeline;
    KeptState state;
    bool has_run = false;
    KeptMemory memory;
    std::shared_ptr<LifelineSocket> socket;  ///< null without an agent that recovers in place
    const bool checks = std::getenv("DDP_CHECK_RECOVERY") != nullptr &&
                        std::strcmp(std::getenv("DDP_CHECK_RECOVERY"), "0") != 0;

    bool is_whole = false;            ///< the state belongs to `commits`
    bool is_torn = false;             ///< only a part of a state was received
    bool is_used = false;             ///< this process was in a generation before
    bool is_in_change = false;        ///< inside commit(), or an exception came out of it
    std::uint32_t world_size = 0;     ///< of the last generation with a body; 0: there was none
    std::uint64_t known_commits = 0;  ///< the most that a whole rank had in an exchange
    std::string moving;               ///< copy of the last commit
    std::string own;                  ///< copy of the last prepare()
    std::string first_own;            ///< copy of the Own values before the first unit
    ProcessGroup* group = nullptr;    ///< null outside of a body
    // Numbers of all-rank calls.
    std::uint64_t unit_began_at = 0;
    std::optional<std::uint64_t> prepared_at;
    ddprun::TimePoint unit_began{};
};

Recovery::Recovery(const Context& context, ProcessGroupOptions options, Lifeline* lifeline) {
    if (recovery_made != Made::None)
        throw Error(
            fmt::format("rank {}: there is a Recovery already; a process has one, which keeps all state",
                        context.rank()));
    impl_ = std::make_unique<Impl>(context, std::move(options), lifeline);
    recovery_made = has_agent(context.env()) ? Made::Used : Made::Alive;
}

Recovery::~Recovery() {
    if (recovery_made == Made::Alive) recovery_made = Made::None;
}

void Recovery::keep(const Training& training) {
    keep("model", training.model);
    keep("optimizer", training.optimizer);
    keep("sampler", training.sampler);
    for (const TrainingPart& part : training.parts) {
        if (part.state != nullptr) keep(part.name, *part.state);
    }
}

void Recovery::keep(std::string name, Stateful& object, Kind kind) {
    std::vector<Tensor> tensors = object.state();
    const auto* const model = dynamic_cast<const DistributedDataParallel*>(&object);
    if (model != nullptr && tensors.size() > model->parameters().size())
        impl_->refuse("buffers of a model change inside a unit, on each rank in another way");
    impl_->add({.name = std::move(name), .kind = kind, .tensors = std::move(tensors), .object = &object});
}

void Recovery::keep(std::string name, std::vector<Tensor> tensors, Kind kind) {
    check_tensors(tensors);
    impl_->add({.name = std::move(name), .kind = kind, .tensors = std::move(tensors)});
}

void Recovery::keep(std::string name, DistributedSampler& sampler) {
    keep_text(
        std::move(name), [&sampler] { return text_of(sampler.state()); },
        [this, &sampler](const std::string& text) {
            sampler.set_world(context().world_size(), context().rank());
            sampler.restore(position_in(text));
        },
        Kind::Moving);
}

void Recovery::keep_bytes(std::string name, void* bytes, std::size_t size, Kind kind) {
    Tensor tensor{"", {static_cast<std::int64_t>(size)}, {bytes, size, DType::U8, {}}};
    impl_->add({.name = std::move(name), .kind = kind, .tensors = {std::move(tensor)}});
}

void Recovery::keep_text(std::string name, std::function<std::string()> read,
                         std::function<void(const std::string&)> write, Kind kind) {
    impl_->add({.name = std::move(name),
                .kind = kind,
                .tensors = {},
                .read = std::move(read),
                .write = std::move(write)});
}

void Recovery::run(const std::function<void(ProcessGroup&, const Start&)>& body) { impl_->run(body); }
void Recovery::prepare() { impl_->prepare(); }
void Recovery::commit(const std::function<void()>& change) { impl_->commit(change); }
std::uint64_t Recovery::commits() const { return impl_->commits; }
const std::string& Recovery::refusal() const { return impl_->refusal; }
void Recovery::refuse(const char* why) { impl_->refuse(why); }
const Context& Recovery::context() const { return impl_->context; }

std::uint64_t step_seed(std::uint64_t seed, int rank, std::uint64_t commits) {
    // splitmix64 of each number in turn, so that neighbours give unrelated seeds.
    std::uint64_t mixed = seed;
    for (const std::uint64_t number : {static_cast<std::uint64_t>(rank), commits}) {
        mixed += (number + 1) * 0x9e3779b97f4a7c15;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
        mixed ^= mixed >> 31;
    }
    return mixed;
}

}  // namespace ddp
