#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"

namespace ddprun {

/// How many workers a node runs, as the user wrote it.
struct WorkerCount {
    enum class Kind : std::uint8_t { Number, Auto, Gpu, Cpu } kind = Kind::Number;
    int number = 1;
    bool operator==(const WorkerCount&) const = default;
};

/// The program and how it is run.
struct ProgramSpec {
    enum class Kind : std::uint8_t {
        Detect,      ///< a .py file is run with Python, anything else directly
        Executable,  ///< --no-python
        Module,      ///< -m: python -m NAME
        RunPath,     ///< --run-path: runpy.run_path
    } kind = Kind::Detect;
    std::string name;
    std::vector<std::string> arguments;  ///< "${local_rank}" and "${rank}" are substituted per worker
};

struct Nodes {
    int min = 1;
    int max = 1;
    bool operator==(const Nodes&) const = default;
};
/// As --nnodes is written: "3", "2:3".
inline std::string to_string(const Nodes& nodes) {
    return (nodes.min == nodes.max ? "" : std::to_string(nodes.min) + ":") + std::to_string(nodes.max);
}

/// How workers find each other, after --standalone and the defaults have been applied.
struct RendezvousSpec {
    std::string backend = "static";    ///< static or c10d: accepted, our own server serves both
    std::optional<Endpoint> endpoint;  ///< of the controller; none: this node, any free port
    std::string run_id = "none";
    std::optional<bool> is_host;  ///< --rdzv-conf: whether this node is the head
    std::optional<Duration>
        heartbeat_timeout;  ///< a node that is silent for this long is lost; wins over the next two
    std::optional<Duration> keep_alive_interval;  ///< time between two heartbeats of a node
    std::optional<int> keep_alive_attempts;       ///< a node that misses so many heartbeats in a row is lost
    Duration join_timeout = std::chrono::seconds(600);
    Duration last_call = std::chrono::seconds(30);  ///< wait for more nodes once min has joined
    std::optional<int> node_rank;
    std::optional<std::string> master_addr;  ///< MASTER_ADDR of the workers; none: the address that worked
    std::optional<int> master_port;          ///< none: a free port, reserved until the workers start
    std::optional<std::string> local_addr;
    std::string iface;           ///< --iface as given; "" none
    std::string listen_on;       ///< this node's address on `iface`: it listens on this one only; "" on all
    bool insecure = false;       ///< several nodes without a secret (job_token.h)
    bool tls = false;            ///< --tls: connections between hosts and the controller are encrypted
    bool head_is_apart = false;  ///< the head's host is none of the nodes, and runs no workers
};

/// What starts ddprun on the other hosts.
enum class Starter : std::uint8_t {
    Auto,  ///< the one that belongs to the source of the hosts
    None,  ///< this ddprun starts none: somebody else does
    Pbsdsh,
    Tm,  ///< pbs_tmrsh
    Mpiexec,
    Srun,
    Blaunch,  ///< LSF's
    Ssh,
};

/// How one command starts all nodes.
struct StartSpec {
    Starter starter = Starter::Auto;
    std::string hosts, hostfile;                  ///< as given; "" none: the scheduler's
    Duration timeout = std::chrono::seconds(60);  ///< until each of the others has joined
    std::vector<std::string>
        environment;  ///< --env, as given: "NAME" (sent to the other hosts) or "NAME=VALUE"
};

/// When nodes that join a running elastic job become part of it.
enum class Grow : std::uint8_t {
    Now,      ///< at once: the running generation is stopped for it
    Restart,  ///< when another generation starts for another reason
};

/// When the workers are started again after a failure.
struct RestartSpec {
    int max_restarts = 0;
    std::optional<Duration> window;                   ///< "3/1h": at most max_restarts within any such span
    Duration backoff = std::chrono::milliseconds(0);  ///< before the 2nd restart in a row, then doubled
    Duration backoff_max = std::chrono::seconds(60);
};

/// What follows the failure of some workers.
struct RecoverSpec {
    enum class Mode : std::uint8_t {
        Auto,  ///< the failed ones start again, where all have announced that they survive it; else Restart
        Restart,  ///< all workers start again
        Program,  ///< the others go on, and nobody starts again before all have ended
    } mode = Mode::Auto;
    Duration within = std::chrono::seconds(60);  ///< the limit of each wait of a recovery
    int rehearse =
        0;  ///< the world is formed again, without a failure, after so many steps or more; 0: never
};

/// The value of --recover.
constexpr std::string_view name_of(RecoverSpec::Mode mode) {
    constexpr std::string_view kNames[] = {"auto", "restart", "program"};
    return kNames[static_cast<unsigned>(mode)];
}

/// For people: what follows a failure where nothing recovers in place by choice.
constexpr std::string_view without_recovery(RecoverSpec::Mode mode) {
    return mode == RecoverSpec::Mode::Program ? "the other ranks go on without it (--recover=program)"
                                              : "all ranks restart (--recover=restart)";
}

/// Whether a batch job whose time ran out is put back into its queue.
struct RequeueSpec {
    enum class Mode : std::uint8_t {
        No,
        Auto,  ///< where we can
        Self,  ///< by ddprun: the job does not start where ddprun cannot
    } mode = Mode::No;
    int limit = 10;  ///< how often the job is put back, in all
    std::string
        script;  ///< PBS: the job script as its user named it, relative to the directory of submission
};

/// Streams of a worker, as torchrun's Std bit mask.
enum class Streams : std::uint8_t { None = 0, Out = 1, Err = 2, All = 3 };
constexpr bool has(Streams set, Streams one) {
    return (static_cast<unsigned>(set) & static_cast<unsigned>(one)) != 0;
}
/// "-r 3" for all, or "0:1,11:2" by local rank.
struct StreamsMap {
    Streams everyone = Streams::None;
    std::map<int, Streams> by_local_rank;
    bool operator==(const StreamsMap&) const = default;
    [[nodiscard]] Streams of(int local_rank) const {
        const auto found = by_local_rank.find(local_rank);
        return found == by_local_rank.end() ? everyone : found->second;
    }
};

/// Where the workers' output goes.
struct OutputSpec {
    std::string log_dir;           ///< "" none; per-rank files are kept below it
    StreamsMap redirects;          ///< these streams go to files only
    StreamsMap tee;                ///< these go to files and to the console
    std::vector<int> local_ranks;  ///< console shows only these; empty all
    std::vector<std::string> stdout_filters,
        stderr_filters;  ///< matching lines are copied to a file
    std::optional<std::string>
        prefix;  ///< template of the prefix of each line; none: default_prefix (lines.h)
    enum class Color : std::uint8_t { Auto, Always, Never } color = Color::Auto;
    std::uint64_t max_file_bytes = 0;                    ///< rotation; 0 never
    Duration half_line_after = std::chrono::seconds(2);  ///< an unfinished line is shown, marked, after this
};

/// What each signal sent to ddprun does.
enum class SignalAction : std::uint8_t { Forward, Stop, Preempt, Ignore };

enum class NumaBinding : std::uint8_t { None, Auto, Node, Socket, Exclusive, CoreComplex };

/// The network between the nodes, which decides NCCL's and libfabric's settings (fabric.h).
enum class Fabric : std::uint8_t { None, Ethernet, Infiniband, Efa, Slingshot };

/// Whether workers get a PMIx server (pmix/wish.h).
enum class PmixUse : std::uint8_t { Auto, On, Off };

/// Whether the controller serves PyTorch's TCPStore clients (plan/head_choice.h).
enum class TorchStoreUse : std::uint8_t { Auto, On, Off };

/// What happens, before the start, when a GPU is not healthy (gpu_health.h).
enum class GpuCheck : std::uint8_t { Auto, Off, Warn, Refuse };

/// The place that an outer launcher gave to the process that a ddprun stands for.
struct OuterRank {
    int local_rank = 0;
    int local_size = 1;
    int node_rank = 0;
    int nodes = 1;
};

/// A whole checked command line. Nothing in it depends on this machine: detect_machine resolves it.
struct JobSpec {
    ProgramSpec program;
    WorkerCount workers;
    Nodes nodes;
    RendezvousSpec rendezvous;
    StartSpec start;
    RestartSpec restart;
    RecoverSpec recover;
    Grow grow = Grow::Now;
    RequeueSpec requeue;
    OutputSpec output;
    std::string role = "default";
    std::map<int, SignalAction> signals;  ///< by signal number; complete_signals() adds those not given
    std::string signals_to_handle =
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT";                   ///< as given; workers see it, as under torchrun
    Duration shutdown_timeout = std::chrono::seconds(30);  ///< grace between the stop signal and SIGKILL
    /// The same for the survivors of a failure; at most shutdown_timeout.
    Duration failure_grace = std::chrono::seconds(5);
    Duration walltime_notice = Duration::zero();  ///< preempt this long before the walltime ends; zero: never
    Duration preempt_grace = std::chrono::seconds(30);  ///< the grace after a preemption notice
    NumaBinding binding = NumaBinding::Auto;
    std::optional<Fabric> fabric;  ///< none: chosen by the node's hardware, where the job has several nodes
    bool virtual_local_rank = false;
    bool per_rank = false;  ///< --per-rank: this ddprun stands for one process of an outer launcher
    /// Set when this ddprun stands for one process: by --per-rank, or because the launcher put several
    /// ddpruns on this node. It runs one worker, at the place that the launcher gave.
    std::optional<OuterRank> outer_rank;
    bool pass_mpi_env = false;  ///< the worker gets the outer launcher's variables and PMI descriptor
    bool use_cgroup = true;     ///< workers get their own cgroup, where possible
    PmixUse pmix = PmixUse::Auto;
    TorchStoreUse torch_store = TorchStoreUse::Auto;
    bool narrow_gpus = false;  ///< each worker sees only its GPU in CUDA_VISIBLE_DEVICES
    GpuCheck gpu_check = GpuCheck::Auto;
    std::optional<int> stdin_rank;                      ///< none: no worker reads our stdin
    std::optional<std::pair<int, std::string>> attach;  ///< run this rank under a debugger command
    Duration gpu_memory_wait =
        std::chrono::seconds(30);  ///< the longest wait for GPU memory before a restart; zero: none
    Duration hang_timeout = Duration::zero();  ///< zero: hangs are not detected
    std::string report_file;
    std::string events_file;
    std::optional<Endpoint> metrics_at;  ///< --metrics-port; host "" is all interfaces
    std::string tensorboard;             ///< directory of the job's curves; "": none are written
    std::string trace;                   ///< directory of the job's trace, absolute; "": none is written
    bool dry_run = false;
    bool quiet = false;  ///< ddprun writes no lines of its own but errors
};

/// What the user asked for.
struct CommandLine {
    JobSpec spec;      ///< checked, without contradictions; unused when `text` is not ""
    std::string text;  ///< of --help, --version and the like: print it and exit with 0
    /// What the user should know although nothing is wrong ("--start-method: accepted, without effect: ...").
    std::vector<std::string> remarks;
    /// The options that were given, by long name, and their source: "command line", "PET_NNODES", "job.json".
    std::map<std::string, std::string> sources;
    /// The values as they were written; those of a repeatable option are joined with commas.
    std::map<std::string, std::string> values;
};

}  // namespace ddprun
