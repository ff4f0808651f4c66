#pragma once

#include <cstdint>
#include <string>

#include "ddp/context.h"
#include "env/unique_fd.h"

namespace ddp {

/// The worker's wire to its launcher, for programs that want to stop in good order.
///
///     ddp::Lifeline lifeline(context);
///     while (...) {
///         step();
///         if (lifeline.preemption_requested()) { save(); return 0; }   // all ranks together: agree first
///     }
///
/// While one exists, SIGTERM and SIGINT ask for a stop instead of ending the process (the second one of a
/// kind ends it), and SIGUSR1 and SIGUSR2, which may accompany a notice, do nothing. Signals that the program
/// handles itself stay its own. Without a launcher only the signals count. One per process at a time, for one
/// thread.
class Lifeline {
  public:
    /// Takes over the inherited descriptor. Throws InvalidInput when the environment names one that is not
    /// open.
    explicit Lifeline(const Context& context);
    ~Lifeline();
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

    /// True from the moment on that somebody wants us to save and stop. One system call that does not block;
    /// none once it is true.
    [[nodiscard]] bool preemption_requested();
    /// What was said about it: "SIGTERM", "walltime in 120 s"; "" nothing.
    [[nodiscard]] const std::string& reason() const { return reason_; }

    /// Start-up is over.
    void ready();
    /// Alive and getting on. Programs that call ProcessGroup::report_progress need not call it.
    void heartbeat(std::uint64_t steps_done = 0);

  private:
    void read_notices();
    void send(char kind, const std::string& payload);

    ddprun::UniqueFd fd_;
    bool requested_ = false;
    std::string reason_;
};

}  // namespace ddp
