#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <chrono>
#include <fstream>

#include "env/text.h"
#include "tests/support/run_program.h"
#include "tests/support/terminal.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// The line of a running worker. No line of ddprun's own has it ("up" is in "cgroup").
const std::string ready = "the worker runs";

char state_of(pid_t pid) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(stat), {}};
    const std::size_t end = text.rfind(')');
    return end == std::string::npos ? '?' : text.at(end + 2);
}

bool comes_to(pid_t pid, char state) {
    const auto until = Clock::now() + 10s;
    while (state_of(pid) != state) {
        if (Clock::now() > until) return false;
        ::poll(nullptr, 0, 2);
    }
    return true;
}

TEST(Terminal, InputReachesTheChosenRankOnly) {
    Terminal terminal(ddprun_probe({"--nproc-per-node=2", "--stdin=1"}, {"say", ready, "cat"}));
    ASSERT_TRUE(terminal.shows(ready));
    terminal.type("a line\n");
    // The worker's line has the rank's (coloured) prefix; the terminal's echo has none.
    EXPECT_TRUE(terminal.shows("[1]: \x1b[0ma line\r\n")) << terminal.screen();
    terminal.type("\x04");  // Ctrl-D ends its input
    EXPECT_EQ(terminal.wait(), 0) << terminal.screen();
}

TEST(Terminal, CtrlCStopsGracefullyAndASecondKills) {
    Terminal terminal(
        ddprun_probe({"--nproc-per-node=2"}, {"ignore", "2", "ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(terminal.shows("[1]:") && terminal.shows("[0]:"));
    terminal.type("\x03");
    ASSERT_TRUE(terminal.shows("SIGINT: stopping 2 workers")) << terminal.screen();
    terminal.type("\x03");
    EXPECT_EQ(terminal.wait(5s), 75) << terminal.screen();
}

TEST(Terminal, AWaitThatTakesLongIsCountedDown) {
    Terminal terminal(
        ddprun_probe({"--nproc-per-node=1", "--shutdown-timeout=3"}, {"ignore", "2", "say", ready, "hold"}));
    ASSERT_TRUE(terminal.shows(ready));
    terminal.type("\x03");
    EXPECT_TRUE(terminal.shows("SIGKILL in 2 s") && terminal.shows("SIGKILL in 1 s")) << terminal.screen();
    EXPECT_EQ(terminal.wait(), 75) << terminal.screen();
}

TEST(Terminal, CtrlZStopsTheWorkersWithDdprunAndAContinueWakesThem) {
    Program program(ddprun_probe({"--nproc-per-node=1"}, {"say", ready, "hold"}));
    ASSERT_TRUE(program.wait_for_output(ready));
    const std::vector<pid_t> workers = children_named(program.pid(), "probe");
    ASSERT_EQ(workers.size(), 1u);
    const pid_t worker = workers[0];
    program.signal(SIGTSTP);
    EXPECT_TRUE(comes_to(worker, 'T'));
    EXPECT_TRUE(comes_to(program.pid(), 'T'));
    program.signal(SIGCONT);
    EXPECT_TRUE(comes_to(worker, 'S'));
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().status, 75);
}

TEST(Terminal, AWorkerThatUsesTheTerminalIsNotStopped) {
    Terminal terminal({path_of("DDPRUN"), "--nproc-per-node=2", "/bin/sh", "-c",
                       "(read line < /dev/tty) || echo cannot read; stty -F /dev/tty sane; echo set"});
    EXPECT_EQ(terminal.wait(), 0) << terminal.screen();
    EXPECT_EQ(occurrences(terminal.screen(), "cannot read"), 2) << terminal.screen();
    EXPECT_EQ(occurrences(terminal.screen(), "set\r\n"), 2) << terminal.screen();
}

TEST(Terminal, AWorkerThatTheTerminalStopsAllTheSameIsNamed) {
    // An interactive shell restores the default of its signals, as env does here.
    Terminal terminal({path_of("DDPRUN"), "--nproc-per-node=1", "/usr/bin/env", "--default-signal=TTIN",
                       "/bin/sh", "-c", "read line < /dev/tty"});
    EXPECT_TRUE(terminal.shows("rank 0 (pid ")) << terminal.screen();
    EXPECT_TRUE(terminal.shows(" is stopped by SIGTTIN, because it used the terminal")) << terminal.screen();
    terminal.type("\x03");
    EXPECT_EQ(terminal.wait(), 75) << terminal.screen();
}

TEST(Terminal, ADebuggerGetsTheTerminalAndGivesItBack) {
    if (::access("/usr/bin/gdb", X_OK) != 0) GTEST_SKIP() << "gdb is not installed";
    Terminal terminal(
        {path_of("DDPRUN"), "--nproc-per-node=2", "--attach", "0=gdb -q -nx --args", "/bin/true"});
    ASSERT_TRUE(terminal.shows("(gdb)")) << terminal.screen();
    terminal.type("run\n");
    ASSERT_TRUE(terminal.shows("exited normally")) << terminal.screen();
    terminal.type("quit\n");
    EXPECT_EQ(terminal.wait(), 0) << terminal.screen();
}

TEST(Terminal, TopIsLiveAndLeavesTheScreenAsItWas) {
    const std::string id = unique_name("top");
    Program job(ddprun_probe({"--nproc-per-node=2", "--rdzv-id=" + id}, {"say", "up", "hold"}));
    ASSERT_TRUE(job.wait_for_output("[0]: up") && job.wait_for_output("[1]: up"));
    for (const char* key : {"q", "\x03"}) {
        Terminal terminal({path_of("DDPRUN"), "top", "--job=" + id});
        ASSERT_TRUE(terminal.shows("STEPS/S")) << terminal.screen();
        terminal.type(key);
        EXPECT_EQ(terminal.wait(), 0) << terminal.screen();
        EXPECT_THAT(terminal.screen(), HasSubstr("\x1b[?25h\x1b[?1049l"));
    }
    Terminal terminal({path_of("DDPRUN"), "top", "--job=" + id});
    ASSERT_TRUE(terminal.shows("STEPS/S")) << terminal.screen();
    job.signal(SIGTERM);
    EXPECT_EQ(terminal.wait(), 0) << "it goes on after the job";
}

TEST(Top, FitsTheWindowAndSaysWhenItsJobHasEnded) {
    const std::string id = unique_name("top");
    Program program(ddprun_probe({"--nproc-per-node=2", "--rdzv-id=" + id}, {"say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    Terminal terminal({path_of("DDPRUN"), "top", "--job=" + id}, 120);
    EXPECT_TRUE(terminal.shows("SILENT FOR COLLECTIVE")) << terminal.screen();
    EXPECT_TRUE(terminal.shows(" running ")) << terminal.screen();
    terminal.forget();
    terminal.resize(60, 24);
    EXPECT_TRUE(terminal.shows("RANK STATE ")) << terminal.screen();
    terminal.forget();
    terminal.resize(60, 4);
    EXPECT_TRUE(terminal.shows("more lines: a larger window shows them")) << terminal.screen();
    program.signal(SIGTERM);
    program.wait();
    EXPECT_EQ(terminal.wait(), 0);
    EXPECT_THAT(terminal.screen(), HasSubstr(" has ended"));
}

TEST(Ps, FitsTheTerminal) {
    const std::string id = unique_name("ps");
    Program program(ddprun_probe({"--nproc-per-node=2", "--rdzv-id=" + id}, {"say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    Terminal terminal({path_of("DDPRUN"), "ps", "--job=" + id}, 60);
    EXPECT_EQ(terminal.wait(), 0);
    EXPECT_THAT(terminal.screen(), HasSubstr("RANK STATE "));
    for (std::string_view line : split(terminal.screen(), '\n')) EXPECT_LE(trim(line).size(), 60u) << line;
    EXPECT_THAT(run({path_of("DDPRUN"), "ps", "--job=" + id}).out, HasSubstr("COLLECTIVE"))
        << "a pipe gets all columns";
}

}  // namespace
}  // namespace ddprun::test
