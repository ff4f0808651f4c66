#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/result.h"
#include "rendezvous/wire/message.h"

/// The messages between agents and the controller.
namespace ddprun::rdzv {

/// An agent's first message: it wants to be part of the job.
struct AgentHello {
    static constexpr MessageType kType{64, "AgentHello"};
    std::string host;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;                 ///< workers this node runs
    int pid = 0;
    std::string version;                  ///< of ddprun
    std::vector<std::string> addresses;   ///< addresses at which other nodes reach this one
    std::vector<std::string> terms = {};  ///< settings on which all nodes must agree (membership.h)
    std::string role = "default";
    std::string fabric = {};  ///< the network between the nodes: "slingshot"; "" not detected
    std::vector<std::string> seats =
        {};  ///< by local rank: "CPUs 0-15, NUMA 3, GPU 0"; empty unless workers are bound
    std::string instance =
        {};  ///< unique to this process, because containers may share host names and process ids
    // The last generation that this node was in under an earlier, lost controller.
    std::optional<int> kept_place = {};
    std::uint64_t kept_generation = 0;
    int kept_restarts = 0;
    std::string command = {};      ///< the workers' command without the text of its arguments; tells two jobs
                                   ///< apart that meet by mistake
    std::string rejoins = {};      ///< its `instance` in an earlier session that is over; "" none
    bool keeps_workers = false;    ///< the workers of `kept_generation` have left it, and wait for the next
    std::uint64_t kept_first = 0;  ///< the StartGeneration::first_generation of `kept_generation`
    int kept_first_rank = 0;       ///< the rank of its first worker in `kept_generation`
    bool operator==(const AgentHello&) const = default;
};
struct WorkersStarted {
    static constexpr MessageType kType{65, "WorkersStarted"};
    std::uint64_t generation = 0;
    bool operator==(const WorkersStarted&) const = default;
};
struct WorkerExited {
    static constexpr MessageType kType{66, "WorkerExited"};
    std::uint64_t generation = 0;
    int local_rank = 0;
    int rank = 0;
    int pid = 0;
    bool signaled = false;
    int status = 0;  ///< exit code, or the signal when `signaled`
    bool dumped_core = false;
    bool by_us = false;  ///< ddprun stopped it: never the cause of a failure
    std::int64_t after_start_ns = 0;
    std::string exec_failure;              ///< why it could not be started; "" it ran
    std::vector<std::string> last_stderr;  ///< the last kReportLines lines, cut to kReportLineBytes each
    std::string error_file;                ///< cut to kReportErrorBytes
    std::string meaning;  ///< the probable cause; kReportTextBytes at most, like the next and exec_failure
    std::string last_collective;   ///< "in all_reduce #812 (25 MiB)"
    std::int64_t steps = -1;       ///< training steps done; -1 when the worker does not report them
    bool stopped_failing = false;  ///< ddprun stopped it after it had reported its error: it counts as failed
    std::int64_t error_age_ns = -1;  ///< the age of its error report; -1 it wrote none
    std::int64_t commits = -1;       ///< units that its rank has committed; -1: it commits none
    std::int64_t useful_ns = -1;     ///< their time
    bool failed_at_exec = false;     ///< exec refused the program, so `exec_failure` is not ddprun's own
    int start_errno = 0;             ///< the errno of `exec_failure`; 0: not known
    bool never_joined = false;  ///< it ended with 0 before it had joined: a group of all ranks cannot form
    [[nodiscard]] bool failed() const { return signaled || status != 0 || !exec_failure.empty(); }
    bool operator==(const WorkerExited&) const = default;
};
/// No worker of the generation is left on this node.
struct GenerationEnded {
    static constexpr MessageType kType{67, "GenerationEnded"};
    std::uint64_t generation = 0;
    std::vector<std::string> notes;  ///< for the report: "process 4171 could not be killed"
    bool operator==(const GenerationEnded&) const = default;
};
/// The answer to a StopProposal.
struct StepsDone {
    static constexpr MessageType kType{72, "StepsDone"};
    std::uint64_t generation = 0;
    std::uint64_t step = 0;     ///< of the proposal
    bool listens = false;       ///< all running workers of this node ask whether to stop
    std::uint64_t highest = 0;  ///< the highest step for which a worker has asked
    bool operator==(const StepsDone&) const = default;
};
/// How far a worker has come: Announced to Finished one after the other, the rest as it happens. Recovery in
/// place (docs/elastic.md) knows all but Started.
enum class WorkerStage : std::uint8_t {
    Started,
    Announced,  ///< survives the end of a generation
    Joined,     ///< has joined the generation
    Finished,
    Suspended,  ///< has left its generation at a SuspendGeneration
    LetGo,      ///< has left its generation by itself
    Failing,    ///< has reported its error, and not ended
    Slow,       ///< has not joined yet, but may still do so
    Refused,    ///< does not survive the end of a generation
};
/// All workers of this node have come to a stage; of the stages from LetGo on, one worker is there.
struct WorkersReady {
    static constexpr MessageType kType{74, "WorkersReady"};
    std::uint64_t generation = 0;
    WorkerStage stage = WorkerStage::Started;
    std::string why;          ///< of a refusal: "rank 3: backend mpi", or why a worker has let go
    std::int64_t steps = -1;  ///< the most steps done by a worker of this node; -1: none counts them
    bool operator==(const WorkersReady&) const = default;
};
/// A signal asks this node's ddprun to end the job.
struct StopRequest {
    static constexpr MessageType kType{75, "StopRequest"};
    int signal = 15;
    bool preempts = false;  ///< the workers get time to save
    bool operator==(const StopRequest&) const = default;
};
/// Rank 0 has done the steps between two rehearsals (--rehearse): a new generation in place is due.
struct RehearsalRequest {
    static constexpr MessageType kType{76, "RehearsalRequest"};
    std::uint64_t generation = 0;
    bool operator==(const RehearsalRequest&) const = default;
};
/// A line for the head's log.
struct Remark {
    static constexpr MessageType kType{77, "Remark"};
    std::string text;
    bool operator==(const Remark&) const = default;
};
/// Numbers that rank 0 told, for the job's curves (--tensorboard).
struct WorkerScalars {
    static constexpr MessageType kType{73, "WorkerScalars"};
    std::uint64_t generation = 0;
    Blob lines;  ///< one line for each number: "step seconds value name"
    bool operator==(const WorkerScalars&) const = default;
};

/// Tells an agent to start its workers. Its size does not depend on the number of nodes.
struct StartGeneration {
    static constexpr MessageType kType{80, "StartGeneration"};
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
    bool agent_store = false;  ///< the server serves PyTorch's TCPStore at master_addr and master_port
    int place = 0;             ///< this node's place (membership.h); group ranks count the occupied places
    bool in_place = false;     ///< workers that run go on; the others start again under their ranks
    int failed_rank = -1;      ///< `in_place`: the rank whose end is the cause
    std::uint64_t first_generation = 0;  ///< the generation in which all workers last began together
    std::int64_t start_limit_ns = 0;  ///< `in_place`: the time that workers which start have to join, where
                                      ///< it is longer than --recover-within
    bool operator==(const StartGeneration&) const = default;
};
struct StopGeneration {
    static constexpr MessageType kType{81, "StopGeneration"};
    std::uint64_t generation = 0;
    int signal = 15;
    std::int64_t grace_ns = 0;  ///< the time until SIGKILL
    int failed_rank = -1;  ///< the rank whose end is the cause, so that its peers' collectives end; -1: none
    std::string why;
    std::uint64_t stop_at = 0;  ///< the agreed step after which the workers stop by themselves; 0: none
    bool operator==(const StopGeneration&) const = default;
};
/// Ends the collectives of a generation, but none of its workers: they wait for the next one, which begins in
/// place, or for a StopGeneration. Answered by WorkersReady.
struct SuspendGeneration {
    static constexpr MessageType kType{90, "SuspendGeneration"};
    std::uint64_t generation = 0;
    int failed_rank = -1;  ///< the rank whose loss is the cause; -1: none
    std::string why;
    bool operator==(const SuspendGeneration&) const = default;
};
/// Workers that have finished may end, now and later: all have, or no failure is recovered any more.
struct Release {
    static constexpr MessageType kType{89, "Release"};
    std::uint64_t generation = 0;
    bool operator==(const Release&) const = default;
};
/// Proposes the step after which all workers stop (launcher/head/stop_agreement.h).
struct StopProposal {
    static constexpr MessageType kType{88, "StopProposal"};
    std::uint64_t generation = 0;
    std::uint64_t step = 0;  ///< 0: only asks how far the workers are
    std::string why;         ///< the reason of the stop, for the workers
    bool operator==(const StopProposal&) const = default;
};
/// The job is over.
struct Shutdown {
    static constexpr MessageType kType{82, "Shutdown"};
    int exit_code = 0;
    std::string why;
    bool operator==(const Shutdown&) const = default;
};

/// Tells a node that has joined what it waits for.
struct Waiting {
    static constexpr MessageType kType{91, "Waiting"};
    std::string why;
    bool operator==(const Waiting&) const = default;
};
/// Sends a signal to all workers.
struct ForwardSignal {
    static constexpr MessageType kType{92, "ForwardSignal"};
    int signal = 0;
    bool operator==(const ForwardSignal&) const = default;
};
/// Ends the collectives of a generation that is being stopped; none follows in place.
struct EndCollectives {
    static constexpr MessageType kType{93, "EndCollectives"};
    int lost_rank = 0;
    bool operator==(const EndCollectives&) const = default;
};
/// Ends the wait of workers that join a group: this rank has ended with 0 and will not come.
struct EndJoining {
    static constexpr MessageType kType{94, "EndJoining"};
    int absent_rank = 0;
    bool operator==(const EndJoining&) const = default;
};
/// Kills a worker that hangs; its end counts as a failure.
struct KillRank {
    static constexpr MessageType kType{95, "KillRank"};
    int rank = 0;
    std::string why;
    bool operator==(const KillRank&) const = default;
};
/// Tells workers that listen to save and stop soon.
struct Preempt {
    static constexpr MessageType kType{101, "Preempt"};
    std::string why;
    bool operator==(const Preempt&) const = default;
};

/// A question about the running job, in either direction. Answered at most once, with the same number.
struct Question {
    static constexpr MessageType kType{97, "Question"};
    std::uint64_t number = 0;  ///< chosen by the sender
    std::string request;       ///< a line as a job's control socket takes it (docs/events.md)
    bool operator==(const Question&) const = default;
};
struct Answer {
    static constexpr MessageType kType{98, "Answer"};
    std::uint64_t number = 0;
    Blob value;  ///< a line as a job's control socket answers it
    bool operator==(const Answer&) const = default;
};

// Messages for jobs that outlive their head (launcher/head/succession.h).

/// Tells the standby what it needs to become the controller. Until the standby is named as the successor, it
/// answers with StandbyListens.
struct JobSnapshot {
    static constexpr MessageType kType{85, "JobSnapshot"};
    std::uint64_t generation = 0;
    int restarts_used = 0;
    std::vector<std::string> restart_ages_ns;  ///< the age of each restart, oldest first, decimal
    int without_progress = 0;                  ///< generations in a row
    std::int64_t age_ns = 0;                   ///< age of the generation
    int agents = 0;                            ///< agents that have joined, including the head's
    std::int64_t steps = -1;                   ///< the most steps that a worker has reported
    int running = 0;                           ///< agents with workers of the generation, except the head's
    std::string lost = {};                     ///< the instance of a lost agent, which is not to be counted
    int ranks = 1;                             ///< of the world
    int recoveries = 0;                        ///< failures that were recovered in place
    std::int64_t longest_start_ns = 0;         ///< until all workers that started together had joined
    bool operator==(const JobSnapshot&) const = default;
};
struct StandbyListens {
    static constexpr MessageType kType{69, "StandbyListens"};
    int port = 0;  ///< 0: confirms that it is not the standby any more
    bool operator==(const StandbyListens&) const = default;
};
/// Tells an agent where to connect when this controller is lost.
struct Successor {
    static constexpr MessageType kType{86, "Successor"};
    std::string host;                    ///< the standby's name; "" there is no standby
    std::vector<std::string> addresses;  ///< the standby's addresses, the best first
    int port = 0;
    bool operator==(const Successor&) const = default;
};

/// A controller that succeeded a lost one sends it, as a tool, to the lost one's address: the job goes on at
/// the sender.
struct JobMoved {
    static constexpr MessageType kType{70, "JobMoved"};
    std::string host;
    std::vector<std::string> addresses;  ///< the sender's addresses, the best first
    int port = 0;
    std::string instance;  ///< the sender's process, which may reach itself
    bool operator==(const JobMoved&) const = default;
};

// Messages for agents whose console output nothing else carries to the controller
// (launcher/output/output_sender.h).

/// A piece of the agent's console output.
struct OutputPiece {
    static constexpr MessageType kType{71, "OutputPiece"};
    int stream = 1;  ///< 1 standard output, 2 standard error
    Blob bytes;
    bool operator==(const OutputPiece&) const = default;
};
/// Tells how many more bytes of OutputPieces have been shown. At most kOutputWindow bytes are under way.
struct OutputShown {
    static constexpr MessageType kType{87, "OutputShown"};
    std::uint64_t bytes = 0;
    bool operator==(const OutputShown&) const = default;
};

// Messages for agents that are PMIx servers of their workers (launcher/node/pmix/). The workers' data is
// opaque here.

/// The nodes of a generation; sent before its StartGeneration.
struct World {
    static constexpr MessageType kType{83, "World"};
    std::uint64_t generation = 0;
    std::string job;  ///< unique to the job, the same on all nodes
    Blob nodes;       ///< one line for each node, by group rank: "host workers"
    bool operator==(const World&) const = default;
};
/// All workers of this node that take part in a fence have entered it.
struct FenceEntered {
    static constexpr MessageType kType{68, "FenceEntered"};
    std::uint64_t generation = 0;
    std::string ranks;  ///< the participants on all nodes: "0-3, 5". They name the fence: the same ranks have
                        ///< at most one open
    Blob data;          ///< data of this node's workers; not forwarded when above kFencePartBytes
    bool operator==(const FenceEntered&) const = default;
};
/// A fence is complete, or never will be.
struct FenceOver {
    static constexpr MessageType kType{84, "FenceOver"};
    std::uint64_t generation = 0;
    std::string ranks;
    std::string failure;  ///< "" it is complete
    Blob data;            ///< the data of all nodes, one after the other
    bool operator==(const FenceOver&) const = default;
};
/// Asks for the data that a rank has put, in either direction. Answered once with the same number, when the
/// rank has put something.
struct ModexRequest {
    static constexpr MessageType kType{99, "ModexRequest"};
    std::uint64_t generation = 0;
    std::uint64_t number = 0;  ///< chosen by the sender
    int rank = 0;
    bool operator==(const ModexRequest&) const = default;
};
struct ModexReply {
    static constexpr MessageType kType{100, "ModexReply"};
    std::uint64_t generation = 0;
    std::uint64_t number = 0;
    bool found = false;  ///< false: the rank has no data, or has ended
    Blob data;
    bool operator==(const ModexReply&) const = default;
};

/// The messages of an agent that has joined.
using FromAgent = std::variant<WorkersStarted, WorkerExited, GenerationEnded, Question, Answer, FenceEntered,
                               ModexRequest, ModexReply, StandbyListens, OutputPiece, StepsDone,
                               WorkerScalars, WorkersReady, StopRequest, RehearsalRequest, Remark>;
/// The messages of the controller to an agent.
using ToAgent =
    std::variant<StartGeneration, StopGeneration, Shutdown, Question, Answer, World, FenceOver, ModexRequest,
                 ModexReply, JobSnapshot, Successor, OutputShown, StopProposal, Release, SuspendGeneration,
                 Waiting, ForwardSignal, EndCollectives, EndJoining, KillRank, Preempt>;

Result<AgentHello> decode_agent_hello(Frame frame);
Result<JobMoved> decode_job_moved(Frame frame);
Result<FromAgent> decode_from_agent(Frame frame);
Result<ToAgent> decode_to_agent(Frame frame);
Result<EncodedMessage> encode_message(AgentHello hello);
Result<EncodedMessage> encode_message(JobMoved moved);
/// The texts of a WorkerExited are cut to the limits in protocol_limits.h.
Result<EncodedMessage> encode_message(FromAgent message);
Result<EncodedMessage> encode_message(ToAgent message);

}  // namespace ddprun::rdzv
