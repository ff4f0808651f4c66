#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/result.h"
#include "rendezvous/wire/message.h"

/// What agents and the controller tell each other.
namespace ddprun::rdzv {

/// An agent's first message: it wants to be part of the job.
struct AgentHello {
    static constexpr MessageType kType = MessageType::AgentHello;
    std::string host;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;                 ///< workers this node runs
    int pid = 0;
    std::string version;                  ///< of ddprun
    std::vector<std::string> addresses;   ///< where other nodes can reach this one
    std::vector<std::string> terms = {};  ///< on which all nodes must agree (membership.h)
    std::string role = "default";
    std::string fabric = {};  ///< what connects it with other nodes: "slingshot"; "" it did not look
    std::vector<std::string> seats =
        {};  ///< by local rank: "CPUs 0-15, NUMA 3, GPU 0"; none where nobody is bound
    std::string instance =
        {};  ///< of this process alone: containers share names of hosts, and numbers of processes
    // Under another controller, which is lost: what this node has been told of the last generation that it
    // was in.
    std::optional<int> kept_place = {};
    std::uint64_t kept_generation = 0;
    int kept_restarts = 0;
    std::string command = {};  ///< what its workers run, without its arguments' text: two jobs that meet by
                               ///< mistake differ in it
    std::string rejoins = {};  ///< its `instance` in a session before, which is over for it; "" none
    bool operator==(const AgentHello&) const = default;
};
struct WorkersStarted {
    static constexpr MessageType kType = MessageType::WorkersStarted;
    std::uint64_t generation = 0;
    bool operator==(const WorkersStarted&) const = default;
};
struct WorkerExited {
    static constexpr MessageType kType = MessageType::WorkerExited;
    std::uint64_t generation = 0;
    int local_rank = 0;
    int rank = 0;
    int pid = 0;
    bool signaled = false;
    int status = 0;  ///< exit code, or the signal when `signaled`
    bool dumped_core = false;
    bool by_us = false;  ///< we stopped it: never a cause
    std::int64_t after_start_ns = 0;
    std::string exec_failure;              ///< why it never ran; "" it ran
    std::vector<std::string> last_stderr;  ///< cut to kReportLines (the last) of kReportLineBytes
    std::string error_file;                ///< cut to kReportErrorBytes
    std::string meaning;  ///< what it probably means; as the next and exec_failure cut to kReportTextBytes
    std::string last_collective;  ///< "in all_reduce #812 (25 MiB)"
    std::int64_t steps = -1;      ///< training steps done, where the worker says; -1 it does not
    bool stopped_failing =
        false;  ///< we stopped it when it had reported its error: its end is its own failure
    std::int64_t error_age_ns = -1;  ///< how long before this its error report was written; -1 it wrote none
    [[nodiscard]] bool failed() const { return signaled || status != 0 || !exec_failure.empty(); }
    bool operator==(const WorkerExited&) const = default;
};
/// No worker of the generation is left on this node.
struct GenerationEnded {
    static constexpr MessageType kType = MessageType::GenerationEnded;
    std::uint64_t generation = 0;
    std::vector<std::string> notes;  ///< for the report: "process 4171 could not be killed"
    bool operator==(const GenerationEnded&) const = default;
};

/// Form the world and start the workers. Of one size, however large the job is.
struct StartGeneration {
    static constexpr MessageType kType = MessageType::StartGeneration;
    std::uint64_t generation = 0;
    int group_rank = 0;
    int group_world_size = 1;
    int first_rank = 0;  ///< global rank of this node's local rank 0
    int world_size = 1;
    int local_world_size = 1;  ///< workers that this node starts
    int role_first_rank = 0;   ///< rank within the role of this node's local rank 0
    int role_world_size = 1;
    std::string master_addr;
    int master_port = 0;
    int restart_count = 0;
    int max_restarts = 0;
    bool agent_store =
        false;      ///< the store of PyTorch's clients is at master_addr and master_port, and is the server's
    int place = 0;  ///< this node's, among all that the job can have: group ranks count those that are taken
    bool operator==(const StartGeneration&) const = default;
};
struct StopGeneration {
    static constexpr MessageType kType = MessageType::StopGeneration;
    std::uint64_t generation = 0;
    int signal = 15;
    std::int64_t grace_ns = 0;  ///< then SIGKILL
    int failed_rank = -1;       ///< whose end is the cause; its peers' collectives end at once. -1: nobody's
    std::string why;
    bool operator==(const StopGeneration&) const = default;
};
/// The job is over.
struct Shutdown {
    static constexpr MessageType kType = MessageType::Shutdown;
    int exit_code = 0;
    std::string why;
    bool operator==(const Shutdown&) const = default;
};

/// Either way: something workers or the controller should know. kind "preempt": stop soon, save first.
struct Notice {
    static constexpr MessageType kType = MessageType::Notice;
    std::string kind;
    std::string text;
    bool operator==(const Notice&) const = default;
};

/// Either way: something about the running job. Answered once with the same number, or not at all.
struct Question {
    static constexpr MessageType kType = MessageType::Question;
    std::uint64_t number = 0;  ///< chosen by whoever asks
    std::string request;       ///< a line as a job's control socket takes it (docs/events.md)
    bool operator==(const Question&) const = default;
};
struct Answer {
    static constexpr MessageType kType = MessageType::Answer;
    std::uint64_t number = 0;
    Blob value;  ///< a line as a job's control socket answers it
    bool operator==(const Answer&) const = default;
};

// Where the job outlives its head (launcher/head/control/succession.h).

/// To the standby: what it needs to be the controller. Its answer, until it is named as the successor, is
/// where it listens.
struct Legacy {
    static constexpr MessageType kType = MessageType::Legacy;
    std::uint64_t generation = 0;
    int restarts_used = 0;
    std::vector<std::string> restart_ages_ns;  ///< how long ago each was decided, oldest first, decimal
    int without_progress = 0;                  ///< generations in a row
    std::int64_t age_ns = 0;                   ///< of the generation
    int agents = 0;                            ///< that have joined, the head's too
    std::int64_t steps = -1;                   ///< the furthest that any worker has got
    int running = 0;                           ///< agents with workers of the generation, the head's own not
    std::string lost =
        {};  ///< the instance of an agent that the job goes on without, and that is not to be counted
    bool operator==(const Legacy&) const = default;
};
struct StandbyListens {
    static constexpr MessageType kType = MessageType::StandbyListens;
    int port = 0;  ///< 0: it has heard that it is the standby no more
    bool operator==(const StandbyListens&) const = default;
};
/// Where to go when this controller is lost.
struct Successor {
    static constexpr MessageType kType = MessageType::Successor;
    std::string host;                    ///< the standby's name; "" nobody succeeds
    std::vector<std::string> addresses;  ///< where it listens, the best first
    int port = 0;
    bool operator==(const Successor&) const = default;
};

/// From a controller that succeeded a lost one, as a tool, to whoever listens where that one did: the job
/// goes on here.
struct JobMoved {
    static constexpr MessageType kType = MessageType::JobMoved;
    std::string host;
    std::vector<std::string> addresses;  ///< where it listens, the best first
    int port = 0;
    std::string instance;  ///< of its process, which may meet itself
    bool operator==(const JobMoved&) const = default;
};

// Only where the controller shows the lines of an agent that nothing else carries to it
// (launcher/node/output/output_sender.h).

/// A piece of what the agent's console would get.
struct OutputPiece {
    static constexpr MessageType kType = MessageType::OutputPiece;
    int stream = 1;  ///< 1 standard output, 2 standard error
    Blob bytes;
    bool operator==(const OutputPiece&) const = default;
};
/// So many bytes more of these have been shown. At most kOutputWindow are under way.
struct OutputShown {
    static constexpr MessageType kType = MessageType::OutputShown;
    std::uint64_t bytes = 0;
    bool operator==(const OutputShown&) const = default;
};

// The rest only where the agents are PMIx servers of their workers (launcher/node/pmix/). What workers
// exchange is opaque here.

/// Who the nodes of a generation are; comes before its StartGeneration.
struct World {
    static constexpr MessageType kType = MessageType::World;
    std::uint64_t generation = 0;
    std::string job;  ///< unlike any other job's, the same on all nodes
    Blob nodes;       ///< by group rank, a line for each: "host workers"
    bool operator==(const World&) const = default;
};
/// All workers of this node that take part in a fence are inside.
struct FenceEntered {
    static constexpr MessageType kType = MessageType::FenceEntered;
    std::uint64_t generation = 0;
    std::string ranks;  ///< who takes part, on all nodes: "0-3, 5". Names the fence: of those ranks one is
                        ///< open at a time
    Blob data;          ///< what these workers bring; above kFencePartBytes nobody gets it
    bool operator==(const FenceEntered&) const = default;
};
/// A fence is complete, or never will be.
struct FenceOver {
    static constexpr MessageType kType = MessageType::FenceOver;
    std::uint64_t generation = 0;
    std::string ranks;
    std::string failure;  ///< "" it is complete
    Blob data;            ///< what all nodes have brought, one behind the other
    bool operator==(const FenceOver&) const = default;
};
/// Either way: what has this rank put? To be answered once with the same number, when the rank has put
/// something.
struct ModexRequest {
    static constexpr MessageType kType = MessageType::ModexRequest;
    std::uint64_t generation = 0;
    std::uint64_t number = 0;  ///< chosen by whoever asks
    int rank = 0;
    bool operator==(const ModexRequest&) const = default;
};
struct ModexReply {
    static constexpr MessageType kType = MessageType::ModexReply;
    std::uint64_t generation = 0;
    std::uint64_t number = 0;
    bool found = false;  ///< false: it has nothing, or has ended
    Blob data;
    bool operator==(const ModexReply&) const = default;
};

/// What an agent says once it has joined.
using FromAgent = std::variant<WorkersStarted, WorkerExited, GenerationEnded, Notice, Question, Answer,
                               FenceEntered, ModexRequest, ModexReply, StandbyListens, OutputPiece>;
/// What the controller says to an agent.
using ToAgent = std::variant<StartGeneration, StopGeneration, Shutdown, Notice, Question, Answer, World,
                             FenceOver, ModexRequest, ModexReply, Legacy, Successor, OutputShown>;

Result<AgentHello> decode_agent_hello(Frame frame);
Result<JobMoved> decode_job_moved(Frame frame);
Result<FromAgent> decode_from_agent(Frame frame);
Result<ToAgent> decode_to_agent(Frame frame);
Result<EncodedMessage> encode_message(AgentHello hello);
Result<EncodedMessage> encode_message(JobMoved moved);
/// A WorkerExited is cut to what protocol_limits.h says.
Result<EncodedMessage> encode_message(FromAgent message);
Result<EncodedMessage> encode_message(ToAgent message);

}  // namespace ddprun::rdzv
