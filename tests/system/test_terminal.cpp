#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <fstream>

#include "tests/support/run_program.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// A program in the foreground of a terminal of its own, and somebody at its keyboard.
class Terminal {
  public:
    explicit Terminal(std::vector<std::string> command) {
        int keyboard = -1;
        pid_ = ::forkpty(&keyboard, nullptr, nullptr, nullptr);
        if (pid_ == 0) {
            std::vector<char*> argv;
            for (std::string& word : command) argv.push_back(word.data());
            argv.push_back(nullptr);
            ::execv(argv[0], argv.data());
            ::_exit(127);
        }
        keyboard_.reset(keyboard);
    }
    ~Terminal() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, nullptr, 0);
        }
    }
    Terminal(const Terminal&) = delete;
    Terminal& operator=(const Terminal&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    [[nodiscard]] const std::string& screen() const { return screen_; }
    void type(std::string_view keys) {
        if (::write(keyboard_.get(), keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) ADD_FAILURE() << "type";
    }
    bool shows(const std::string& text, std::chrono::milliseconds patience = 20s) {
        const auto until = Clock::now() + patience;
        while (screen_.find(text) == std::string::npos) {
            if (Clock::now() > until || !read_some()) return screen_.find(text) != std::string::npos;
        }
        return true;
    }
    /// The exit code; -1 when it does not end in time.
    int wait(std::chrono::milliseconds patience = 20s) {
        const auto until = Clock::now() + patience;
        while (Clock::now() < until) {
            read_some();
            int status = 0;
            if (::waitpid(pid_, &status, WNOHANG) != pid_) continue;
            pid_ = -1;
            while (read_some()) {
            }
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        return -1;
    }

  private:
    /// False at the end of what is there: the other side has closed.
    bool read_some() {
        pollfd input{keyboard_.get(), POLLIN, 0};
        if (::poll(&input, 1, 20) <= 0) return pid_ > 0;
        std::array<char, 4096> piece;
        const ssize_t n = ::read(keyboard_.get(), piece.data(), piece.size());
        if (n <= 0) return false;
        screen_.append(piece.data(), static_cast<std::size_t>(n));
        return true;
    }

    pid_t pid_ = -1;
    UniqueFd keyboard_;
    std::string screen_;
};

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

TEST(Terminal, WhatIsTypedReachesTheChosenRankOnly) {
    Terminal terminal(ddprun_probe({"--nproc-per-node=2", "--stdin=1"}, {"say", "up", "cat"}));
    ASSERT_TRUE(terminal.shows("up"));
    terminal.type("a line\n");
    EXPECT_TRUE(terminal.shows("a line")) << terminal.screen();
    terminal.type("\x04");  // Ctrl-D ends its input
    EXPECT_EQ(terminal.wait(), 0) << terminal.screen();
}

TEST(Terminal, CtrlCStopsGracefullyAndASecondKills) {
    Terminal terminal(ddprun_probe({"--nproc-per-node=2"}, {"ignore", "2", "ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(terminal.shows("[1]:") && terminal.shows("[0]:"));
    terminal.type("\x03");
    ASSERT_TRUE(terminal.shows("SIGINT: stopping 2 workers")) << terminal.screen();
    terminal.type("\x03");
    EXPECT_EQ(terminal.wait(5s), 75) << terminal.screen();
}

TEST(Terminal, AWaitThatTakesLongIsCountedDown) {
    Terminal terminal(ddprun_probe({"--nproc-per-node=1", "--shutdown-timeout=3"}, {"ignore", "2", "say", "up", "hold"}));
    ASSERT_TRUE(terminal.shows("up"));
    terminal.type("\x03");
    EXPECT_TRUE(terminal.shows("SIGKILL in 2 s") && terminal.shows("SIGKILL in 1 s")) << terminal.screen();
    EXPECT_EQ(terminal.wait(), 75) << terminal.screen();
}

TEST(Terminal, CtrlZStopsTheWorkersWithDdprunAndAContinueWakesThem) {
    Program program(ddprun_probe({"--nproc-per-node=1"}, {"say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("up"));
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

TEST(Terminal, ADebuggerGetsTheTerminalAndGivesItBack) {
    if (::access("/usr/bin/gdb", X_OK) != 0) GTEST_SKIP() << "gdb is not installed";
    Terminal terminal({path_of("DDPRUN"), "--nproc-per-node=2", "--attach", "0=gdb -q -nx --args", "/bin/true"});
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

}  // namespace
}  // namespace ddprun::test
