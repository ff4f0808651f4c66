#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/result.h"

/// Functions that run a program for its output. Its standard input is /dev/null, and it has its own process
/// group, so that all of it can be killed.
namespace ddprun {

/// Starts a program, and calls `done` once: with its output at its end, cut at `max_bytes`, or with an error
/// (System; Timeout after `timeout`, when it was killed). Drops its standard error. Does not block. The
/// SIGCHLD handler must reap the program; the sweep for workers' stray processes leaves it out. Borrows loop
/// and system.
void run_tool(os::EventLoop& loop, os::System& system, os::SpawnSpec tool, Duration timeout,
              std::size_t max_bytes, std::function<void(Result<std::string>)> done);

struct ToolLimits {
    Duration timeout;
    std::size_t max_bytes;  ///< of its standard output, and of its standard error; the rest is dropped
    Duration grace = {};    ///< from SIGTERM, after `timeout`, to SIGKILL; 0: no SIGTERM
};
struct ToolEnd {
    int exit_code = 0;  ///< 128 + N after signal N
    std::string out, err;
    bool is_in_time = true;  ///< false: it was ended after `timeout`
};
/// Runs a program without a loop: blocks until it has ended, and reaps it. Error: System, when it cannot be
/// started.
Result<ToolEnd> run_tool_and_wait(os::SpawnSpec tool, const ToolLimits& limits);

}  // namespace ddprun
