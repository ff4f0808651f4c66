#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/event_loop.h"
#include "env/log.h"
#include "launcher/agent.h"
#include "launcher/control_socket.h"
#include "launcher/controller.h"
#include "launcher/event_file.h"
#include "launcher/job_status.h"
#include "launcher/metrics_server.h"
#include "launcher/output.h"

namespace ddprun {

/// How a running job is seen from outside: control socket, --events, --metrics-port. It looks at the parts and changes
/// nothing. What the socket answers is in job_questions.h. Borrows all parts for its whole life.
class Observation {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::Log& log;
        const JobSpec& spec;
        Agent& agent;
        Output& output;
        const Controller* controller;  ///< null on a node that is not the head
        std::string job;               ///< the value of DDPRUN_JOB
        std::string program;
        std::string host;
    };

    explicit Observation(Parts parts) : parts_(std::move(parts)) {}

    /// Opens what the command line asks for, before anything is started. A control socket that cannot be had is a
    /// warning. Error: InvalidArgument (--events), System (--metrics-port).
    Status open();

    /// A question that a running job answers (see ControlSocket::on).
    void on_request(const std::string& name, ControlSocket::Handler handler);

    /// Of this node; on the head with what is known there of the job.
    [[nodiscard]] JobStatus status() const;

    // What happens to the job, for --events.
    void generation_started(const rdzv::StartGeneration& order);
    /// What this node's agent tells the controller.
    void agent_says(const rdzv::Message& message);
    /// What the controller is told by an agent, ours too, on that host.
    void node_says(const rdzv::Message& message, const std::string& host);
    void decided(const JobEvent& event);
    void signalled(int signal, SignalAction action);
    /// By `ddprun signal`; nullopt: to all.
    void signal_asked(int signal, std::optional<int> rank);
    void finished(const JobEnd& end);
    /// The end as a node that is not the head hears it.
    void finished(int exit_code, const std::string& failure);

  private:
    using Fields = std::vector<std::pair<std::string, JobEventLine::Value>>;
    /// Of the current generation when none is named.
    void write(std::string event, Fields fields, std::optional<std::uint64_t> generation = std::nullopt);
    void worker_exited(const rdzv::WorkerExited& exit, const std::string& host);
    [[nodiscard]] WorkerStatus worker_status(int local_rank) const;

    Parts parts_;
    TimePoint begun_ = MonotonicClock::now();
    std::uint64_t generation_ = 0;
    int world_size_ = 0;
    int nodes_ = 1;
    int restart_count_ = 0;
    std::unique_ptr<ControlSocket> control_;
    std::unique_ptr<EventFile> events_;
    std::unique_ptr<MetricsServer> metrics_;
};

}  // namespace ddprun
