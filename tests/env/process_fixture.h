#pragma once

#include <signal.h>
#include <sys/wait.h>

#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/os/system.h"
#include "tests/support/fake_clock.h"

namespace ddprun::test {

inline os::SpawnSpec program(const std::string& path, const std::vector<std::string>& arguments = {}) {
    os::SpawnSpec spec;
    spec.program = path;
    spec.arguments = {path};
    spec.arguments.insert(spec.arguments.end(), arguments.begin(), arguments.end());
    spec.environment = {"PATH=/usr/bin:/bin", "LC_ALL=C"};
    return spec;
}

inline os::SpawnSpec shell(const std::string& script) { return program("/bin/sh", {"-c", script}); }

/// Reads to the end of file, which comes when the last process that holds the other end has ended.
inline std::string read_to_end(int fd) {
    std::string text;
    for (char piece[4096];;) {
        if (!*wait_readable(fd, soon())) return text + "<timed out>";
        const ssize_t got = ::read(fd, piece, sizeof piece);
        if (got <= 0) return text;
        text.append(piece, static_cast<std::size_t>(got));
    }
}

/// Reads up to the next newline and drops it.
inline std::string read_line(int fd) {
    std::string line;
    for (char c = 0;;) {
        if (!*wait_readable(fd, soon()) || ::read(fd, &c, 1) != 1) return line + "<ended>";
        if (c == '\n') return line;
        line += c;
    }
}

/// Waits for the next end of a child, without reaping it.
inline os::ChildExit wait_for_exit(os::LinuxSystem& system) {
    siginfo_t info{};
    ::waitid(P_ALL, 0, &info, WEXITED | WNOWAIT);
    return system.next_exit().value_or(os::ChildExit{});
}

struct Ran {
    std::string output;  ///< its stdout
    os::ChildExit exit;
};

/// Runs a program to its end with its stdout in a pipe.
inline Ran run(os::LinuxSystem& system, os::SpawnSpec spec) {
    Result<os::System::Pipe> pipe = system.make_pipe(65536);
    if (!pipe) return {pipe.error().what, {}};
    spec.descriptors.push_back({pipe->write.get(), 1});
    const Result<pid_t> pid = system.spawn(spec);
    if (!pid) return {pid.error().what, {}};
    pipe->write.reset();
    Ran ran;
    ran.output = read_to_end(pipe->read.get());
    ran.exit = wait_for_exit(system);
    system.reap(*pid);
    return ran;
}

inline bool has_no_children() { return ::waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD; }

}  // namespace ddprun::test
