#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "env/kept.h"
#include "env/lifeline.h"
#include "launcher/node/agent.h"
#include "launcher/plan/head_choice.h"
#include "tests/support/environment_variable.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_system.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using test::FailNth;
using test::FakeSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// One node of a job whose processes are fakes and whose controller is the test.
class AgentNode {
  public:
    explicit AgentNode(FakeSystem& system, int workers = 2, Warden* warden = nullptr)
        : system_(system), workers_(workers) {
        loop_ = *os::EventLoop::create({SIGCHLD});
        output_ = std::make_unique<Output>(*loop_, OutputSpec{}, OutputRanks{}, null_.get(), null_.get());
        AgentConfig config;
        config.spec.binding = NumaBinding::None;
        config.program = {"/train", {"/train"}, "a path", "/train"};
        config.host = "node00";
        config.store = null_.get();
        config.error_files = directory_.file("error");
        config.mark.variable = "DDPRUN_JOB=test";
        agent_ = std::make_unique<Agent>(*loop_, system, *output_, warden, log_, std::move(config),
                                         [this](const rdzv::FromAgent& message) { hear(message); });
        loop_->on_signal([this](const signalfd_siginfo&) { agent_->on_child_exits(); });
    }

    Agent& agent() { return *agent_; }
    void start(std::uint64_t generation, int failed_rank = -1, int first_rank = 0) {
        rdzv::StartGeneration order;
        order.in_place = failed_rank >= 0;
        order.failed_rank = failed_rank;
        order.generation = generation;
        order.first_rank = first_rank;
        order.local_world_size = workers_;
        order.world_size = order.role_world_size = first_rank + workers_;
        order.master_addr = "127.0.0.1";
        order.restart_count = static_cast<int>(generation) - 1;
        ended_ = stops_ = false;
        agent_->handle(order);
    }
    void stop(std::uint64_t generation, Duration grace = 30s, int failed_rank = -1) {
        rdzv::StopGeneration order;
        order.generation = generation;
        order.grace_ns = Duration(grace).count();
        order.failed_rank = failed_rank;
        stops_ = true;
        agent_->handle(order);
    }
    /// Runs the loop until the condition is true.
    bool comes_to(const std::function<bool()>& reached) {
        for (const TimePoint until = test::soon(); !reached() && MonotonicClock::now() < until;) {
            if (!loop_->run_once(until)) return false;
        }
        return reached();
    }
    bool runs() const {
        return agent_->state().phase == AgentState::Phase::Running && agent_->state().alive() == workers_;
    }
    bool has_ended() const { return ended_; }
    pid_t pid(int local_rank) const {
        return agent_->state().workers[static_cast<std::size_t>(local_rank)].pid;
    }

    std::vector<rdzv::WorkerExited> exits;
    std::vector<rdzv::WorkersReady> ready;
    int ends = 0;

  private:
    /// Stops the generation after a failure, and says at an exit in a stop that none follows, as the
    /// controller does.
    void hear(const rdzv::FromAgent& message) {
        if (const auto* exit = std::get_if<rdzv::WorkerExited>(&message)) {
            exits.push_back(*exit);
            if (stops_) loop_->post([this] { agent_->handle(rdzv::EndCollectives{0}); });
            if (!exit->exec_failure.empty())
                loop_->post([this, generation = exit->generation] { stop(generation, 5s, 0); });
        }
        if (const auto* one = std::get_if<rdzv::WorkersReady>(&message)) ready.push_back(*one);
        if (!std::holds_alternative<rdzv::GenerationEnded>(message)) return;
        ended_ = true;
        ++ends;
    }

    FakeSystem& system_;
    int workers_;
    test::TemporaryDirectory directory_;
    UniqueFd null_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    os::Log log_{{}, {os::LogLevel::Info, false, null_.get()}};
    std::unique_ptr<os::EventLoop> loop_;
    std::unique_ptr<Output> output_;
    std::unique_ptr<Agent> agent_;
    bool ended_ = false;
    bool stops_ = false;  ///< the generation is asked to stop
};

/// Runs a generation of two workers in which a call fails, and another one after it; the controller ends
/// both. True: no call failed, and there was no second generation.
bool run_two_generations(FakeSystem& system) {
    AgentNode node(system);
    node.start(1);
    EXPECT_TRUE(node.comes_to([&] { return node.runs() || node.has_ended(); }));
    const bool was_spared = node.runs();
    if (was_spared) node.stop(1);
    EXPECT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    EXPECT_EQ(node.ends, 1);
    if (!was_spared) {
        EXPECT_FALSE(node.exits.empty());
        for (const rdzv::WorkerExited& exit : node.exits)
            EXPECT_TRUE(exit.by_us || !exit.exec_failure.empty()) << exit.rank;
    }
    EXPECT_EQ(system.live_children(), 0);
    EXPECT_EQ(system.zombies(), 0);
    if (was_spared) return true;  // no call has failed yet

    node.exits.clear();
    node.start(2);
    EXPECT_TRUE(node.comes_to([&] { return node.runs(); }))
        << "what failed once does not fail the next generation";
    node.stop(2);
    EXPECT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    EXPECT_EQ(node.exits.size(), 2u);
    return false;
}

TEST(Agent, LeavesNothingBehindAndReportsOnceWhicheverCallFails) {
    for (int nth = 1; nth < 100; ++nth) {  // the 1st, 2nd, 3rd ... call until one run is spared
        SCOPED_TRACE(nth);
        FakeSystem system{FailNth{nth}};
        const bool was_spared = run_two_generations(system);
        EXPECT_EQ(system.live_children(), 0);
        EXPECT_EQ(system.zombies(), 0);
        EXPECT_EQ(system.open_fds(), 0);
        if (!was_spared) continue;
        EXPECT_GT(nth, 5) << "nothing has failed";
        return;
    }
    FAIL() << "every run still met a failure";
}

TEST(Agent, NamesTheFailedCallAndTheRank) {
    FakeSystem system;
    system.fail_spawn(ENOENT);
    AgentNode node(system);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    ASSERT_EQ(node.exits.size(), 1u);
    EXPECT_EQ(node.exits[0].rank, 0);
    EXPECT_EQ(node.exits[0].exec_failure, "exec /train: No such file or directory");
}

TEST(Agent, ReapsAWorkerThatExitedBeforeItsNumberWasKnown) {
    FakeSystem system;
    system.exit_at_birth(3);
    AgentNode node(system, 20);  // more than one slice of the start
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    ASSERT_EQ(node.exits.size(), 20u);
    for (const rdzv::WorkerExited& exit : node.exits) EXPECT_EQ(exit.status, 3);
    EXPECT_EQ(system.zombies(), 0);
}

TEST(Agent, TheWardenForgetsAGroupBeforeItsNumberCanBeAnothers) {
    const std::unique_ptr<Warden> warden = *Warden::start({"DDPRUN_TEST=warden"}, "", 1);
    FakeSystem system;
    AgentNode node(system, 1, warden.get());
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    const pid_t worker = node.pid(0);
    EXPECT_EQ(warden->group(0), worker);
    pid_t known_at_reap = -1;
    system.on_reap([&](pid_t pid) {
        if (pid == worker) known_at_reap = warden->group(0);
    });
    system.exit(worker, 0);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    EXPECT_EQ(known_at_reap, 0);
}

TEST(Agent, AWorkerThatReportsALostPeerDuringAStopIsNotTheCause) {
    FakeSystem system;
    AgentNode node(system);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    // The signal to rank 0 is slow; meanwhile rank 1 notices that its collective was ended.
    const std::string report = system.spawned()[1].second.environment.empty() ? "" : [&] {
        for (const std::string& variable : system.spawned()[1].second.environment) {
            if (variable.starts_with("TORCHELASTIC_ERROR_FILE="))
                return variable.substr(variable.find('=') + 1);
        }
        return std::string();
    }();
    ASSERT_THAT(report, HasSubstr("/error-1.json"));
    system.on_signal_group([&, rank0 = node.pid(0)](pid_t group, int signal) {
        if (group != rank0 || signal != SIGTERM) return;
        const UniqueFd file(::open(report.c_str(), O_WRONLY | O_CLOEXEC));
        ASSERT_EQ(::write(file.get(), "peer lost", 9), 9);
        for (const TimePoint later = MonotonicClock::now() + 50ms; MonotonicClock::now() < later;) {
        }
    });
    node.stop(1, 30s, 0);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    ASSERT_EQ(node.exits.size(), 2u);
    for (const rdzv::WorkerExited& exit : node.exits) {
        EXPECT_TRUE(exit.by_us) << exit.rank;
        EXPECT_FALSE(exit.stopped_failing) << exit.rank;
    }
}

TEST(Agent, AWorkerThatReportedAnErrorBeforeTheStopIsTheCause) {
    FakeSystem system;
    AgentNode node(system, 1);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    for (const std::string& variable : system.spawned()[0].second.environment) {
        if (!variable.starts_with("TORCHELASTIC_ERROR_FILE=")) continue;
        const UniqueFd file(::open(variable.substr(variable.find('=') + 1).c_str(), O_WRONLY | O_CLOEXEC));
        ASSERT_EQ(::write(file.get(), "my error", 8), 8);
        const timespec a_second_ago[2] = {{::time(nullptr) - 2, 0}, {::time(nullptr) - 2, 0}};
        ASSERT_EQ(::futimens(file.get(), a_second_ago), 0);
    }
    node.stop(1);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    ASSERT_EQ(node.exits.size(), 1u);
    EXPECT_TRUE(node.exits[0].stopped_failing);
    EXPECT_FALSE(node.exits[0].by_us);
    EXPECT_EQ(node.exits[0].error_file, "my error");
}

TEST(Agent, WaitsForTheGpusAgainAfterAGenerationThatWasStoppedWhileItWaited) {
    const test::TemporaryDirectory empty;
    // The host counts as one with a driver; the program that would load it is never started: spawn is a fake.
    const ddp::testing::Variable driver("DDPRUN_NVML_LIBRARY", empty.file("none"));
    FakeSystem system;
    AgentNode node(system, 1);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    system.exit(node.pid(0), 1);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    for (const std::uint64_t generation : {2, 3, 4}) {
        node.start(generation);
        EXPECT_EQ(node.agent().state().phase, AgentState::Phase::AwaitingGpus) << "generation " << generation;
        node.stop(generation);
        EXPECT_TRUE(node.has_ended());
    }
}

TEST(Agent, EndsAProcessThatLeftItsGroupBeforeItReportsTheEnd) {
    FakeSystem system;
    AgentNode node(system, 1);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    const pid_t stray = system.add_grandchild(4000001);
    system.exit(node.pid(0), 0);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    EXPECT_EQ(system.live_children(), 0);
    EXPECT_EQ(system.zombies(), 0);
    const FakeSystem::Signal asked{stray, SIGTERM, false}, killed{stray, SIGKILL, false};
    EXPECT_EQ(std::count(system.signals().begin(), system.signals().end(), asked), 1);
    EXPECT_EQ(std::count(system.signals().begin(), system.signals().end(), killed), 0);
}

TEST(Agent, SignalsTheRestOfAGroupOnce) {
    FakeSystem system;
    AgentNode node(system, 1);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    const pid_t worker = node.pid(0);
    const pid_t tracker = system.add_grandchild(worker);  // like Python's resource tracker
    system.ignore_signal(tracker, SIGTERM);
    system.exit(worker, 0);
    ASSERT_TRUE(node.comes_to([&] { return node.agent().state().phase == AgentState::Phase::Sweeping; }));
    EXPECT_FALSE(node.has_ended());
    system.exit(tracker, 0);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    for (const FakeSystem::Signal& signal : system.signals()) {
        EXPECT_NE(signal.signal, SIGKILL);
        EXPECT_FALSE(signal.target == tracker && signal.signal == SIGTERM)
            << "it was asked as one of the group";
    }
}

// ---- workers that end before they have joined

/// The header of a segment; the mapping lives as long as the test's process.
SegmentHeader& header_of(int segment) {
    void* const base = ::mmap(nullptr, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, segment, 0);
    return *static_cast<SegmentHeader*>(base);
}

RankLine& line_of(int segment, int local_rank) {
    return reinterpret_cast<RankLine*>(reinterpret_cast<char*>(&header_of(segment)) +
                                       kRankLinesOffset)[local_rank];
}

TEST(Agent, AnEndWithZeroBeforeItsJoiningEndsTheWaitOfTheOthers) {
    FakeSystem system;
    AgentNode node(system, 3);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    const int segment = node.agent().segment()->fd();
    line_of(segment, 0).joined = 1;
    system.exit(node.pid(0), 0);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_FALSE(node.exits[0].never_joined);
    EXPECT_EQ(header_of(segment).aborted, 0u);
    system.exit(node.pid(1), 0);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 2; }));
    EXPECT_TRUE(node.exits[1].never_joined);
    EXPECT_EQ(header_of(segment).aborted, 2u) << "1 + the rank for which the others need not wait";
    line_of(segment, 2).joined = 1;
    system.exit(node.pid(2), 1);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 3; }));
    EXPECT_EQ(node.exits[2].meaning, "rank 1 ended with 0 before it had joined");
}

TEST(Agent, TheOnlyWorkerOfItsNodeMayEndWithZeroBeforeItsJoiningToo) {
    FakeSystem system;
    AgentNode node(system, 1);
    node.start(1, -1, 3);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    system.exit(node.pid(0), 0);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    EXPECT_TRUE(node.exits.at(0).never_joined);
}

TEST(Agent, AnEndWithZeroOnAnotherNodeEndsTheWaitToo) {
    FakeSystem system;
    AgentNode node(system, 2);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    const int segment = node.agent().segment()->fd();
    line_of(segment, 0).joined = 1;
    node.agent().handle(rdzv::EndJoining{5});
    EXPECT_EQ(header_of(segment).aborted, 6u);
    system.exit(node.pid(0), 1);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_EQ(node.exits[0].meaning, "rank 5 ended with 0 before it had joined");
}

// ---- recovery in place

/// The value of a variable that a worker was started with; "" none.
std::string variable_of(const os::SpawnSpec& spec, const std::string& name) {
    for (const std::string& variable : spec.environment) {
        if (variable.starts_with(name + '=')) return variable.substr(name.size() + 1);
    }
    return "";
}

/// The worker's side of what it inherits.
class WorkersSide {
  public:
    WorkersSide(const FakeSystem& system, pid_t pid) : system_(system), pid_(pid) {
        for (const auto& [one, spec] : system.spawned()) {
            if (one == pid) spec_ = &spec;
        }
    }
    void say(const std::string& packet) const {
        ASSERT_EQ(::send(lifeline(), packet.data(), packet.size(), 0), static_cast<ssize_t>(packet.size()));
    }
    /// The next packet, and the descriptor that came with it.
    std::pair<std::string, UniqueFd> hear() const {
        char packet[lifeline::kMaxPacket];
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        iovec bytes{packet, sizeof packet};
        msghdr message{};
        message.msg_iov = &bytes;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        const ssize_t n = ::recvmsg(lifeline(), &message, MSG_DONTWAIT);
        int fd = -1;
        if (const cmsghdr* const header = CMSG_FIRSTHDR(&message); n > 0 && header != nullptr)
            std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
        return {n > 0 ? std::string(packet, static_cast<std::size_t>(n)) : "", UniqueFd(fd)};
    }
    [[nodiscard]] std::string variable(const std::string& name) const { return variable_of(*spec_, name); }
    [[nodiscard]] int descriptor(const std::string& name) const {
        return system_.descriptor(pid_, std::atoi(variable(name).c_str()));
    }

  private:
    [[nodiscard]] int lifeline() const { return descriptor("DDPRUN_LIFELINE_FD"); }
    const FakeSystem& system_;
    pid_t pid_;
    const os::SpawnSpec* spec_ = nullptr;
};

struct SegmentFacts {
    std::uint64_t generation;
    std::uint32_t aborted;
};
SegmentFacts facts_of(int segment) {
    const SegmentHeader& header = header_of(segment);
    return {header.generation, header.aborted.load()};
}

/// Starts the workers, which announce that they survive the end of a generation.
void start_recoverable(FakeSystem& system, AgentNode& node) {
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    for (const auto& [pid, spec] : system.spawned()) WorkersSide(system, pid).say("Rin-place 0");
    ASSERT_TRUE(node.comes_to([&] { return !node.ready.empty(); }));
    EXPECT_EQ(node.ready[0].stage, rdzv::WorkerStage::Announced);
}

TEST(AgentRecovery, GivesSurvivorsTheNextGenerationAndReplacesTheFailedOne) {
    FakeSystem system;
    AgentNode node(system, 3);
    start_recoverable(system, node);
    const WorkersSide survivor(system, node.pid(0));
    const pid_t before = node.pid(0);
    system.die_of(node.pid(1), SIGKILL);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_FALSE(node.has_ended()) << "the head has not decided yet";

    node.start(2, 1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    EXPECT_EQ(node.pid(0), before);
    EXPECT_EQ(facts_of(survivor.descriptor("DDPRUN_SEGMENT_FD")).aborted, 2u) << "1 + the failed rank";
    const auto [packet, segment] = survivor.hear();
    EXPECT_THAT(packet, AllOf(StartsWith("G"), HasSubstr("\nDDPRUN_GENERATION=2"), HasSubstr("RANK=0"),
                              ::testing::Not(HasSubstr("DDPRUN_TOKEN")), ::testing::Not(HasSubstr("_FD="))));
    ASSERT_TRUE(segment);
    EXPECT_EQ(facts_of(segment.get()).generation, 2u);
    EXPECT_EQ(facts_of(segment.get()).aborted, 0u);
    const WorkersSide replacement(system, node.pid(1));
    EXPECT_EQ(replacement.variable("RANK"), "1");
    EXPECT_EQ(replacement.variable("DDPRUN_GENERATION"), "2");
    node.stop(2);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
}

/// The line of rank 1 of two in the kept memory, as this worker sees it.
KeptLine* kept_line(const FakeSystem& system, pid_t pid) {
    const int fd = WorkersSide(system, pid).descriptor("DDPRUN_KEPT_FD");
    void* const base = ::mmap(nullptr, kept_slots_offset(2), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return reinterpret_cast<KeptLine*>(static_cast<char*>(base) + kKeptLinesOffset) + 1;
}

TEST(AgentRecovery, StepsThatAWorkerTellsAreNotItsCommits) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    KeptLine* const kept = kept_line(system, node.pid(1));
    kept->commits = 812;
    kept->generation = 1;
    WorkersSide(system, node.pid(1)).say("H800");
    system.die_of(node.pid(1), SIGKILL);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_EQ(node.exits[0].steps, 800) << "twelve of the commits were evaluations";
    EXPECT_EQ(node.exits[0].commits, 812);
}

/// Says packets as rank 0, and kills rank 1.
void say_and_lose_a_peer(FakeSystem& system, AgentNode& node, const std::vector<std::string>& packets) {
    for (const std::string& packet : packets) WorkersSide(system, node.pid(0)).say(packet);
    const std::size_t before = node.exits.size();
    system.die_of(node.pid(1), SIGKILL);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() > before; }));
}

/// The steps in the last message that all workers have joined.
std::int64_t steps_when_joined(const AgentNode& node) {
    return node.ready.back().stage == rdzv::WorkerStage::Joined ? node.ready.back().steps : -2;
}

TEST(AgentRecovery, StepsInLettersCountWhereNothingIsCommitted) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    say_and_lose_a_peer(system, node, {});
    EXPECT_EQ(node.exits.back().steps, -1);
    node.start(2, 1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    for (const char* const packet : {"L1 40 rank 1 has ended", "Rin-place 2 40", "H45"})
        WorkersSide(system, node.pid(0)).say(packet);
    WorkersSide(system, node.pid(1)).say("Rin-place 2 40");
    ASSERT_TRUE(node.comes_to([&] { return steps_when_joined(node) == 40; }));
    WorkersSide(system, node.pid(0)).say("L2 50 rank 1 has ended");
    system.die_of(node.pid(0), SIGKILL);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 2; }));
    EXPECT_EQ(node.exits.back().steps, 50) << "the rank told them when it left its group";
}

TEST(AgentRecovery, AGenerationBeginsWithTheStepsAtWhichItsWorkersJoined) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    KeptLine* const kept = kept_line(system, node.pid(0)) - 1;
    kept->commits = 900;
    kept->generation = 1;
    say_and_lose_a_peer(system, node, {"H812"});
    node.start(2, 1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    for (const char* const packet : {"Rin-place 2 900", "H820"}) WorkersSide(system, node.pid(0)).say(packet);
    WorkersSide(system, node.pid(1)).say("Rin-place 2");
    ASSERT_TRUE(node.comes_to([&] { return steps_when_joined(node) != -2; }));
    EXPECT_EQ(steps_when_joined(node), 812)
        << "it has done more since, and 88 of the commits were evaluations";
}

TEST(AgentRecovery, AReplacementFindsWhatItsPredecessorHasKept) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    const auto line_of = [&](pid_t pid) { return kept_line(system, pid); };
    KeptLine* const kept = line_of(node.pid(1));
    kept->commits = 812;
    kept->generation = 1;
    system.die_of(node.pid(1), SIGKILL);
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_EQ(node.exits[0].steps, 812);
    node.start(2, 1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    EXPECT_EQ(line_of(node.pid(1))->commits, 812u);
    node.stop(2);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
    node.start(3);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    EXPECT_EQ(line_of(node.pid(1))->commits, 0u) << "when all start again, nothing is kept";
}

TEST(AgentRecovery, WorkersWaitForAStandbyAsLongAsItMayNeed) {
    FakeSystem system;
    AgentNode node(system, 1);
    start_recoverable(system, node);
    const int fd = WorkersSide(system, node.pid(0)).descriptor("DDPRUN_KEPT_FD");
    alignas(KeptHeader) char bytes[sizeof(KeptHeader)];
    ASSERT_EQ(::pread(fd, bytes, sizeof bytes, 0), static_cast<ssize_t>(sizeof bytes));
    const JobSpec spec;
    const Duration heartbeat = heartbeats_of(spec.rendezvous).timeout;
    EXPECT_GE(Duration(reinterpret_cast<const KeptHeader*>(bytes)->wait_ns),
              spec.recover.within + spec.failure_grace + 2 * heartbeat)
        << "till its silence is noticed, and till the other nodes have come to the standby";
}

TEST(AgentRecovery, LeaksNoDescriptor) {
    FakeSystem system;
    AgentNode node(system, 3);
    start_recoverable(system, node);
    int before = 0;
    for (std::uint64_t generation = 2; generation < 50; ++generation) {
        const int rank = static_cast<int>(generation % 3);
        system.die_of(node.pid(rank), SIGKILL);
        ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == generation - 1; }));
        node.start(generation, rank);
        ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
        for (int i = 0; i < 3; ++i) (void)WorkersSide(system, node.pid(i)).hear();
        if (generation == 5) before = system.open_fds();
    }
    ASSERT_TRUE(node.comes_to([&] { return system.open_fds() <= before; }));
}

TEST(AgentRecovery, SuspendedWorkersLeaveTheirGenerationAndGoOnUnderOtherNumbers) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    const WorkersSide survivor(system, node.pid(0));
    const pid_t before = node.pid(0);
    node.agent().handle(rdzv::SuspendGeneration{1, 5, "node node02 is lost"});
    EXPECT_EQ(node.ready.back().stage, rdzv::WorkerStage::Suspended);
    EXPECT_EQ(facts_of(survivor.descriptor("DDPRUN_SEGMENT_FD")).aborted, 6u) << "1 + the failed rank";
    EXPECT_TRUE(system.signals().empty());
    survivor.say("L1 812 a peer has ended");
    node.start(2, 5, 3);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    EXPECT_EQ(node.pid(0), before);
    EXPECT_THAT(survivor.hear().first, AllOf(StartsWith("GRANK=3\nLOCAL_RANK=0\n")));
    node.stop(2);
    ASSERT_TRUE(node.comes_to([&] { return node.has_ended(); }));
}

TEST(AgentRecovery, TellsWorkersThatMayEndOrHaveNoNextGeneration) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    const WorkersSide one(system, node.pid(0)), other(system, node.pid(1));
    for (const WorkersSide* side : {&one, &other}) side->say("F1");
    ASSERT_TRUE(node.comes_to([&] { return node.ready.back().stage == rdzv::WorkerStage::Finished; }));
    node.agent().handle(rdzv::Release{1});
    EXPECT_EQ(one.hear().first, "E1");
    other.say("L1 812 a peer has ended");
    system.ignore_signal(node.pid(1), SIGTERM);
    node.stop(1, 30s, 0);
    std::string last;
    EXPECT_TRUE(node.comes_to([&] {
        for (std::string heard = other.hear().first; !heard.empty(); heard = other.hear().first) last = heard;
        return last == "G";
    }));
}

TEST(AgentRecovery, KillsAWorkerThatHangsAsAFailedOne) {
    FakeSystem system;
    AgentNode node(system, 2);
    start_recoverable(system, node);
    node.agent().handle(rdzv::KillRank{1, "it has not called all_reduce #812"});
    ASSERT_TRUE(node.comes_to([&] { return node.exits.size() == 1; }));
    EXPECT_EQ(node.exits[0].rank, 1);
    EXPECT_FALSE(node.exits[0].by_us);
    EXPECT_EQ(node.exits[0].meaning, "ddprun killed it: it has not called all_reduce #812");
}

TEST(AgentRecovery, HearsAnAnnouncementThatCameWithTheEndOfAnother) {
    FakeSystem system;
    AgentNode node(system, 2);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    WorkersSide(system, node.pid(0)).say("Rin-place 0");
    ASSERT_TRUE(node.comes_to([&] { return node.agent().state().is_announcing(); }));
    WorkersSide(system, node.pid(1)).say("Rin-place 0");
    system.die_of(node.pid(0), SIGKILL);
    node.agent().on_child_exits();
    EXPECT_EQ(node.ready.size(), 1u);
    EXPECT_EQ(node.exits.size(), 1u);
}

TEST(AgentRecovery, ReportsARefusalWithItsRank) {
    FakeSystem system;
    AgentNode node(system, 2);
    node.start(1);
    ASSERT_TRUE(node.comes_to([&] { return node.runs(); }));
    WorkersSide(system, node.pid(1)).say("Rrestart backend mpi");
    ASSERT_TRUE(node.comes_to([&] { return !node.ready.empty(); }));
    EXPECT_EQ(node.ready[0].stage, rdzv::WorkerStage::Refused);
    EXPECT_EQ(node.ready[0].why, "rank 1: backend mpi");
}

}  // namespace
}  // namespace ddprun
