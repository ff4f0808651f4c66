#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "launcher/node/agent/agent.h"
#include "tests/support/environment_variable.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_system.h"

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
        config.mark.variable = "DDPRUN_JOB=test";
        agent_ = std::make_unique<Agent>(*loop_, system, *output_, warden, log_, std::move(config),
                                         [this](const rdzv::FromAgent& message) { hear(message); });
        loop_->on_signal([this](const signalfd_siginfo&) { agent_->on_child_exits(); });
    }

    Agent& agent() { return *agent_; }
    void start(std::uint64_t generation) {
        rdzv::StartGeneration order;
        order.generation = generation;
        order.world_size = order.local_world_size = order.role_world_size = workers_;
        order.master_addr = "127.0.0.1";
        order.restart_count = static_cast<int>(generation) - 1;
        ended_ = false;
        agent_->handle(order);
    }
    void stop(std::uint64_t generation, Duration grace = 30s, int failed_rank = -1) {
        rdzv::StopGeneration order;
        order.generation = generation;
        order.grace_ns = Duration(grace).count();
        order.failed_rank = failed_rank;
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
    int ends = 0;

  private:
    /// Stops the generation after a failure, as the controller does.
    void hear(const rdzv::FromAgent& message) {
        if (const auto* exit = std::get_if<rdzv::WorkerExited>(&message)) {
            exits.push_back(*exit);
            if (!exit->exec_failure.empty())
                loop_->post([this, generation = exit->generation] { stop(generation, 5s, 0); });
        }
        if (!std::holds_alternative<rdzv::GenerationEnded>(message)) return;
        ended_ = true;
        ++ends;
    }

    FakeSystem& system_;
    int workers_;
    UniqueFd null_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    os::Log log_{{}, {os::LogLevel::Info, false, null_.get()}};
    std::unique_ptr<os::EventLoop> loop_;
    std::unique_ptr<Output> output_;
    std::unique_ptr<Agent> agent_;
    bool ended_ = false;
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
    ASSERT_THAT(report, StartsWith("/proc/"));
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
    const ddp::testing::Variable driver("DDPRUN_NVML_LIBRARY",
                                        "/nonexistent");  // exists but is never started: spawn is a fake
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

}  // namespace
}  // namespace ddprun
