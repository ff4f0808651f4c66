#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/ends/report.h"
#include "launcher/head/job_state.h"
#include "launcher/node/agent.h"
#include "launcher/output/output.h"
#include "launcher/questions/request_server.h"
#include "launcher/talk/control.h"
#include "launcher/talk/event_file.h"
#include "launcher/talk/job_status.h"

namespace ddprun {

/// Shows a running job to the outside: control socket, --events, --trace, --metrics-port. Reads its parts and
/// changes nothing. A handler (Inquiry) answers the socket's requests. Borrows all parts for its whole life.
class Observation {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::Log& log;
        const JobSpec& spec;
        Agent& agent;
        Output& output;
        std::string job;  ///< the value of DDPRUN_JOB
        std::string program;
        std::string host;
        /// Adds the facts about the job that the head knows (add_job); on another node nothing.
        std::function<void(JobStatus&)> add_job;
    };

    explicit Observation(Parts parts) : parts_(std::move(parts)) { order_.world_size = 0; }

    /// Opens what the command line asks for, before any worker starts. Without a control socket it only
    /// warns. Error: InvalidArgument (--events, --trace), System (--metrics-port).
    Status open(ControlHandler questions);

    /// The status of this node; on the head with the facts about the job.
    [[nodiscard]] JobStatus status() const;

    // Events of the job, for --events.
    void generation_started(const rdzv::StartGeneration& order);
    /// All workers of this node have started.
    void workers_started();
    /// A message of the agent on `host` to the controller: on the head of all nodes, elsewhere of this one.
    void node_says(const rdzv::WorkerExited& exit, const std::string& host);
    void node_says(const rdzv::GenerationEnded& ended, const std::string& host);
    void node_says(const auto&, const std::string&) {}
    void decided(const JobEvent& event);
    void recovered(const job_action::Recovered& recovery);
    void signalled(int signal, SignalAction action);
    /// A signal by `ddprun signal`; nullopt: to all ranks.
    void signal_asked(int signal, std::optional<int> rank);
    void finished(const JobEnd& end);
    /// The end of the job on a node that is not the head.
    void finished(int exit_code, const std::string& failure);

  private:
    using Fields = std::vector<std::pair<std::string, JobEventLine::Value>>;
    Status open_trace(const EventOrigin& origin);
    /// Writes an event; nullopt is the current generation.
    void write(std::string event, Fields fields, std::optional<std::uint64_t> generation = std::nullopt);
    [[nodiscard]] WorkerStatus worker_status(int local_rank) const;

    Parts parts_;
    TimePoint begun_ = MonotonicClock::now();
    rdzv::StartGeneration order_;  ///< the generation that runs, or ran last
    std::vector<pid_t> started_;   ///< workers whose start has been written, by local rank
    std::unique_ptr<RequestServer> control_;
    std::unique_ptr<EventFile> events_;
    std::unique_ptr<EventFile> traced_;  ///< null unless --trace
    Fields clock_;                       ///< of the trace's lines
    std::unique_ptr<RequestServer> metrics_;
};

/// Makes a node's status the head's: adds what the controller knows. `latest`: the part of the useful time
/// for which the workers that run now account.
void add_job(JobStatus& status, const JobState& state, const JobTime& time, Duration latest,
             RecoverSpec::Mode recover);

}  // namespace ddprun
