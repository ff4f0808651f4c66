#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "env/unique_fd.h"
#include "tests/support/default_signals.h"

namespace ddprun::test {

/// A program in the foreground of its own terminal, with a simulated keyboard.
class Terminal {
  public:
    explicit Terminal(std::vector<std::string> command, unsigned short columns = 80,
                      unsigned short rows = 24) {
        int keyboard = -1;
        const winsize size{rows, columns, 0, 0};
        pid_ = ::forkpty(&keyboard, nullptr, nullptr, &size);
        if (pid_ == 0) {
            take_default_signals();
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
        if (::write(keyboard_.get(), keys.data(), keys.size()) != static_cast<ssize_t>(keys.size()))
            ADD_FAILURE() << "type";
    }
    /// Resizes the window.
    void resize(unsigned short columns, unsigned short rows) {
        const winsize size{rows, columns, 0, 0};
        if (::ioctl(keyboard_.get(), TIOCSWINSZ, &size) != 0) ADD_FAILURE() << "resize";
    }
    /// Forgets the output so far.
    void forget() { screen_.clear(); }
    bool shows(const std::string& text, std::chrono::milliseconds patience = std::chrono::seconds(20)) {
        const auto until = std::chrono::steady_clock::now() + patience;
        while (screen_.find(text) == std::string::npos) {
            if (std::chrono::steady_clock::now() > until || !read_some())
                return screen_.find(text) != std::string::npos;
        }
        return true;
    }
    /// The exit code; -1 if the program does not end in time.
    int wait(std::chrono::milliseconds patience = std::chrono::seconds(20)) {
        const auto until = std::chrono::steady_clock::now() + patience;
        while (std::chrono::steady_clock::now() < until) {
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
    /// False if the other side has closed and all output has been read.
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

}  // namespace ddprun::test
