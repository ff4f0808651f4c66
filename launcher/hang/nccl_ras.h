#pragma once

#include <functional>
#include <string>

#include "env/io/ras_dialogue.h"
#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"

namespace ddprun {

/// Asks NCCL's RAS service and calls `done` once within `timeout`, with the text, or with the part that has
/// arrived and a note. Does not block. Error: System (no listener), NotFound (the name), Protocol, Timeout
/// (no byte arrived).
void ask_nccl_ras(os::EventLoop& loop, const Endpoint& where, Duration timeout,
                  std::function<void(Result<std::string>)> done);

/// Longer than NCCL waits itself: 2 s, as we ask it to, for processes that do not answer, and 5 s for all.
inline constexpr Duration kRasTimeout = std::chrono::seconds(8);

}  // namespace ddprun
