#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/worker_env.h"
#include "launcher/hang/stacks.h"
#include "launcher/node/worker_memory.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

/// Sets a PATH without any tool.
class NoTools {
  public:
    NoTools() { ::setenv("PATH", empty_.path().c_str(), 1); }
    ~NoTools() { ::setenv("PATH", before_.c_str(), 1); }
    NoTools(const NoTools&) = delete;
    NoTools& operator=(const NoTools&) = delete;

  private:
    test::TemporaryDirectory empty_;
    std::string before_ = process_environment("PATH").value_or("");
};

/// A process that ignores the signal that asks for its stack.
class SilentProcess {
  public:
    SilentProcess() : before_(::signal(SIGUSR2, SIG_IGN)), pid_(::fork()) {
        while (pid_ == 0) ::pause();
        ::signal(SIGUSR2, before_);
    }
    ~SilentProcess() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    SilentProcess(const SilentProcess&) = delete;
    SilentProcess& operator=(const SilentProcess&) = delete;
    [[nodiscard]] pid_t pid() const { return pid_; }

  private:
    sighandler_t before_;
    pid_t pid_;
};

TEST(CollectStacks, ARestartWhileAHandlerStaysSilentTakesNothingAway) {
    const NoTools no_tools;
    const SilentProcess process;
    os::LinuxSystem system;
    const auto loop = *os::EventLoop::create({});
    Result<std::unique_ptr<SegmentFile>> made = SegmentFile::create(system, {1, 1, 0, 1, 0});
    ASSERT_TRUE(made) << made.error().what;
    std::shared_ptr<SegmentFile> segment = *std::move(made);
    segment->line(0).pid.store(static_cast<std::uint32_t>(process.pid()));
    segment->line(0).stack_signal.store(SIGUSR2);

    std::vector<RankStack> stacks;
    const StackTarget target{0, process.pid(), {segment, &segment->line(0)}, [] { return std::string(); }};
    collect_stacks(*loop, system, {target}, seconds(20),
                   [&](std::vector<RankStack> got) { stacks = std::move(got); });
    EXPECT_TRUE(stacks.empty()) << "it still waits for the handler";
    segment.reset();  // a new generation has another segment
    const TimePoint deadline = deadline_after(MonotonicClock::now(), seconds(30));
    while (stacks.empty() && MonotonicClock::now() < deadline) ASSERT_TRUE(loop->run_once(deadline));
    ASSERT_EQ(stacks.size(), 1u);
    EXPECT_EQ(stacks[0].method, StackMethod::Kernel);
    EXPECT_THAT(stacks[0].text, HasSubstr("state"));
}

}  // namespace
}  // namespace ddprun
