#pragma once

#include <functional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "launcher/ask/inquiry.h"
#include "launcher/ask/observation.h"
#include "launcher/job_spec.h"
#include "launcher/node/agent/agent.h"
#include "launcher/node/gpu/gpu_watch.h"

namespace ddprun {

/// The questions to a running job (`ddprun ps` and the like): one node's answer to each, and the head's
/// for the job. Borrows all parts for its whole life.
class JobQuestions {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        const JobSpec& spec;
        Agent& agent;
        Observation& observation;
        Inquiry& inquiry;
        std::string host;
        // The next two are set on the head only.
        std::function<void(const std::string& why)> preempt;  ///< save and stop
        std::function<void(int signal)> signal;               ///< to all workers of all nodes
    };
    /// Registers every question with the inquiry.
    explicit JobQuestions(Parts parts);
    JobQuestions(const JobQuestions&) = delete;
    JobQuestions& operator=(const JobQuestions&) = delete;

  private:
    void node_status(const ControlRequest& request, const Inquiry::Answer& answer);
    void node_signal(const ControlRequest& request, const Inquiry::Answer& answer);
    void node_stacks(const ControlRequest& request, const Inquiry::Answer& answer);
    void job_status(const ControlRequest& request, const Inquiry::Answer& answer);
    void job_signal(const ControlRequest& request, const Inquiry::Answer& answer);
    void job_stacks(const ControlRequest& request, const Inquiry::Answer& answer);
    [[nodiscard]] int local_rank_of(const std::string& rank) const;
    [[nodiscard]] std::string workers_text() const;

    Parts parts_;
    GpuWatch gpus_;
};

}  // namespace ddprun
