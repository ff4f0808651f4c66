#include "ddp/recovery.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/epochs.h"
#include "ddp/loader.h"
#include "ddp/model.h"
#include "ddp/objects.h"
#include "ddp/optimizer.h"
#include "ddp/recovery/kept.h"
#include "ddp/sampler.h"
#include "ddp/schedule.h"
#include "ddp/testing.h"
#include "ddp/worker/lifeline_socket.h"
#include "env/io/file.h"
#include "env/worker_env.h"
#include "failures.h"
#include "on_nodes.h"

/// There in a process with AddressSanitizer, which keeps freed memory for a while and finds leaks itself.
extern "C" void __asan_init() __attribute__((weak));

namespace ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_recovering;
using Workers = testing::RecoveringOptions::Workers;
using Progress = ProcessGroupOptions::Progress;

/// Where a training run can be interrupted.
enum class Point : std::uint8_t {
    UnitBegin,
    Backward,      ///< before the unit's first collective
    BeforePart,    ///< before a collective of a sub-group
    BeforeFinish,  ///< before the unit's last collective
    BeforeCommit,
    InCommit,
    AfterCommit,
    Sending,  ///< in a recovery: a holder, before it sends
    Received  ///< in a recovery: a receiver, before it is whole
};

struct Moment {
    Point point;
    int rank;
    std::uint64_t generation, commits;
    ProcessGroup* group;  ///< null in a recovery
    Recovery& recovery;
};
using Interrupt = std::function<void(const Moment&)>;

/// A list with a JSON form that tells when it is read.
struct Losses {
    std::vector<double> values;
    std::function<void()> on_read = [] {};
};
void to_json(nlohmann::json& json, const Losses& losses) {
    losses.on_read();
    json = losses.values;
}
void from_json(const nlohmann::json& json, Losses& losses) { json.get_to(losses.values); }

/// Calls back when it has received its state.
class Witness final : public Stateful {
  public:
    explicit Witness(std::function<void()> on_loaded) : on_loaded_(std::move(on_loaded)) {}
    [[nodiscard]] std::vector<Tensor> state() const override { return {tensor_of("n", memory_, {2})}; }
    void state_loaded() override { on_loaded_(); }

  private:
    mutable std::vector<std::int64_t> memory_ = {0, 0};
    std::function<void()> on_loaded_;
};

constexpr std::uint64_t kUnits = 8;

/// A training run with state of every kind; every rank ends with the same weights.
class TrainingRun {
  public:
    TrainingRun(const Context& context, Interrupt interrupt, Progress progress)
        : interrupt_(std::move(interrupt)),
          rng_(static_cast<unsigned>(context.rank())),
          recovery_(context, {.timeout = std::chrono::seconds(20), .progress = progress}) {
        losses_.on_read = [this] { reach(Point::Sending, nullptr); };
        recovery_.keep("weights", parameters());
        recovery_.keep("optimizer", *optimizer_);
        recovery_.keep("schedule", rate_);
        recovery_.keep("witness", witness_);
        recovery_.keep_value("losses", losses_);
        recovery_.keep_value("position", position_, Recovery::Kind::Moving);
        recovery_.keep_value("rng", rng_, Recovery::Kind::Own);
        recovery_.keep_value("noise", noise_, Recovery::Kind::Own);
    }

    void run() {
        recovery_.run([this](ProcessGroup& group, const Start& start) { train(group, start); });
    }

    [[nodiscard]] int rank() const { return recovery_.context().rank(); }
    /// Everything that a recovery has to restore.
    [[nodiscard]] std::string digest() const {
        std::string digest;
        for (const float one : w_) digest += fmt::format("{:a} ", one);
        for (const double one : losses_.values) digest += fmt::format("{:a} ", one);
        return digest + fmt::format("noise {:a}, rng {}, {} commits, position {}", noise_,
                                    std::mt19937_64(rng_)(), recovery_.commits(), position_);
    }

  private:
    std::vector<Tensor> parameters() { return {tensor_of("w", w_, {4})}; }
    void reach(Point point, ProcessGroup* group) {
        const Context& now = recovery_.context();
        interrupt_({point, now.rank(), now.generation(), recovery_.commits(), group, recovery_});
    }

    void train(ProcessGroup& group, const Start& start) {
        DistributedDataParallel model(group, parameters(), {.broadcast_parameters = start.is_new()});
        const auto part = group.split(group.rank() % 2, 0);
        while (losses_.values.size() < kUnits) {
            reach(Point::UnitBegin, &group);
            model.zero_gradients();
            position_ += 3;  // as a loader does
            const double draw = std::uniform_real_distribution<double>(-1, 1)(rng_);
            noise_ += draw;
            const auto gradient = model.gradient_as<float>(0);
            for (std::size_t i = 0; i < 4; ++i)
                gradient[i] = w_[i] - static_cast<float>(static_cast<double>(i + position_) + 0.1 * draw);
            reach(Point::Backward, &group);
            double loss = draw;
            group.all_reduce(buffer_of(std::span(&loss, 1))).wait();
            reach(Point::BeforePart, &group);
            part->barrier().wait();
            recovery_.prepare();
            reach(Point::BeforeFinish, &group);
            model.mark_ready(0);
            model.finish();
            reach(Point::BeforeCommit, &group);
            recovery_.commit([&] {
                optimizer_->step(model.gradients());
                reach(Point::InCommit, &group);
                rate_.step();
                losses_.values.push_back(loss);
            });
            reach(Point::AfterCommit, &group);
        }
    }

    Interrupt interrupt_;
    std::vector<float> w_ = {0, 0, 0, 0};
    std::unique_ptr<Optimizer> optimizer_ = make_adamw(parameters(), {.learning_rate = 0.1});
    ScheduledRate rate_{*optimizer_, {.shape = Schedule::Shape::Cosine, .total_steps = 12}};
    Witness witness_{[this] { reach(Point::Received, nullptr); }};
    Losses losses_;
    std::uint64_t position_ = 0;
    std::mt19937_64 rng_;
    double noise_ = 0;
    Recovery recovery_;
};

struct Outcome {
    std::vector<std::string> digests;  ///< by rank
    int generations = 0;
};

/// Runs one process per rank. `run` returns a digest, and sets the rank that it has at its end.
Outcome run_processes(int ranks, testing::RecoveringOptions options,
                      const std::function<std::string(const Context&, int& rank)>& run) {
    options.workers = Workers::Processes;
    const std::filesystem::path directory =
        std::filesystem::temp_directory_path() / fmt::format("test-recovery-{}", ::getpid());
    std::filesystem::create_directory(directory);
    Outcome outcome;
    const auto program = [&](const Context& context) {
        int rank = 0;
        const std::string digest = run(context, rank);
        std::ofstream(directory / std::to_string(rank)) << digest;
    };
    outcome.generations = run_recovering(ranks, program, options);
    for (int rank = 0; rank < ranks; ++rank) {
        std::ifstream file(directory / std::to_string(rank));
        if (std::string digest; std::getline(file, digest)) outcome.digests.push_back(std::move(digest));
    }
    std::filesystem::remove_all(directory);
    return outcome;
}

/// Runs the training with processes that `interrupt` may kill.
Outcome train(int ranks, const Interrupt& interrupt, Progress progress = Progress::Inline,
              const testing::RecoveringOptions& options = {}) {
    return run_processes(ranks, options, [&](const Context& context, int& rank) {
        TrainingRun training(context, interrupt, progress);
        training.run();
        rank = training.rank();
        return training.digest();
    });
}

const std::vector<std::string>& undisturbed(const std::vector<int>& nodes) {
    static std::map<std::vector<int>, std::vector<std::string>> known;
    std::vector<std::string>& digests = known[nodes];
    const int ranks = std::accumulate(nodes.begin(), nodes.end(), 0);
    if (digests.empty())
        digests = train(ranks, [](const Moment&) {}, Progress::Inline, {.nodes = nodes}).digests;
    return digests;
}
const std::vector<std::string>& undisturbed(int ranks) { return undisturbed(std::vector{ranks}); }

void kill_this_process() { ::kill(::getpid(), SIGKILL); }

/// Calls `act` where a rank reaches a point for the first time, in generation 1.
Interrupt at(Point point, int rank, std::uint64_t commits, std::function<void()> act = kill_this_process) {
    return [=](const Moment& now) {
        if (now.generation == 1 && now.point == point && now.rank == rank && now.commits == commits) act();
    };
}

class Losing : public ::testing::TestWithParam<Point> {};

TEST_P(Losing, AnyRankAtAnyUnitGivesTheBitsOfAnUndisturbedRun) {
    const std::uint64_t before = GetParam() == Point::AfterCommit ? 1 : 0;
    for (const int rank : {0, 2}) {
        for (const std::uint64_t commits : {before, before + 4, before + kUnits - 1}) {
            const Outcome disturbed = train(3, at(GetParam(), rank, commits));
            EXPECT_EQ(disturbed.generations, 2);
            EXPECT_EQ(disturbed.digests, undisturbed(3)) << "rank " << rank << " after " << commits;
        }
    }
}
std::string name_of_point(const ::testing::TestParamInfo<Point>& info) {
    constexpr const char* kNames[] = {"UnitBegin",    "Backward", "BeforePart", "BeforeFinish",
                                      "BeforeCommit", "InCommit", "AfterCommit"};
    return kNames[static_cast<std::size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Recovery, Losing,
                         ::testing::Values(Point::UnitBegin, Point::Backward, Point::BeforePart,
                                           Point::BeforeFinish, Point::BeforeCommit, Point::InCommit,
                                           Point::AfterCommit),
                         name_of_point);

TEST(Recovery, GoesOnWithAProgressThread) {
    for (const Point point : {Point::Backward, Point::BeforePart, Point::BeforeCommit})
        EXPECT_EQ(train(3, at(point, 1, 3), Progress::Thread).digests, undisturbed(3));
}

TEST(Recovery, ATimeOutAtWhichNobodyDiesIsNotTakenForTheEnd) {
    const auto late = at(Point::Backward, 1, 3, [] { throw TimeoutError("nobody came"); });
    const Outcome disturbed = train(3, late, Progress::Inline, {.limit = std::chrono::milliseconds(200)});
    EXPECT_EQ(disturbed.generations, 2) << "without a next generation the rank fails";
    EXPECT_EQ(disturbed.digests, undisturbed(3));
}

/// Fails in a collective that rank 1 does not call.
void fail_because_of_rank_1(const Moment& now) { now.group->barrier().wait(); }

TEST(Recovery, RepeatsAUnitThatOnlyTheLostRankHadCommitted) {
    const Outcome disturbed = train(3, [](const Moment& now) {
        if (now.generation > 1) return;
        if (now.point == Point::AfterCommit && now.rank == 1 && now.commits == 5) kill_this_process();
        if (now.point == Point::BeforeCommit && now.rank != 1 && now.commits == 4)
            fail_because_of_rank_1(now);
    });
    EXPECT_EQ(disturbed.digests, undisturbed(3));
}

TEST(Recovery, RepeatsTheFirstUnitThatOnlyTheLostRankHadCommitted) {
    const Outcome disturbed = train(3, [](const Moment& now) {
        if (now.generation > 1) return;
        if (now.point == Point::AfterCommit && now.rank == 1) kill_this_process();
        if (now.point == Point::BeforeCommit && now.rank != 1) fail_because_of_rank_1(now);
    });
    EXPECT_EQ(disturbed.digests, undisturbed(3));
}

TEST(Recovery, GivesTheNewestStateToSurvivorsThatAreOneUnitBehind) {
    const Outcome disturbed = train(5, [](const Moment& now) {
        if (now.generation > 1 || now.commits != 4 || now.point != Point::BeforeCommit) return;
        if (now.rank == 1) kill_this_process();
        if (now.rank > 1) fail_because_of_rank_1(now);
    });
    EXPECT_EQ(disturbed.digests, undisturbed(5));
}

TEST(Recovery, HasTheOwnValuesOfARankThatWasTwoUnitsAheadOfThem) {
    const Outcome disturbed = train(3, [](const Moment& now) {
        if (now.generation > 1) return;
        if (now.point == Point::UnitBegin && now.rank == 1 && now.commits == 5) {
            now.recovery.prepare();
            kill_this_process();
        }
        if (now.point == Point::BeforeCommit && now.rank != 1 && now.commits == 4)
            fail_because_of_rank_1(now);
    });
    EXPECT_EQ(disturbed.digests, undisturbed(3));
}

TEST(Recovery, OutlivesTheLossOfTwoRanksAtOnce) {
    const Outcome disturbed = train(5, [](const Moment& now) {
        if (now.generation == 1 && now.point == Point::BeforeFinish && now.rank > 2 && now.commits == 4)
            kill_this_process();
    });
    EXPECT_EQ(disturbed.digests, undisturbed(5));
}

TEST(Recovery, OutlivesTheLossOfAReceiverInTheTransfer) {
    const Outcome disturbed = train(4, [](const Moment& now) {
        at(Point::BeforeFinish, 1, 4)(now);
        if (now.generation == 2 && now.point == Point::Received && now.rank == 1) kill_this_process();
    });
    EXPECT_EQ(disturbed.generations, 3);
    EXPECT_EQ(disturbed.digests, undisturbed(4));
}

TEST(Recovery, OutlivesTheLossOfTheSourceInTheTransfer) {
    const Outcome disturbed = train(4, [](const Moment& now) {
        at(Point::BeforeFinish, 1, 4)(now);
        if (now.generation == 2 && now.point == Point::Sending && now.rank == 0) kill_this_process();
    });
    EXPECT_EQ(disturbed.generations, 3);
    EXPECT_EQ(disturbed.digests, undisturbed(4));
}

TEST(Recovery, GoesOnFromTheOlderStateWhenTheOnlyNewestOneIsLostInTheTransfer) {
    const Outcome disturbed = train(5, [](const Moment& now) {
        if (now.generation == 2 && now.point == Point::Sending && now.rank == 0) kill_this_process();
        if (now.generation > 1 || now.commits != 4 || now.point != Point::BeforeCommit) return;
        if (now.rank == 1) kill_this_process();
        if (now.rank > 1) fail_because_of_rank_1(now);
    });
    EXPECT_EQ(disturbed.generations, 3);
    EXPECT_EQ(disturbed.digests, undisturbed(5));
}

TEST(Recovery, EndsWhenMoreThanHalfOfTheRanksAreLost) {
    EXPECT_THAT(testing::thrown_by([] {
                    train(3, [](const Moment& now) {
                        if (now.point == Point::BeforeFinish && now.rank > 0 && now.commits == 4)
                            kill_this_process();
                    });
                }),
                HasSubstr("more than half of the ranks failed"));
}

TEST(Recovery, ReplacesARankWhoseProgramThrowsInsideCommit) {
    // A PeerLostError too, because the state is torn.
    EXPECT_EQ(train(3, at(Point::InCommit, 1, 4, [] { throw PeerLostError("the store has gone"); })).digests,
              undisturbed(3));
}

TEST(Recovery, RunsWithRanksAsThreads) {
    std::vector<std::string> digests(3);
    const Interrupt interrupt =
        at(Point::BeforeFinish, 1, 4, [] { throw std::runtime_error("out of luck"); });
    const int generations = run_recovering(3, [&](const Context& context) {
        TrainingRun training(context, interrupt, Progress::Inline);
        training.run();
        digests[static_cast<std::size_t>(context.rank())] = training.digest();
    });
    EXPECT_EQ(generations, 2);
    EXPECT_EQ(digests, undisturbed(3));
}

/// Descriptors, mappings and resident bytes of this process; only descriptors with AddressSanitizer.
struct Belongings {
    std::size_t descriptors, mappings, bytes;
    static Belongings now() {
        std::ifstream maps("/proc/self/maps"), size("/proc/self/statm");
        std::size_t pages = 0, resident = 0;
        size >> pages >> resident;
        const std::size_t descriptors = ddprun::names_in("/proc/self/fd").size();
        if (__asan_init != nullptr) return {descriptors, 0, 0};
        return {descriptors,
                static_cast<std::size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n')),
                resident * 4096};
    }
};

TEST(Recovery, ReplacesARankWhoseWeightsHaveAFlippedBit) {
    std::array<std::vector<float>, 3> weights;
    const auto train = [&](bool flips) {
        return run_recovering(3, [&](const Context& context) {
            Model model({{"w", {100}}}, {.verify_every = 1});
            const auto optimizer = make_sgd(model, {.learning_rate = 0.1, .momentum = 0.9});
            std::uint64_t units = 0;
            Recovery recovery(context, {.timeout = std::chrono::seconds(20)});
            recovery.keep("model", model);
            recovery.keep("optimizer", *optimizer);
            recovery.keep_value("units", units);
            recovery.run([&](ProcessGroup& group, const Start& start) {
                model.attach(group, start.is_new());
                const std::span<float> w = model.weights<float>(0), gradient = model.gradient_as<float>(0);
                while (units < kUnits) {
                    if (flips && start.generation == 1 && units == 3 && group.rank() == 0)
                        w[70] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(w[70]) ^ 1U);
                    for (std::size_t i = 0; i < w.size(); ++i)
                        gradient[i] = w[i] - static_cast<float>(i) * static_cast<float>(group.rank() + 1);
                    model.mark_ready(0);
                    model.finish();
                    recovery.commit([&] { optimizer->step(), ++units; });
                }
                weights[static_cast<std::size_t>(group.rank())].assign(w.begin(), w.end());
            });
        });
    };
    EXPECT_EQ(train(false), 1);
    const auto undisturbed = weights;
    EXPECT_EQ(train(true), 2) << "rank 0 has been replaced";
    EXPECT_EQ(weights, undisturbed);
}

TEST(Recovery, LetsACommunicationHookOutliveItsGroup) {
    const auto program = [](const Context& context) {
        Recovery recovery(context, {.timeout = std::chrono::seconds(20)});
        Model model({{"w", {1 << 20}}});
        const auto optimizer = make_sgd(model, {.learning_rate = 0.5});
        const CommunicationHook hook = bf16_compression();
        recovery.keep("model", model);
        recovery.keep("optimizer", *optimizer);
        recovery.run([&](ProcessGroup& group, const Start& start) {
            model.attach(group, start.is_new());
            model.set_hook(hook);
            while (recovery.commits() < 10) {
                std::ranges::fill(model.gradient_as<float>(0), -1.0F);
                model.mark_all_ready();
                model.finish();
                if (recovery.commits() == 4 && context.rank() == 3 && start.is_new()) ::raise(SIGKILL);
                recovery.commit([&] { optimizer->step(); });
            }
        });
        for (const float weight : model.weights<float>(0)) {
            if (weight != 5) throw Error(fmt::format("a weight is {}", weight));
        }
    };
    EXPECT_EQ(run_recovering(4, program, {.workers = Workers::Processes}), 2);
}

TEST(Recovery, LeaksNothingIn200Generations) {
    const std::uint64_t warm = 20, last = 200;
    const Interrupt interrupt = [=](const Moment& now) {
        static Belongings before;
        if (now.point != Point::Backward || now.generation > last) return;
        if (now.rank == 1) kill_this_process();
        while (!now.group->is_over()) std::this_thread::yield();
        if (now.generation == warm) before = Belongings::now();
        if (now.generation < last) return;
        const Belongings after = Belongings::now();
        if (after.descriptors > before.descriptors || after.mappings > before.mappings + 8 ||
            after.bytes > before.bytes + (1 << 20))
            throw Error(fmt::format("{} descriptors, {} mappings, {} bytes became {}, {}, {}",
                                    before.descriptors, before.mappings, before.bytes, after.descriptors,
                                    after.mappings, after.bytes));
    };
    const int generations = run_recovering(2,
                                           [&](const Context& context) {
                                               TrainingRun training(context, interrupt, Progress::Inline);
                                               training.run();
                                           },
                                           {.workers = Workers::Processes, .most_generations = 1000});
    EXPECT_EQ(generations, static_cast<int>(last) + 1);
}

TEST(LifelineSocket, AReportThatTheAgentDoesNotReadEndsAtItsDeadline) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    const ddprun::UniqueFd agent(ends[0]), worker(ends[1]);
    LifelineSocket socket(worker.get());
    for (int i = 0; i < 10'000; ++i) socket.tell('H', "");
    const auto deadline = ddprun::MonotonicClock::now() + std::chrono::milliseconds(10);
    EXPECT_THROW(socket.report('R', "", deadline), TimeoutError);
}

/// Why `program` cannot recover, as the agent hears it.
std::string refusal_of(const std::function<void(const Context&)>& program) {
    return testing::thrown_by([&] {
        run_recovering(2, [&](const Context& context) {
            program(context);
            throw std::runtime_error("it failed");
        });
    });
}

TEST(RecoveryRefusals, NameTheBackend) {
    EXPECT_THAT(refusal_of([](const Context& context) { const Recovery one(context, {.backend = "mpi"}); }),
                HasSubstr("Error: backend mpi: recovery in place is for backends cpu, nccl and staged"));
}

TEST(RecoveryRefusals, SayThatGpusAreATrial) {
    EXPECT_THAT(
        refusal_of([](const Context& context) { const Recovery one(context, {.backend = "staged"}); }),
        HasSubstr("has not run on a GPU yet (DDP_RECOVER_ON_GPUS=1 tries it)"));
}

TEST(RecoveryRefusals, NameShardedState) {
    EXPECT_THAT(refusal_of([](const Context& context) {
                    std::vector<float> half(2);
                    Recovery recovery(context);
                    recovery.keep("optimizer", {Tensor{"m", {4}, buffer_of(half), 2}});
                }),
                HasSubstr("Error: optimizer state is sharded: a failure restarts from the last checkpoint"));
}

TEST(RecoveryRefusals, NameTheBuffersOfAModel) {
    EXPECT_THAT(refusal_of([](const Context& context) {
                    std::vector<float> mean(4);
                    Model model({{"w", {4}}}, {.buffers = {tensor_of("mean", mean, {4})}});
                    Recovery recovery(context);
                    recovery.keep("model", model);
                }),
                HasSubstr("Error: buffers of a model change inside a unit, on each rank in another way"));
}

/// Why `body` cannot recover.
std::string refusal_in_body(const std::function<void(ProcessGroup&)>& body) {
    return refusal_of([&](const Context& context) {
        Recovery recovery(context);
        recovery.run([&](ProcessGroup& group, const Start&) {
            body(group);
            throw std::runtime_error("it failed");
        });
    });
}

TEST(RecoveryRefusals, MayComeFromWhatIsMadeOverTheGroup) {
    EXPECT_THAT(refusal_in_body(
                    [](ProcessGroup& group) { group.refuse_recovery("this hook keeps state of its own"); }),
                HasSubstr("Error: this hook keeps state of its own"));
}

TEST(RecoveryRefusals, MayComeFromTheProgram) {
    EXPECT_THAT(refusal_of([](const Context& context) { Recovery(context).refuse("it cannot go on"); }),
                HasSubstr("Error: it cannot go on"));
}

TEST(RecoveryRefusals, NameAShardedModel) {
    EXPECT_THAT(refusal_in_body([](ProcessGroup& group) {
                    const Model model(group, {{"w", {4}}}, {.shard = Shard::Optimizer});
                }),
                HasSubstr("Error: optimizer state is sharded: a failure restarts from the last checkpoint"));
}

TEST(RecoveryRefusals, LetAShardedOptimizerGatherInCommit) {
    run_recovering(2, [](const Context& context) {
        Recovery recovery(context);
        recovery.run([&](ProcessGroup& group, const Start&) {
            Model model(group, {{"w", {4}}}, {.shard = Shard::Optimizer});
            const auto optimizer = make_sgd(model, {.learning_rate = 0.5});
            for (int unit = 0; unit < 3; ++unit) {
                for (float& value : model.gradient_as<float>(0)) value = -1;
                model.mark_all_ready();
                model.finish();
                recovery.commit([&] { optimizer->step(); });
            }
            EXPECT_EQ(model.weights<float>(0)[3], 1.5F);
            EXPECT_EQ(recovery.commits(), 3U);
        });
    });
}

TEST(RecoveryRefusals, NameJoinAndPowerSgd) {
    const auto refusal_over_model = [](const std::function<void(DistributedDataParallel&)>& use) {
        return refusal_in_body([&](ProcessGroup& group) {
            std::vector<float> w(4);
            DistributedDataParallel model(group, std::vector{tensor_of("w", w, {4})});
            use(model);
        });
    };
    EXPECT_THAT(refusal_over_model([](DistributedDataParallel& model) { const Join join(model); }),
                HasSubstr("Error: Join: ranks that have no batches left are at no common unit"));
    EXPECT_THAT(refusal_over_model([](DistributedDataParallel& model) {
                    model.set_hook(power_sgd());
                    model.mark_ready(0);
                    model.finish();
                }),
                HasSubstr("Error: power_sgd: each rank has errors of its own"));
}

TEST(Recovery, EndsWhereNoRankHasTheStateThatTheyHadCommitted) {
    EXPECT_THAT(
        testing::thrown_by([] {
            run_recovering(2, [](const Context& context) {
                Recovery recovery(context);
                recovery.run([&](ProcessGroup& group, const Start&) {
                    if (group.rank() == 0) throw PeerLostError("rank 1 was lost");
                    KeptMemory(context.env().kept_fd, 1).line().commits = 5;
                    throw Error("lost");
                });
            });
        }),
        HasSubstr("rank 0: recovery: no rank has the state of 5 committed units; all ranks start again"));
}

TEST(Recovery, AnAsynchronousSaveEndsWhenAnotherRankIsLost) {
    const std::string path =
        std::filesystem::temp_directory_path() / fmt::format("test-recovery-{}.saved", ::getpid());
    const int generations = run_recovering(2, [&](const Context& context) {
        std::vector<float> w(4);
        const std::vector<Tensor> parameters = {tensor_of("w", w, {4})};
        DistributedSampler sampler(8, 2, context.rank());
        const auto optimizer = make_sgd(parameters, {.learning_rate = 1});
        CheckpointDirectory checkpoints(path, {.asynchronous = true});
        Recovery recovery(context);
        recovery.keep("weights", parameters);
        recovery.keep("optimizer", *optimizer);
        recovery.run([&](ProcessGroup& group, const Start& start) {
            DistributedDataParallel model(group, parameters, {.broadcast_parameters = start.is_new()});
            while (recovery.commits() < 4) {
                model.mark_ready(0);
                model.finish();
                recovery.commit([&] { optimizer->step(model.gradients()); });
                checkpoints.save(group, {model, *optimizer, sampler});
                if (recovery.commits() == 2 && start.is_new() && group.rank() == 1) throw Error("lost");
            }
            checkpoints.finish(group);
        });
    });
    EXPECT_EQ(generations, 2) << "no rank calls another collective";
    EXPECT_THAT(CheckpointDirectory(path).latest().value_or(""), ::testing::EndsWith("step-000004"));
    std::filesystem::remove_all(path);
}

/// Points of y = 3 x - 1.
class Points final : public Dataset {
  public:
    [[nodiscard]] std::size_t size() const override { return 96; }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override { return {sizeof(float)}; }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        const float x = static_cast<float>(index) / 96;
        std::memcpy(fields[0].data(), &x, sizeof x);
    }
};

/// Weights that are kept as a Training, with a sampler that a loader advances.
class LoaderRun {
  public:
    using Interrupt = std::function<void(int batch, const Context&)>;
    LoaderRun(const Context& context, Interrupt interrupt, std::string checkpoint = {}, int last_batch = -1)
        : interrupt_(std::move(interrupt)),
          checkpoint_(std::move(checkpoint)),
          last_batch_(last_batch),
          sampler_(points_.size(), context.world_size(), context.rank(), {.seed = 1}),
          recovery_(context) {
        recovery_.keep({weights_, *optimizer_, sampler_});
        recovery_.keep_value("epoch", epoch_);
    }
    std::string run() {
        recovery_.run([this](ProcessGroup& group, const Start& start) { train(group, start); });
        return fmt::format("{:a}{}", weights_.w[0], changes_);
    }
    [[nodiscard]] int rank() const { return recovery_.context().rank(); }

  private:
    struct Weights final : Stateful {
        std::vector<float> w = {0};
        [[nodiscard]] std::vector<Tensor> state() const override {
            return {{"w", {1}, {const_cast<float*>(w.data()), 1, DType::F32, {}}}};
        }
    };

    void train(ProcessGroup& group, const Start& start) {
        const Training training{weights_, *optimizer_, sampler_};
        if (start.is_new() && !checkpoint_.empty())
            (void)CheckpointDirectory(checkpoint_).load(group, training);
        if (start.world_changed)
            changes_ += fmt::format(", {} ranks in generation {}", group.size(), start.generation);
        DistributedDataParallel model(group, weights_.state(), {.broadcast_parameters = start.is_new()});
        for (; sampler_.epoch() < 3; sampler_.next_epoch()) {
            Loader loader(points_, sampler_, {.batch_size = 4});
            while (const Batch* batch = loader.next()) {
                interrupt_(static_cast<int>(recovery_.commits()), recovery_.context());
                model.zero_gradients();
                for (const float x : batch->field<float>(0))
                    model.gradient_as<float>(0)[0] += weights_.w[0] * x - 3 * x * x;
                model.mark_ready(0);
                model.finish();
                recovery_.commit([&] { optimizer_->step(model.gradients()); });
                if (static_cast<int>(recovery_.commits()) == last_batch_)
                    return static_cast<void>(CheckpointDirectory(checkpoint_).save(group, training));
            }
        }
    }

    const Interrupt interrupt_;
    const std::string checkpoint_;  ///< read where it is there, and written after the last batch
    const int last_batch_;          ///< -1: the run ends with the data
    std::string changes_;           ///< of the size of the world
    const Points points_;
    Weights weights_;
    std::unique_ptr<Optimizer> optimizer_ =
        make_sgd(weights_.state(), {.learning_rate = 0.01, .momentum = 0.9});
    DistributedSampler sampler_;
    std::uint64_t epoch_ = 0;
    Recovery recovery_;
};

TEST(Recovery, SeesEachSampleOnceWithALoader) {
    const auto run = [](int lost_at) {
        std::vector<std::string> digests(3);
        run_recovering(3, [&](const Context& context) {
            LoaderRun loader(context, [=](int commits, const Context& now) {
                if (now.generation() == 1 && now.rank() == 1 && commits == lost_at) throw Error("lost");
            });
            digests[static_cast<std::size_t>(context.rank())] = loader.run();
        });
        return digests;
    };
    const auto undisturbed = run(-1);
    for (const int lost_at : {3, 8, 15}) EXPECT_EQ(run(lost_at), undisturbed);
}

/// Two nodes of two ranks.
class RecoveryOverNodes : public testing::OnNodes {
  protected:
    static testing::RecoveringOptions on_nodes(int spares = 0) {
        return {.nodes = GetParam(), .spares = spares};
    }
    /// The node of `lost_rank` is lost after five batches.
    static Outcome load(int lost_rank, const testing::RecoveringOptions& options = on_nodes()) {
        return run_processes(ranks(), options, [&](const Context& context, int& rank) {
            LoaderRun run(context, [=](int commits, const Context& now) {
                if (now.generation() == 1 && now.rank() == lost_rank && commits == 5) lose_node();
            });
            const std::string digest = run.run();
            rank = run.rank();
            return digest;
        });
    }
    static void lose_node() { ::kill(::getpid(), SIGPWR), ::pause(); }
};

TEST_P(RecoveryOverNodes, AnyRankLostAnywhereGivesTheBitsOfAnUndisturbedRun) {
    for (const Point point : {Point::UnitBegin, Point::Backward, Point::BeforePart, Point::BeforeFinish,
                              Point::BeforeCommit, Point::InCommit, Point::AfterCommit}) {
        const int rank = 1 + static_cast<int>(point) % 2;  // of the one and of the other node in turn
        const Outcome disturbed = train(ranks(), at(point, rank, 4), Progress::Inline, on_nodes());
        EXPECT_EQ(disturbed.generations, 2);
        EXPECT_EQ(disturbed.digests, undisturbed(GetParam()))
            << "rank " << rank << " at " << static_cast<int>(point);
    }
}

TEST_P(RecoveryOverNodes, ASpareNodeTakesTheRanksOfALostOneAndEndsWithTheSameBits) {
    const Outcome undisturbed = load(-1);
    for (const int rank : {0, 3}) EXPECT_EQ(load(rank, on_nodes(1)).digests, undisturbed.digests) << rank;
}

TEST_P(RecoveryOverNodes, OwnValuesOfALostNodeHaveTheirFirstValuesAndOneLineNamesTheRank) {
    ::testing::internal::CaptureStderr();
    const Outcome disturbed =
        train(ranks(), at(Point::BeforeFinish, 2, 4, lose_node), Progress::Inline, on_nodes(1));
    const std::string out = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(out, AllOf(HasSubstr("rank 2: recovery: its Own values ('rng', 'noise') have their first "
                                     "values, because its node has no copy of them\n"),
                           HasSubstr("rank 3: recovery: its"), Not(HasSubstr("rank 0: recovery"))));
    EXPECT_EQ(disturbed.digests.size(), 4u);
}

/// The weights of a run that is stopped and resumed: each part has a number of nodes with two ranks, and ends
/// after a number of batches (-1: with the data).
std::string weights_of_parts(const std::vector<std::pair<int, int>>& parts) {
    const std::string checkpoint =
        std::filesystem::temp_directory_path() / fmt::format("test-recovery-{}.resume", ::getpid());
    std::string weights;
    for (const auto& [nodes, last_batch] : parts) {
        const testing::RecoveringOptions options{.nodes = std::vector(static_cast<std::size_t>(nodes), 2)};
        const auto run = [&, last = last_batch](const Context& context, int& rank) {
            rank = context.rank();
            return LoaderRun(
                       context, [](int, const Context&) {}, checkpoint, last)
                .run();
        };
        weights = run_processes(2 * nodes, options, run).digests.at(0);
    }
    std::filesystem::remove_all(checkpoint);
    return weights;
}

TEST_P(RecoveryOverNodes, WithoutASpareFewerRanksGoOnAsAfterAStopAndResume) {
    const std::string resumed = weights_of_parts({{2, 5}, {1, -1}});
    for (const int rank : {0, 3}) {
        EXPECT_EQ(load(rank).digests, std::vector(2, resumed + ", 2 ranks in generation 2")) << rank;
    }
}

TEST_P(RecoveryOverNodes, EpochsGoOnWithFewerRanksAtTheSameSampleAndPartOfTheSchedule) {
    const Schedule schedule{.shape = Schedule::Shape::Linear};
    for (const int lost_rank : {0, 3}) {
        const Outcome outcome = run_processes(ranks(), on_nodes(), [&](const Context& context, int& rank) {
            World world(context, {.timeout = std::chrono::seconds(20)});
            Model model({{"w", {1}}});
            const auto optimizer = make_sgd(model, {.learning_rate = 0.01});
            Epochs epochs(
                world, model, *optimizer, 96,
                {.epochs = 2, .batch_size = 4, .schedule = schedule, .report = [](const EpochReport&) {}});
            double last_rate = 0;
            epochs.run([&](Epochs::Step& step) {
                if (world.size() == 4 && world.rank() == lost_rank && step.steps_done() == 4) lose_node();
                for (const std::size_t row : step.rows())
                    model.gradient_as<float>(0)[0] += static_cast<float>(row) * step.share();
                last_rate = optimizer->learning_rate();
                step.finish();
            });
            rank = world.rank();
            return fmt::format("{} ranks, {} steps, last rate {}", world.size(), epochs.steps_done(),
                               last_rate);
        });
        // Four steps of four ranks leave 32 of 96 samples: four steps of two ranks, then an epoch of twelve.
        const double last_rate = rate_at({.shape = schedule.shape, .total_steps = 24}, 0.01, 23);
        EXPECT_EQ(outcome.digests, std::vector(2, fmt::format("2 ranks, 20 steps, last rate {}", last_rate)))
            << lost_rank;
    }
}

TEST_P(RecoveryOverNodes, ANodeThatComesBackGoesOnAsAfterStopsAndResumes) {
    const std::string resumed = weights_of_parts({{2, 5}, {1, 4}, {2, -1}});
    auto options = on_nodes();
    options.returning = 1;
    for (const int lost_rank : {0, 3}) {
        const Outcome outcome = run_processes(ranks(), options, [&](const Context& context, int& rank) {
            LoaderRun run(context, [=](int commits, const Context& now) {
                if (now.generation() == 1 && now.rank() == lost_rank && commits == 5) lose_node();
                if (now.generation() == 2 && now.rank() == 1 && commits == 9) kill_this_process();
            });
            const std::string digest = run.run();
            rank = run.rank();
            return digest;
        });
        const std::string grown = ", 4 ranks in generation 3";
        EXPECT_EQ(outcome.digests, (std::vector{resumed + ", 2 ranks in generation 2" + grown,
                                                resumed + grown, resumed + grown, resumed + grown}))
            << lost_rank;
    }
}

TEST_P(RecoveryOverNodes, ClosesTheLinksOfAGroupThatFailedInALongMessage) {
    constexpr std::uint64_t kWarm = 3, kLast = 10;
    const int generations =
        run_recovering(ranks(),
                       [](const Context& context) {
                           Recovery recovery(context);
                           std::size_t descriptors = 0;
                           recovery.run([&](ProcessGroup& group, const Start& start) {
                               const std::size_t open = Belongings::now().descriptors;
                               if (start.generation == kWarm) descriptors = open;
                               if (start.generation == kLast && group.rank() != 2 &&
                                   (open > descriptors || net::leaked_links() > 0))
                                   throw Error(fmt::format("{} descriptors became {}", descriptors, open));
                               if (start.generation == kLast) return;
                               std::vector<float> many(std::size_t{1} << 20);
                               group.all_reduce(buffer_of(std::span(many))).wait();
                               if (group.rank() == 2) kill_this_process();
                               group.all_reduce(buffer_of(std::span(many))).wait();
                           });
                       },
                       {.workers = Workers::Processes, .nodes = GetParam()});
    EXPECT_EQ(generations, static_cast<int>(kLast));
}

/// Abandons a link while a long message arrives.
void leak_a_link() {
    const auto sender = net::open_fabric_link("127.0.0.1"), receiver = net::open_fabric_link("127.0.0.1");
    sender->connect({receiver->address()});
    receiver->connect({sender->address()});
    const std::vector<std::byte> from(std::size_t{32} << 20, std::byte{1});
    std::vector<std::byte> into(from.size());
    net::Transfer sent, received;
    receiver->receive(0, 1, into, received);
    sender->send(0, 1, from, sent);
    while (into.front() == std::byte{0}) sender->progress(), receiver->progress();
    EXPECT_FALSE(received.done);
    receiver->abandon();
}

TEST_P(RecoveryOverNodes, AProcessWithManyLinksThatCannotBeClosedEndsWhereItLetsGo) {
    EXPECT_THAT(testing::thrown_by([] {
                    run_recovering(2, [](const Context& context) {
                        Recovery recovery(context);
                        recovery.run([](ProcessGroup& group, const Start&) {
                            if (group.rank() == 1) throw Error("lost");
                            while (net::leaked_links() < 4) leak_a_link();
                            group.barrier().wait();
                        });
                    });
                }),
                HasSubstr("rank 0: recovery: worn: 4 links to other nodes could not be closed; a new "
                          "process replaces this one"));
}

INSTANTIATE_TEST_SUITE_P(Recovery, RecoveryOverNodes, ::testing::Values(std::vector<int>{2, 2}),
                         testing::name_of_nodes);

}  // namespace
}  // namespace ddp
