#include "launcher/batch/scheduler_command.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "env/io/file.h"
#include "env/nodes/batch_job.h"
#include "env/os/system.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostOutput = 16 << 20;

struct OutputPipe {
    UniqueFd read, write;
    std::string text;
};

Result<OutputPipe> open_pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe");
    return OutputPipe{UniqueFd(ends[0]), UniqueFd(ends[1]), {}};
}

/// In a group of its own, so that all of it can be ended; nothing blocked or ignored.
void set_signals(posix_spawnattr_t& attributes) {
    sigset_t none, all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &all);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
    std::vector<char*> all;
    for (std::string& word : words) all.push_back(word.data());
    all.push_back(nullptr);
    return all;
}

Result<pid_t> start_command(std::vector<std::string> words, int out, int err) {
    std::vector<std::string> variables = scheduler_environment(os::own_environment(), process_environment);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, out, 1);
    ::posix_spawn_file_actions_adddup2(&actions, err, 2);
    set_signals(attributes);
    pid_t child = -1;
    const int failed = ::posix_spawn(&child, words[0].c_str(), &actions, &attributes, pointers_to(words).data(), pointers_to(variables).data());
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) return Error::system(words[0], failed);
    return child;
}

/// One piece; the pipe is closed at its end.
void read_piece(OutputPipe& pipe) {
    char piece[16 * 1024];
    const ssize_t n = ::read(pipe.read.get(), piece, sizeof piece);
    if (n < 0 && errno == EINTR) return;
    if (n <= 0) return pipe.read.reset();
    if (pipe.text.size() < kMostOutput) pipe.text.append(piece, static_cast<std::size_t>(n));
}

/// False: the deadline came first.
bool read_both(OutputPipe& out, OutputPipe& err, TimePoint deadline) {
    while (out.read || err.read) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - MonotonicClock::now()).count();
        if (left <= 0) return false;
        pollfd ready[2] = {{out.read ? out.read.get() : -1, POLLIN, 0}, {err.read ? err.read.get() : -1, POLLIN, 0}};
        if (::poll(ready, 2, static_cast<int>(left)) <= 0) continue;
        if (ready[0].revents != 0) read_piece(out);
        if (ready[1].revents != 0) read_piece(err);
    }
    return true;
}

}  // namespace

Result<CommandOutcome> run_scheduler_command(const std::vector<std::string>& command, Duration patience, const std::string& directory) {
    Result<OutputPipe> out = open_pipe();
    Result<OutputPipe> err = open_pipe();
    if (!out || !err) return (!out ? out : err).error();
    std::vector<std::string> words = command;
    words[0] = find_executable(command[0], scheduler_search_path(process_environment));
    if (words[0].empty()) return Error{Errc::NotFound, fmt::format("{}: not found in PATH", command[0]), 0};
    // glibc before 2.29 cannot change the directory of what it spawns.
    if (!directory.empty()) words.insert(words.begin(), {"/bin/sh", "-c", "cd \"$0\" && exec \"$@\"", directory});
    const Result<pid_t> child = start_command(std::move(words), out->write.get(), err->write.get());
    if (!child) return child.error();
    out->write.reset();
    err->write.reset();
    const bool ended = read_both(*out, *err, deadline_after(MonotonicClock::now(), patience));
    if (!ended) ::kill(-*child, SIGKILL);
    int status = 0;
    while (::waitpid(*child, &status, 0) < 0 && errno == EINTR) {
    }
    if (!ended) return Error{Errc::Timeout, fmt::format("{} took longer than {}", command[0], format_duration(patience)), 0};
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return CommandOutcome{code, std::move(out->text), std::move(err->text)};
}

std::string words_of_refusal(const std::string& program, const CommandOutcome& outcome) {
    std::vector<std::string> lines;
    for (const std::string_view line : split(trim(outcome.err).empty() ? outcome.out : outcome.err, '\n')) {
        if (!trim(line).empty()) lines.emplace_back(trim(line));
    }
    if (lines.empty()) return fmt::format("{} ended with exit code {} and said nothing", program, outcome.exit_code);
    const std::string text = join(lines, "; ");
    return text.starts_with(program + ":") ? text : fmt::format("{}: {}", program, text);
}

}  // namespace ddprun
