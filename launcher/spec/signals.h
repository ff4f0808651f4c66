#pragma once

#include <signal.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The signals that a running job reads from its event loop, and functions that block them in this thread or
/// unblock them.
const std::vector<int>& handled_signals();
void block_handled_signals();
void unblock_handled_signals();

/// Lets TERM, INT, HUP and QUIT end this process while the object lives: for a wait before the job has begun.
class StoppableWait {
  public:
    StoppableWait();
    ~StoppableWait();
    StoppableWait(const StoppableWait&) = delete;
    StoppableWait& operator=(const StoppableWait&) = delete;

  private:
    sigset_t before_{};
};

/// Adds what --signal did not name to `actions`: TERM INT HUP QUIT stop, USR1 USR2 CONT TSTP WINCH are
/// forwarded. A signal that this process ignores, because of nohup(1) or a shell, stays ignored, except CONT;
/// one that is named gets its default disposition, which workers inherit.
void complete_signals(std::map<int, SignalAction>& actions);

/// "SIGTERM", "term", "TERM" or "15" as a signal number; nullopt for anything else.
std::optional<int> signal_from_name(std::string_view name);
/// "SIGKILL"; "signal 77" for a number without a name.
std::string signal_name(int signal);

}  // namespace ddprun
