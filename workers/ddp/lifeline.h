#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/context.h"

namespace ddp {

class LifelineSocket;
class StopLine;

/// The exit code of a program that was asked to stop and has not finished: "run me again". ddprun ends with
/// it, puts a job back that has --requeue, and nothing takes the run for a complete one.
inline constexpr int kStoppedEarly = 75;

/// The worker's connection to its launcher, for programs that stop in good order.
///
///     ddp::Lifeline lifeline(context);
///     while (...) {
///         step();
///         if (lifeline.should_stop(++steps)) {   // all ranks after the same step
///             save();
///             return ddp::kStoppedEarly;
///         }
///     }
///
/// While a Lifeline exists, SIGTERM and SIGINT request a stop instead of ending the process. A scheduler and
/// ddprun may both send one, so the second of a kind within 5 s is the same request; a later one, or a second
/// Ctrl-C, ends the process. SIGUSR1 and SIGUSR2, which may accompany a notice, do nothing. Signals that the
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

    /// Call it after each step, on every rank: true from the step on after which all ranks stop, the same
    /// step on every rank. ddprun finds that step after a notice (drain, preemption, walltime); a call waits,
    /// for 3 s at most, only where that step is being agreed on. Costs no system call. False without a
    /// launcher, and where ddprun found no such step: then preemption_requested() tells of the notice.
    [[nodiscard]] bool should_stop(std::uint64_t steps_done);
    /// True once the launcher or a signal asks this process to save and stop. Non-blocking: one system call,
    /// none once it is true. The ranks learn of it at different steps; DistributedDataParallel::request_stop
    /// lets all stop after the same one.
    [[nodiscard]] bool preemption_requested();
    /// The reason of the request: "SIGTERM", "walltime in 120 s"; "" before a request, or without a reason.
    [[nodiscard]] const std::string& reason() const { return reason_; }

    /// Reports that start-up is over.
    void ready();
    /// Reports progress. Programs that call ProcessGroup::report_progress need not call it.
    void heartbeat(std::uint64_t steps_done = 0);

  private:
    friend class Recovery;
    /// Goes over to the generation of `context`.
    void follow(const Context& context);

    std::shared_ptr<LifelineSocket> socket_;  ///< null without a launcher
    std::unique_ptr<StopLine> stop_line_;     ///< null without a launcher
    bool requested_ = false;
    std::string reason_;
};

}  // namespace ddp
