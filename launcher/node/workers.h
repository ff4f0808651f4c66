#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/ends/useful_time.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_mark.h"
#include "launcher/machine/machine.h"
#include "launcher/node/agent_state.h"
#include "launcher/node/pmix/server.h"
#include "launcher/node/worker_memory.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/program.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// What this node's agent needs to know for the whole job.
struct AgentConfig {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    std::string host;
    int store = -1;  ///< descriptor of the socket over which workers reach the store (listen_unix), borrowed
    std::string error_files;  ///< where the paths of error reports begin when there is no log directory
    std::string token;
    JobMark mark;                          ///< the mark that every worker carries
    std::vector<std::string> environment;  ///< "NAME=value": what the workers inherit
    std::uint64_t open_files = 0;          ///< soft limit on descriptors that workers get; 0 inherits ours
    std::optional<int> passed_descriptor;  ///< workers get this descriptor of ours under the same number
    JobCgroup* cgroup = nullptr;           ///< the workers' cgroup; null: there is none
    PmixServer* pmix = nullptr;            ///< the server of the workers' MPI; null: there is none
};

/// Sends a message to the controller.
using SendToHead = std::function<void(rdzv::FromAgent)>;

/// A worker, as its agent knows it beside AgentState::Worker.
struct Worker {
    WorkerPlan plan;
    TimePoint started{};
    TimePoint stop_asked = kNever;  ///< when the agent began to stop this node's workers
    bool is_awaited = false;        ///< the worker has reported its error, and should exit
    bool killed_failing = false;    ///< the agent killed it, because it had failed and did not exit
    UniqueFd lifeline;
    std::string error_path;
    std::string stacks;          ///< the stacks that the worker has sent
    std::string kill_why = {};   ///< why the agent killed it as a failed one; "": it did not
    std::int64_t began_at = -1;  ///< the steps with which it began its generation; -1: it did not say
};

/// The workers of this node in the current generation. The agent owns them; its parts borrow them for their
/// whole life. Local ranks count from 0.
struct NodeWorkers {
    AgentState state;
    rdzv::StartGeneration order;
    int first_logged_rank = 0;  ///< of the first worker when all of this node last started together
    std::vector<Worker> all;
    std::shared_ptr<SegmentFile> segment;  ///< of this generation; null before the first one
    std::unique_ptr<KeptFile> kept;        ///< null: no recovery in place
    int absent_rank = -1;                  ///< it ended with 0 before it had joined this generation; -1: none
    TimePoint abort_set{};  ///< when the last generation in place was begun or suspended, for the log

    [[nodiscard]] int size() const { return static_cast<int>(all.size()); }
    [[nodiscard]] Worker& at(int local_rank) { return all[static_cast<std::size_t>(local_rank)]; }
    [[nodiscard]] const Worker& at(int local_rank) const { return all[static_cast<std::size_t>(local_rank)]; }
    [[nodiscard]] const AgentState::Worker& state_of(int local_rank) const {
        return state.workers[static_cast<std::size_t>(local_rank)];
    }
    [[nodiscard]] int rank_of(int local_rank) const { return order.first_rank + local_rank; }
    /// A worker's output goes on under the number of its predecessor, also where the ranks have changed
    /// since.
    [[nodiscard]] int logged_rank_of(int local_rank) const { return first_logged_rank + local_rank; }
    /// The pid of a worker that runs; 0: it does not.
    [[nodiscard]] pid_t running_pid(int local_rank) const;

    /// The steps that a worker told, else its commits; -1: it counts neither. A commit may be one of an
    /// evaluation.
    [[nodiscard]] std::int64_t steps_of(int local_rank) const;
    [[nodiscard]] std::int64_t most_steps() const;
    /// True for a program without ddp::Recovery: the steps in its letters are all that it tells of them.
    /// Those of ddp::Recovery are commits, which kept memory has, too.
    [[nodiscard]] bool tells_by_letters(int local_rank) const;
    /// What this worker's rank has committed; nullopt: nothing.
    [[nodiscard]] std::optional<CommittedTime> committed_time(int local_rank) const;
    [[nodiscard]] CommittedTime most_committed() const;
    /// The longest time between two commits of this worker's rank; zero: it has committed nothing.
    [[nodiscard]] Duration slowest_unit(int local_rank) const;
    /// How far workers that recover in place have come; empty: not known.
    [[nodiscard]] std::vector<AgentState::Progress> progress() const;
    /// The local rank that the others wait for, as not all have joined libddp's first group; -1: none. It has
    /// nothing to save, and they would wait until the grace is over.
    [[nodiscard]] int missing_at_start() const;
    /// True for a worker that has neither mapped the segment nor said that it has joined. Programs without
    /// libddp do neither, and nobody waits in their segment.
    [[nodiscard]] bool has_never_joined(int local_rank) const;
    /// Ends the wait of workers that join a group: this rank of the world will never come.
    void end_joining(int rank);
};

}  // namespace ddprun
