#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/result.h"

/// Programs that are run for what they print. Their standard input is /dev/null, and they are in a process
/// group of their own, so that all of it can be ended.
namespace ddprun {

/// Starts a program, and calls `done` once: with its output at its end, cut at `max_bytes`, or with the error
/// (System; Timeout after `patience`, when it has been killed). Its standard error is dropped. Blocks nobody.
/// It is a child of ours: whoever sees SIGCHLD reaps it; the sweep for what workers leave behind does not
/// take it for one of theirs. Borrows loop and system.
void run_tool(os::EventLoop& loop, os::System& system, os::SpawnSpec tool, Duration patience,
              std::size_t max_bytes, std::function<void(Result<std::string>)> done);

struct ToolLimits {
    Duration patience;
    std::size_t max_bytes;  ///< of its standard output, and of its standard error; the rest is dropped
    Duration grace = {};    ///< from SIGTERM, after `patience`, to SIGKILL; 0: there is no SIGTERM
};
struct ToolEnd {
    int exit_code = 0;  ///< 128 + signal where one ended it
    std::string out, err;
    bool is_in_time = true;  ///< false: it was ended after `patience`
};
/// The same without a loop: blocks until the program has ended, and reaps it. Error: System, where it cannot
/// be started.
Result<ToolEnd> run_tool_and_wait(os::SpawnSpec tool, const ToolLimits& limits);

}  // namespace ddprun
