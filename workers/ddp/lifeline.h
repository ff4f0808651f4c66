#pragma once

#include <cstdint>
#include <string>

#include "ddp/context.h"
#include "env/unique_fd.h"

namespace ddp {

/// The worker's connection to its launcher, for programs that stop in good order.
///
///     ddp::Lifeline lifeline(context);
///     while (...) {
///         step();
///         if (lifeline.preemption_requested()) { save(); return 0; }   // all ranks together: agree first
///     }
///
/// While a Lifeline exists, SIGTERM and SIGINT request a stop instead of ending the process (the second one
/// of a kind ends it), and SIGUSR1 and SIGUSR2, which may accompany a notice, do nothing. Signals that the
/// program handles itself stay its own. Without a launcher only the signals count. One per process at a time,
/// for one thread.
class Lifeline {
  public:
    /// Takes over the inherited descriptor. Throws InvalidInput when the environment names one that is not
    /// open.
    explicit Lifeline(const Context& context);
    ~Lifeline();
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

    /// True once the launcher or a signal asks this process to save and stop. Non-blocking: one system call,
    /// none once it is true.
    [[nodiscard]] bool preemption_requested();
    /// The reason of the request: "SIGTERM", "walltime in 120 s"; "" before a request, or without a reason.
    [[nodiscard]] const std::string& reason() const { return reason_; }

    /// Reports that start-up is over.
    void ready();
    /// Reports progress. Programs that call ProcessGroup::report_progress need not call it.
    void heartbeat(std::uint64_t steps_done = 0);

  private:
    void read_notices();
    void send(char kind, const std::string& payload);

    ddprun::UniqueFd fd_;
    bool requested_ = false;
    std::string reason_;
};

}  // namespace ddp
