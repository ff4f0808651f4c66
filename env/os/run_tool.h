#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/result.h"

namespace ddprun {

/// Starts a program for what it prints, and calls `done` once: with its output at its end, cut at `max_bytes`, or with
/// the error (System; Timeout after `patience`, when it has been killed). Its standard input is /dev/null, its standard
/// error is dropped. Blocks nobody. It is a child of ours: whoever sees SIGCHLD reaps it;
/// the sweep for what workers leave behind does not take it for one of theirs. Borrows loop and system.
void run_tool(os::EventLoop& loop, os::System& system, os::SpawnSpec tool, Duration patience, std::size_t max_bytes,
              std::function<void(Result<std::string>)> done);

}  // namespace ddprun
