#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "ddp/error_report.h"
#include "ddp/lifeline.h"
#include "ddp/worker/device_error.h"
#include "ddp/worker/error_text.h"
#include "ddp/worker/segment_map.h"
#include "ddp/worker/stacks.h"
#include "ddp/worker/stop_line.h"
#include "env/clock.h"
#include "env/worker_env.h"
#include "tests/support/json_file.h"
#include "tests/support/temporary_directory.h"

namespace ddp {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

TEST(HangDetectionPause, TellsTheLauncherHowLongTheOthersMayWait) {
    const auto segment = std::make_shared<SegmentMap>(make_segment({}));
    answer_stack_requests(segment, 0, -1);
    const auto until = [&] { return segment->line(0).awaited_until_ns.load(); };
    const auto now = [] { return ddprun::MonotonicClock::now().time_since_epoch(); };
    {
        const HangDetectionPause awaited(std::chrono::hours(1));
        EXPECT_GT(until(), (now() + std::chrono::minutes(59)).count());
        EXPECT_LE(until(), (now() + std::chrono::hours(1)).count());
    }
    EXPECT_EQ(until(), 0);
}

/// A worker of rank 3 with an error file.
class ErrorReport : public ::testing::Test {
  protected:
    ErrorReport() : path_(directory_.path() + "/error.json") {
        ::setenv("TORCHELASTIC_ERROR_FILE", path_.c_str(), 1);
        ::setenv("RANK", "3", 1);
    }
    ~ErrorReport() override {
        ::unsetenv("TORCHELASTIC_ERROR_FILE");
        ::unsetenv("RANK");
    }
    ddprun::Json message() const { return ddprun::test::json_file(path_)["message"]; }
    std::string stack() const { return message()["extraInfo"]["py_callstack"].get<std::string>(); }

    ddprun::test::TemporaryDirectory directory_;
    std::string path_;
};

[[gnu::noinline]] int throw_from_here() { throw std::runtime_error("no \"data\"\nat all"); }

TEST_F(ErrorReport, HasTheTextAndOriginOfAnExceptionAndExitsWithOne) {
    // The test framework would catch the exception; a main does not.
    const auto main = []() noexcept { (void)run_main("prog", throw_from_here); };
    EXPECT_EXIT(main(), ::testing::ExitedWithCode(1), "prog: rank 3: no \"data\"");
    EXPECT_EQ(message()["message"], "rank 3: no \"data\"\nat all");
    EXPECT_THAT(stack(), HasSubstr("#0 "));
    EXPECT_THAT(message()["extraInfo"]["timestamp"].get<std::string>(), ::testing::MatchesRegex("[0-9]+"));
}

TEST_F(ErrorReport, NamesTheRankThatARecoveryHasGivenTheProcess) {
    const auto main = []() noexcept {
        set_reported_rank(5);
        (void)run_main("prog", [] {
            throw std::runtime_error("rank 5: no data");
            return 0;
        });
    };
    EXPECT_EXIT(main(), ::testing::ExitedWithCode(1), "prog: rank 5: no data");
}

TEST_F(ErrorReport, IsWrittenForACrashAndKeepsTheSignal) {
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
        EXPECT_EXIT((void)run_main("prog", [&] { return ::raise(signal); }),
                    ::testing::KilledBySignal(signal), "died of SIG");
        EXPECT_THAT(message()["message"].get<std::string>(), ::testing::StartsWith("SIG")) << signal;
        EXPECT_THAT(stack(), HasSubstr("#0 ")) << signal;
    }
}

TEST_F(ErrorReport, HasTheLastErrorsOfNcclAndCudaAlsoAfterACrash) {
    const auto fail_with_words = [] {
        note_device_error(DeviceLibrary::Nccl, "an older word");
        note_device_error(DeviceLibrary::Nccl, "unhandled \"system\" error");
        note_device_error(DeviceLibrary::Cuda, std::string(5000, 'x'));
        return ::raise(SIGSEGV);
    };
    EXPECT_EXIT((void)run_main("prog", fail_with_words), ::testing::KilledBySignal(SIGSEGV), "died of SIG");
    EXPECT_EQ(message()["extraInfo"]["nccl_error"], "unhandled \"system\" error");
    EXPECT_EQ(message()["extraInfo"]["cuda_error"], std::string(1000, 'x'));

    const auto throw_with_words = []() noexcept {
        (void)run_main("prog", [] {
            note_device_error(DeviceLibrary::Nccl, "a word");
            return throw_from_here();
        });
    };
    EXPECT_EXIT(throw_with_words(), ::testing::ExitedWithCode(1), "prog: rank 3");
    EXPECT_EQ(message()["extraInfo"]["nccl_error"], "a word");
    EXPECT_FALSE(message()["extraInfo"].contains("cuda_error"));
}

[[gnu::noinline]] int overflow(volatile char* above) {
    volatile char here[4096] = {};
    // The compiler cannot evaluate this condition, so it does not reject endless recursion.
    return above[0] == 1 ? 0 : overflow(here) + above[0];
}

TEST_F(ErrorReport, IsWrittenForAStackOverflow) {
    volatile char bottom = 0;
    EXPECT_EXIT((void)run_main("prog", [&] { return overflow(&bottom); }), ::testing::KilledBySignal(SIGSEGV),
                "SIGSEGV");
    EXPECT_THAT(stack(), HasSubstr("#0 "));
}

TEST_F(ErrorReport, IsNotWrittenForACrashingChildOfTheWorker) {
    const auto body = [] {
        const pid_t child = ::fork();
        if (child == 0) ::raise(SIGABRT);
        int status = 0;
        ::waitpid(child, &status, 0);
        return WIFSIGNALED(status) ? 7 : 8;
    };
    EXPECT_EXIT(std::exit(run_main("prog", body)), ::testing::ExitedWithCode(7), "");
    EXPECT_FALSE(std::ifstream(path_).good());
}

TEST_F(ErrorReport, IsNotWrittenWhenAProgramSucceeds) {
    EXPECT_EXIT(std::exit(run_main("prog", [] { return 4; })), ::testing::ExitedWithCode(4), "");
    EXPECT_FALSE(std::ifstream(path_).good());
}

TEST(ErrorJson, AcceptsTextThatIsNotUtf8) {
    const ddprun::Json json =
        ddprun::parse_json(error_json("bad \xff byte", "#0 f", 12)).value_or(ddprun::Json());
    EXPECT_EQ(json["message"]["extraInfo"]["timestamp"], "12");
}

/// A worker's lifeline whose other end belongs to the test.
struct Wire {
    Wire() {
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0) {
            agent.reset(ends[0]);
            worker.reset(ends[1]);
        }
        env.lifeline_fd = worker.get();
    }
    void tell(const std::string& packet) const {
        (void)!::send(agent.get(), packet.data(), packet.size(), 0);
    }
    std::string heard() const {
        char packet[64];
        const ssize_t n = ::recv(agent.get(), packet, sizeof packet, MSG_DONTWAIT);
        return n > 0 ? std::string(packet, static_cast<std::size_t>(n)) : "";
    }
    ddprun::UniqueFd agent, worker;
    ddprun::WorkerEnv env;
};

TEST(Lifeline, ANoticeRequestsAStopWithAReason) {
    const Wire wire;
    Lifeline lifeline{Context(wire.env)};
    EXPECT_FALSE(lifeline.preemption_requested());
    wire.tell("Pwalltime in 120 s");
    EXPECT_TRUE(lifeline.preemption_requested());
    EXPECT_EQ(lifeline.reason(), "walltime in 120 s");
}

TEST(Lifeline, UnknownPacketsAndTheEndOfTheAgentAreNoNotice) {
    Wire wire;
    Lifeline lifeline{Context(wire.env)};
    wire.tell("?what");
    EXPECT_FALSE(lifeline.preemption_requested());
    wire.agent.reset();
    EXPECT_FALSE(lifeline.preemption_requested());
}

TEST(Lifeline, SigtermRequestsAStopWithOrWithoutALauncher) {
    Lifeline lifeline{Context(ddprun::WorkerEnv{})};
    ::raise(SIGUSR1);
    EXPECT_FALSE(lifeline.preemption_requested());
    ::raise(SIGTERM);
    EXPECT_TRUE(lifeline.preemption_requested());
    EXPECT_EQ(lifeline.reason(), "SIGTERM");
}

TEST(Lifeline, TheSchedulersSignalAndTheLaunchersAreOneRequest) {
    Lifeline lifeline{Context(ddprun::WorkerEnv{})};
    for (const int signal : {SIGTERM, SIGTERM, SIGINT, SIGINT}) ::raise(signal);
    EXPECT_TRUE(lifeline.preemption_requested());
}

TEST(Lifeline, ALaterSignalEndsTheProcess) {
    using Meaning = StopRequests::Meaning;
    const ddprun::TimePoint first{std::chrono::hours(1)};
    StopRequests requests;
    EXPECT_EQ(requests.note(first, false), Meaning::Request);
    EXPECT_EQ(requests.note(first + 4s, false), Meaning::Repetition);
    EXPECT_EQ(requests.note(first + 5s, false), Meaning::EndNow);
}

TEST(Lifeline, ASecondCtrlCEndsTheProcessAtOnce) {
    StopRequests requests;
    requests.note(ddprun::TimePoint{1h}, true);
    EXPECT_EQ(requests.note(ddprun::TimePoint{1h}, true), StopRequests::Meaning::EndNow);
}

TEST(Lifeline, SigtermEndsAForkedChild) {
    const Lifeline lifeline{Context(ddprun::WorkerEnv{})};
    const pid_t child = ::fork();
    if (child == 0) {
        ::raise(SIGTERM);
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

TEST(Lifeline, HeartbeatsAreSeparatePackets) {
    const Wire wire;
    Lifeline lifeline{Context(wire.env)};
    lifeline.ready();
    lifeline.heartbeat(17);
    EXPECT_EQ(wire.heard(), "R");
    EXPECT_EQ(wire.heard(), "H17");
}

}  // namespace
}  // namespace ddp
