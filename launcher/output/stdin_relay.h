#pragma once

#include <string>

#include "env/os/event_loop.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Passes the input of ddprun's terminal on to one worker.
///
/// A worker is in a process group of its own, in the background of the terminal: reading it directly would
/// stop it (SIGTTIN). So ddprun, in the foreground, reads and writes into a pipe that is the worker's
/// standard input. When the worker does not read, ddprun does not either; end-of-file (Ctrl-D) is passed on.
/// A standard input that is no terminal needs no relay: the worker inherits it.
class StdinRelay {
  public:
    /// `input` is borrowed; `worker` is the non-blocking write end of the worker's standard input.
    StdinRelay(os::EventLoop& loop, int input, UniqueFd worker);
    ~StdinRelay();
    StdinRelay(const StdinRelay&) = delete;
    StdinRelay& operator=(const StdinRelay&) = delete;

  private:
    void read_input();
    void write_worker();
    void finish();

    os::EventLoop& loop_;
    int input_;
    UniqueFd worker_;
    std::string pending_;
};

}  // namespace ddprun
