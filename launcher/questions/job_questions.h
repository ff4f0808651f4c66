#pragma once

#include <string>

#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "launcher/node/agent.h"
#include "launcher/node/gpus.h"
#include "launcher/questions/inquiry.h"
#include "launcher/questions/observation.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// One node's answers to the questions to a running job (`ddprun ps` and the like). Borrows all parts for its
/// whole life.
class NodeQuestions {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        const JobSpec& spec;
        Agent& agent;
        Observation& observation;
        Inquiry& inquiry;
        std::string host;
    };
    /// Registers every question with the inquiry.
    explicit NodeQuestions(Parts parts);
    NodeQuestions(const NodeQuestions&) = delete;
    NodeQuestions& operator=(const NodeQuestions&) = delete;

  private:
    void status(const ControlRequest& request, const Inquiry::Answer& answer);
    void signal(const ControlRequest& request, const Inquiry::Answer& answer);
    void stacks(const ControlRequest& request, const Inquiry::Answer& answer);
    [[nodiscard]] int local_rank_of(const std::string& rank) const;
    [[nodiscard]] std::string workers_text() const;

    Parts parts_;
    GpuWatch gpus_;
};

/// The head's answers to the same questions, for the job. Borrows all parts for its whole life.
class JobQuestions {
  public:
    struct Parts {
        const JobSpec& spec;
        Observation& observation;
        Inquiry& inquiry;
        Survey& survey;
        Controller& controller;
    };
    /// Registers every question with the inquiry.
    explicit JobQuestions(Parts parts);
    JobQuestions(const JobQuestions&) = delete;
    JobQuestions& operator=(const JobQuestions&) = delete;

  private:
    void status(const ControlRequest& request, const Inquiry::Answer& answer);
    void signal(const ControlRequest& request, const Inquiry::Answer& answer);
    void stacks(const ControlRequest& request, const Inquiry::Answer& answer);

    Parts parts_;
};

}  // namespace ddprun
