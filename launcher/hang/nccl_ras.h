#pragma once

#include <functional>
#include <string>

#include "env/io/ras_dialogue.h"
#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"

namespace ddprun {

/// Asks, and calls `done` once within `patience`, with the text; with what has come by then, which says so,
/// if it is not complete. Error: System (nobody listens), NotFound (the name), Protocol, Timeout (not a
/// word). Blocks nobody.
void ask_nccl_ras(os::EventLoop& loop, const Endpoint& where, Duration patience,
                  std::function<void(Result<std::string>)> done);

/// NCCL itself waits up to 2 s, as we tell it, for processes that do not answer, and 5 s for all.
inline constexpr Duration kRasPatience = std::chrono::seconds(8);

}  // namespace ddprun
