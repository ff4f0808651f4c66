#include "launcher/cli/option_table.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/core.h>

#include "env/nodes/pmix_source.h"
#include "env/text.h"
#include "launcher/cli/option_values.h"
#include "launcher/head/start/start_order.h"
#include "launcher/head/start/start_plan.h"
#include "launcher/node/fabric/fabric.h"

namespace ddprun {
namespace {

using Draft = OptionDraft;
using Text = std::string_view;

/// Moves a parsed value to its place, or passes the error on.
template <class T, class Place>
Status store(Result<T> parsed, Place& place) {
    if (!parsed) return parsed.error();
    place = *std::move(parsed);
    return {};
}

Status store_text(Text value, std::string& place) {
    if (value.empty()) return invalid("the value is empty");
    place = value;
    return {};
}

Status without_effect(Draft& draft, Text option, Text why) {
    draft.remarks.push_back(fmt::format("--{}: accepted, without effect: {}", option, why));
    return {};
}

Status set_backend(Draft& draft, Text value) {
    if (value.starts_with("etcd")) {
        return invalid(
            fmt::format("'{}' is not supported (expected static or c10d; ddprun's own server needs no etcd)",
                        excerpt(value)));
    }
    return store(parse_choice(value, "static c10d"), draft.spec.rendezvous.backend);
}

Status set_endpoint(Draft& draft, Text value) {
    if (value.empty()) return {};
    Result<Endpoint> endpoint = parse_endpoint(value, 29400);
    if (!endpoint) return endpoint.error();
    draft.spec.rendezvous.endpoint = *std::move(endpoint);
    return {};
}

/// Below it every delay of a busy machine would be a lost node.
Status set_heartbeat_timeout(Draft& draft, Text value) {
    const Result<Duration> span = parse_span(value);
    if (!span || *span < std::chrono::milliseconds(100))
        return invalid(fmt::format("'{}' is not a time of at least 100 ms", excerpt(value)));
    draft.spec.rendezvous.heartbeat_timeout = *span;
    return {};
}

/// Keys of torchrun's that have nothing to act on here.
constexpr std::array<std::pair<const char*, Text>, 3> kConfWithoutEffect = {{
    {"close_timeout", "closing takes no round trip; the job ends when its nodes have been told"},
    {"heartbeat_timeout", "a heartbeat is no store operation that could hang; see --heartbeat-timeout"},
    {"read_timeout", "nodes are told of changes and wait for no read; see join_timeout"},
}};

/// The values have been checked when they were read.
void apply_conf(const std::map<std::string, std::string>& conf, RendezvousSpec& rdzv) {
    const auto on = [&](const char* key, auto apply) {
        if (const auto found = conf.find(key); found != conf.end()) apply(found->second);
    };
    // torchrun's static backend calls the wait for nodes "timeout".
    on("timeout", [&](const std::string& span) { rdzv.join_timeout = *parse_span(span); });
    on("join_timeout", [&](const std::string& span) { rdzv.join_timeout = *parse_span(span); });
    on("last_call_timeout", [&](const std::string& span) { rdzv.last_call = *parse_span(span); });
    on("keep_alive_interval", [&](const std::string& span) { rdzv.keep_alive_interval = *parse_span(span); });
    on("keep_alive_max_attempt",
       [&](const std::string& count) { rdzv.keep_alive_attempts = static_cast<int>(*parse_int(count)); });
    on("is_host", [&](const std::string& word) { rdzv.is_host = *parse_bool(word); });
}

Status set_conf(Draft& draft, Text value) {
    const Result<RendezvousConf> conf = parse_rdzv_conf(value);
    if (!conf) return conf.error();
    apply_conf(conf->values, draft.spec.rendezvous);
    for (const std::string& unknown : conf->unknown)
        draft.remarks.push_back(fmt::format("--rdzv-conf: {}", unknown));
    for (const auto& [key, why] : kConfWithoutEffect) {
        if (conf->values.contains(key))
            draft.remarks.push_back(fmt::format("--rdzv-conf: {}: accepted, without effect: {}", key, why));
    }
    return {};
}

Status set_restarts(Draft& draft, Text value) {
    const Result<RestartSpec> restart = parse_restarts(value);
    if (!restart) return restart.error();
    draft.spec.restart.max_restarts = restart->max_restarts;
    draft.spec.restart.window = restart->window;
    return {};
}

Status set_grow(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "now restart");
    if (!word) return word.error();
    draft.spec.grow = *word == "now" ? Grow::Now : Grow::Restart;
    return {};
}

Status set_backoff(Draft& draft, Text value) {
    const std::size_t colon = value.find(':');
    RestartSpec& restart = draft.spec.restart;
    Status stored = store(parse_span(value.substr(0, colon)), restart.backoff);
    if (stored && colon != Text::npos)
        stored = store(parse_span(value.substr(colon + 1)), restart.backoff_max);
    if (!stored) return stored;
    if (colon == Text::npos) restart.backoff_max = std::max(restart.backoff_max, restart.backoff);
    if (restart.backoff > restart.backoff_max)
        return invalid(fmt::format("'{}': the first wait is above the longest", excerpt(value)));
    return {};
}

Status set_event_handler(Draft& draft, Text value) {
    if (value.empty()) return invalid("the value is empty");
    if (value == "null") return {};
    if (value == "console") {
        draft.spec.events_file = "/dev/stderr";
        return {};
    }
    return without_effect(draft, "event-log-handler",
                          "handlers are Python plug-ins; --events FILE writes the events");
}

Status set_logs_specs(Draft& draft, Text value) {
    if (value.empty()) return invalid("the value is empty");
    if (value == "default") return {};
    return without_effect(draft, "logs-specs", "it names a Python plug-in; see the options under Output");
}

Status set_monitor_interval(Draft& draft, Text value) {
    const Result<double> seconds = parse_double(value);
    if (!seconds || !(*seconds >= 0))
        return invalid(fmt::format("'{}' is not a number of seconds", excerpt(value)));
    return without_effect(draft, "monitor-interval", "ddprun is told of every event and polls nothing");
}

Status set_start_method(Draft& draft, Text value) {
    if (const Result<std::string> method = parse_choice(value, "spawn fork forkserver"); !method)
        return method.error();
    return without_effect(draft, "start-method", "it concerns Python functions; ddprun starts programs");
}

/// torchrun: every listed signal ends the job. Those of our defaults that are not listed still stop it:
/// torchrun would die of them and leave its workers behind.
Status set_stop_signals(Draft& draft, Text value) {
    const Result<std::vector<int>> signals = parse_signal_list(value);
    if (!signals) return signals.error();
    for (const int signal : *signals) draft.spec.signals[signal] = SignalAction::Stop;
    draft.spec.signals_to_handle = value;
    return {};
}

Status set_signal_actions(Draft& draft, Text value) {
    const Result<std::map<int, SignalAction>> actions = parse_signal_actions(value);
    if (!actions) return actions.error();
    for (const auto& [signal, action] : *actions) draft.spec.signals[signal] = action;
    return {};
}

Status set_numa_binding(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "none auto node socket exclusive core-complex");
    if (!word) return word.error();
    using enum NumaBinding;
    if (*word == "none") draft.spec.binding = None;
    if (*word == "auto") draft.spec.binding = Auto;
    if (*word == "node") draft.spec.binding = Node;
    if (*word == "socket") draft.spec.binding = Socket;
    if (*word == "exclusive") draft.spec.binding = Exclusive;
    if (*word == "core-complex") draft.spec.binding = CoreComplex;
    return {};
}

Status set_fabric(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto slingshot ib efa ethernet none");
    if (!word) return word.error();
    draft.spec.fabric.reset();
    for (const Fabric one :
         {Fabric::Slingshot, Fabric::Infiniband, Fabric::Efa, Fabric::Ethernet, Fabric::None}) {
        if (*word == name_of(one)) draft.spec.fabric = one;
    }
    return {};
}

Status set_gpu_check(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto off warn refuse");
    if (!word) return word.error();
    using enum GpuCheck;
    draft.spec.gpu_check = *word == "auto" ? Auto : *word == "off" ? Off : *word == "warn" ? Warn : Refuse;
    return {};
}

Status set_starter(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto none pbsdsh tm mpiexec srun blaunch ssh");
    if (!word) return word.error();
    using enum Starter;
    for (const Starter one : {Auto, None, Pbsdsh, Tm, Mpiexec, Srun, Blaunch, Ssh}) {
        if (name_of(one) == *word) draft.spec.start.starter = one;
    }
    return {};
}

Status add_variable(Draft& draft, Text value) {
    const Text name = value.substr(0, value.find('='));
    if (name.empty()) return invalid(fmt::format("'{}' is not NAME or NAME=VALUE", excerpt(value)));
    if (name == value && is_never_sent(name))
        return invalid(fmt::format("{} is never sent to another host", name));
    draft.spec.start.environment.emplace_back(value);
    return {};
}

Status set_color(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto always never");
    if (!word) return word.error();
    using Color = OutputSpec::Color;
    draft.spec.output.color = *word == "auto"     ? Color::Auto
                              : *word == "always" ? Color::Always
                                                  : Color::Never;
    return {};
}

Status set_prefix(Draft& draft, Text value) {
    draft.spec.output.prefix.reset();
    if (value == "auto") return {};
    if (value == "none") value = "";
    if (const Status checked = check_prefix(value); !checked) return checked;
    draft.spec.output.prefix = value;
    return {};
}

Status set_cgroup(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto none");
    if (!word) return word.error();
    draft.spec.use_cgroup = *word == "auto";
    return {};
}

Status set_pmix(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto on off");
    if (!word) return word.error();
    if (*word == "on" && !built_with_pmix())
        return Error{Errc::InvalidArgument, fmt::format("on: {}", kNoPmix), 0};
    draft.spec.pmix = *word == "auto" ? PmixUse::Auto : *word == "on" ? PmixUse::On : PmixUse::Off;
    return {};
}

Status set_torch_store(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto on off");
    if (!word) return word.error();
    draft.spec.torch_store = *word == "auto" ? TorchStoreUse::Auto
                             : *word == "on" ? TorchStoreUse::On
                                             : TorchStoreUse::Off;
    return {};
}

Status set_stdin(Draft& draft, Text value) {
    draft.spec.stdin_rank.reset();
    if (value == "none") return {};
    const Result<int> rank = parse_rank(value);
    if (!rank) return invalid(rank.error().what + ", nor none");
    draft.spec.stdin_rank = *rank;
    return {};
}

// --help, --version and --config act while the command line is read, not here.
Status nothing(Draft&, Text) { return {}; }

OptionGroup worker_options() {
    return {
        "Workers",
        {{"nproc-per-node", 0, "N", "auto gpu cpu",
          "Workers per node: a count, auto (one per GPU, else one per CPU), gpu, or cpu. Default 1.",
          [](Draft& d, Text v) { return store(parse_worker_count(v), d.spec.workers); }},
         {"nnodes", 0, "N|MIN:MAX", "",
          "Number of nodes, or a range for an elastic job. Default: from the "
          "launcher around us (mpirun, srun: one ddprun per node), else all hosts of the batch job, else 1.",
          [](Draft& d, Text v) { return store(parse_nodes(v), d.spec.nodes); }},
         {"per-rank", 0, "", "",
          "This ddprun is one of several that mpiexec or srun started, one for each rank: it runs one "
          "worker, with the launcher's rank and local rank, and restarts it with the others. Default where the launcher put "
          "several ddpruns on a node and --nproc-per-node is not given.",
          [](Draft& d, Text) {
              d.spec.per_rank = true;
              return Status{};
          }},
         {"pass-mpi-env", 0, "", "",
          "The workers get the variables by which mpiexec or srun told ddprun its rank, and its PMI "
          "descriptor, for programs that speak MPI themselves. Without it they see ddprun's alone.",
          [](Draft& d, Text) {
              d.spec.pass_mpi_env = true;
              return Status{};
          }},
         {"module", 'm', "", "", "The program is a Python module: run python -m PROGRAM.",
          [](Draft& d, Text) {
              d.module = true;
              return Status{};
          }},
         {"no-python", 0, "", "", "Execute the program directly, also when its name ends in .py.",
          [](Draft& d, Text) {
              d.no_python = true;
              return Status{};
          }},
         {"run-path", 0, "", "", "Run the Python script with runpy.run_path. Wins over --no-python and -m.",
          [](Draft& d, Text) {
              d.run_path = true;
              return Status{};
          }},
         {"role", 0, "NAME", "", "Name of the workers' role (ROLE_NAME). Default: default.",
          [](Draft& d, Text v) { return store_text(v, d.spec.role); }},
         {"numa-binding", 0, "POLICY", "none auto node socket exclusive core-complex",
          "Bind each worker's CPUs and memory: node (the NUMA node of its GPU), socket, exclusive (own cores of "
          "that node), core-complex (cores that share a last-level cache), none, or auto: by node where there "
          "are several and the workers divide evenly, unless a batch system gave an unknown part of the host. Default auto.",
          set_numa_binding},
         {"virtual-local-rank", 0, "", "",
          "LOCAL_RANK is 0 for all; each worker sees only its GPU in CUDA_VISIBLE_DEVICES.",
          [](Draft& d, Text) {
              d.spec.virtual_local_rank = true;
              return Status{};
          }},
         {"narrow-gpus", 0, "", "",
          "Each worker sees only its GPU in CUDA_VISIBLE_DEVICES; LOCAL_RANK stays.",
          [](Draft& d, Text) {
              d.spec.narrow_gpus = true;
              return Status{};
          }},
         {"fabric", 0, "NAME", "auto slingshot ib efa ethernet none",
          "Variables for NCCL and libfabric that suit what connects the nodes; what you set yourself stands. auto: by what "
          "the node has (Slingshot, EFA, InfiniBand, else Ethernet), in jobs of several nodes. none: leave all alone. "
          "--dry-run and ddprun env show them with their reasons. Default auto.",
          set_fabric},
         {"cgroup", 0, "auto|none", "auto none",
          "auto: the workers run in a cgroup below ours, where cgroup v2 lets us make one, so that none of their "
          "processes can escape the end of the job. Default auto.",
          set_cgroup},
         {"pmix", 0, "WHEN", "auto on off",
          "Be the PMIx server of the workers, so that programs of Open MPI form one world: on, off, or auto: where the "
          "program itself is linked with such an MPI and libpmix is installed. MPI behind a script or in Python needs on. "
          "Default auto.",
          set_pmix},
         {"torch-store", 0, "WHEN", "auto on off",
          "Serve the store of PyTorch's workers at MASTER_ADDR:MASTER_PORT, without authentication, to this job's nodes: on, off "
          "(rank 0 may listen there itself), or auto: where Python runs the program, unless several nodes have --tls. Default auto.",
          set_torch_store},
         {"gpu-check", 0, "WHEN", "auto off warn refuse",
          "Look at the GPUs' health before anything starts: off, warn (one line for each trouble), refuse (also a GPU that is "
          "in use), or auto: where the job asks for GPUs, refuse what no program can use, warn of the rest. Default auto.",
          set_gpu_check},
         {"stdin", 0, "RANK|none", "none", "The rank that reads ddprun's standard input. Default none.",
          set_stdin},
         {"attach", 0, "RANK=CMD", "",
          "Run this rank under CMD in the terminal, as in --attach 0='gdb --args'.",
          [](Draft& d, Text v) { return store(parse_attach(v), d.spec.attach); }}}};
}

OptionGroup rendezvous_options() {
    return {
        "Rendezvous",
        {{"standalone", 0, "", "", "One node, any free port, a job id of its own. Overrides --rdzv-*.",
          [](Draft& d, Text) {
              d.standalone = true;
              return Status{};
          }},
         {"rdzv-backend", 0, "NAME", "static c10d",
          "static or c10d. ddprun's own server stands behind both. Default static.", set_backend},
         {"rdzv-endpoint", 0, "HOST[:PORT]", "",
          "Where the first node's ddprun listens. Default port 29400. Default: what the launcher around us carries "
          "(PMIx, PMI), else its first host; on one node any free port.",
          set_endpoint},
         {"rdzv-id", 0, "ID", "",
          "Name of the job; all its nodes pass the same. Default: none, on one node a fresh one.",
          [](Draft& d, Text v) { return store_text(v, d.spec.rendezvous.run_id); }},
         {"rdzv-conf", 0, "K=V,...", "",
          "join_timeout (also called timeout; default 600), last_call_timeout (30), keep_alive_interval (5), in "
          "seconds; keep_alive_max_attempt (3): a node that is silent for that many intervals is lost (with "
          "neither: after --heartbeat-timeout); is_host. "
          "Accepted without effect: close_timeout, heartbeat_timeout, read_timeout, store_type=tcp, and keys of other "
          "back ends.",
          set_conf},
         {"heartbeat-timeout", 0, "SPAN", "",
          "A node that is silent for this long is lost, and who loses the first node ends its workers; a fault of the network "
          "that is shorter costs nothing. A lost node that wakes joins again by itself. All nodes give the same. Default 3s.",
          set_heartbeat_timeout},
         {"node-rank", 0, "N", "", "Index of this node, 0 to nnodes-1. Default: from the launcher around us.",
          [](Draft& d, Text v) { return store(parse_rank(v), d.spec.rendezvous.node_rank); }},
         {"master-addr", 0, "HOST", "", "MASTER_ADDR of the workers. Default: the address that was reached.",
          [](Draft& d, Text v) {
              d.spec.rendezvous.master_addr.emplace();
              return store_text(v, *d.spec.rendezvous.master_addr);
          }},
         {"master-port", 0, "PORT", "", "MASTER_PORT of the workers. Default: a free port.",
          [](Draft& d, Text v) { return store(parse_port(v), d.spec.rendezvous.master_port); }},
         {"local-addr", 0, "HOST", "",
          "The address under which the other nodes reach this one: MASTER_ADDR where this is the first node, unless "
          "--master-addr is given.",
          [](Draft& d, Text v) {
              d.spec.rendezvous.local_addr.emplace();
              return store_text(v, *d.spec.rendezvous.local_addr);
          }},
         {"iface", 0, "NAME", "",
          "The network of several nodes: an interface of this node by its name, or a network as 10.1.0.0/16. Its address is the one "
          "under which the other nodes reach this one (as --local-addr says it), and what ddprun listens on for them is there only; gloo and NCCL are told it. "
          "Default: all interfaces.",
          [](Draft& d, Text v) { return store_text(v, d.spec.rendezvous.iface); }},
         {"insecure", 0, "", "",
          "Several nodes without a secret: whoever reaches the port can join the job and stop it. Without it they share "
          "DDPRUN_TOKEN, else a file that is made at first use ($XDG_CONFIG_HOME/ddprun/secret, else "
          "~/.config/ddprun/secret). All nodes must give the same. DDPRUN_INSECURE=1 is the same.",
          [](Draft& d, Text) {
              d.spec.rendezvous.insecure = true;
              return Status{};
          }},
         {"tls", 0, "", "",
          "Encrypt what nodes and workers say to the first node's ddprun, and the keys of its store (TLS 1.3, by a certificate made for "
          "this job that the job's secret vouches for). All nodes must give it. What workers say to each other (NCCL, PyTorch's own "
          "store) is not ddprun's to encrypt.",
          [](Draft& d, Text) {
              d.spec.rendezvous.tls = true;
              return Status{};
          }}}};
}

OptionGroup start_options() {
    return {
        "Hosts",
        {{"hosts", 0, "HOST,...", "",
          "Run on these hosts: names, ranges as in n[01-16], HOST:SLOTS. ddprun starts itself on the others; on a host "
          "that is none of them it is the head only. Default: those of the PBS, Slurm or LSF job around us, unless --node-rank or --rdzv-endpoint is given.",
          [](Draft& d, Text v) { return store_text(v, d.spec.start.hosts); }},
         {"hostfile", 0, "FILE", "@file",
          "The same from a file, as MPI launchers read it: a host a line, slots=N or :N behind it, # comments.",
          [](Draft& d, Text v) { return store_text(v, d.spec.start.hostfile); }},
         {"start", 0, "HOW", "auto none pbsdsh tm mpiexec srun blaunch ssh",
          "What starts ddprun on the other hosts; none: somebody else does, with --nnodes, --node-rank and --rdzv-endpoint. auto: "
          "in a PBS job pbsdsh, else pbs_tmrsh (tm), else mpiexec (PALS's or Hydra's: Cray, MPICH, Intel MPI; not Open MPI's), else ssh; "
          "in a Slurm job srun; in an LSF job blaunch, else ssh; else ssh. Default auto.",
          set_starter},
         {"env", 0, "NAME[=VALUE]", "",
          "NAME=VALUE: a variable for all workers. NAME: send this host's value to the other hosts that ddprun starts, "
          "also where it belongs to a host (TMPDIR). Others are sent without it: docs/hosts.md has the list. May be repeated.",
          add_variable, "", true},
         {"start-timeout", 0, "SPAN", "",
          "A host that has not joined this long after the last ssh (or other starter) began cannot take part, "
          "and the job ends. Default 60s.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.start.timeout); }}}};
}

Status set_requeue(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "no auto self");
    if (!word) return word.error();
    using Mode = RequeueSpec::Mode;
    draft.spec.requeue.mode = *word == "no" ? Mode::No : *word == "auto" ? Mode::Auto : Mode::Self;
    return {};
}

Status set_requeue_limit(Draft& draft, Text value) {
    const Result<std::int64_t> limit = parse_int_between(value, 0, 1'000'000);
    if (!limit) return limit.error();
    draft.spec.requeue.limit = static_cast<int>(*limit);
    return {};
}

OptionGroup supervision_options() {
    return {
        "Failures, restarts and signals",
        {{"max-restarts", 0, "N[/SPAN]", "",
          "Restarts before giving up, as in 3, or 3/1h: 3 within any hour. Default 0.", set_restarts},
         {"restart-backoff", 0, "SPAN[:MAX]", "",
          "Wait before the second restart in a row, doubled each time up to MAX. Default 0:60s.",
          set_backoff},
         {"gpu-memory-wait", 0, "SPAN", "",
          "Wait at most so long before a restart until the GPU memory of the workers that have ended is free. 0: do not "
          "look. Default 30s.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.gpu_memory_wait); }},
         {"shutdown-timeout", 0, "SECONDS", "",
          "Grace between the stop signal and SIGKILL. Default TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.shutdown_timeout); }},
         {"grow", 0, "WHEN", "now restart",
          "When nodes that come to a running --nnodes=MIN:MAX job are taken in: now (its workers get a notice, SIGTERM and "
          "--preempt-grace, and start again in the larger world, which uses up no restart), or restart (when it is started again for "
          "another reason). Default now.",
          set_grow},
         {"failure-grace", 0, "SPAN", "",
          "How long workers may go on after a failure: the others when one has failed, and one that has written its error report, or "
          "called MPI_Abort, and does not exit; then SIGKILL. At most --shutdown-timeout. Default 5s.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.failure_grace); }},
         {"preempt-grace", 0, "SPAN", "", "Grace after a preemption notice, for a checkpoint. Default 30s.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.preempt_grace); }},
         {"walltime-notice", 0, "SPAN", "",
          "Preempt the job so long before its walltime ends, where the scheduler (PBS, Torque, Slurm, LSF) tells it: notice, SIGTERM, "
          "--preempt-grace, exit code 75. Default 0: never. No restart begins less than 60 s before that, or before the end.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.walltime_notice); }},
         {"requeue", 0, "WHEN", "no auto self",
          "Put a batch job back into its queue when its walltime ends it, or a failure that another run may not meet: self (by scontrol "
          "requeue under Slurm, by qsub of --requeue-script under PBS; the job does not start where that cannot be), auto (where "
          "it can be), no. Not without progress, not after a signal from its user or scheduler, nor a wrong configuration. Brings a "
          "--walltime-notice of 2m. Default no.",
          set_requeue},
         {"requeue-limit", 0, "N", "", "At most so many times in all. Default 10.", set_requeue_limit},
         {"requeue-script", 0, "FILE", "@file", "PBS: the job script, as it was given to qsub.",
          [](Draft& d, Text v) { return store_text(v, d.spec.requeue.script); }},
         {"signals-to-handle", 0, "NAME,...", "",
          "Signals that stop the job, besides TERM, INT, HUP and QUIT.", set_stop_signals},
         {"signal", 0, "NAME=ACTION", "",
          "What a signal sent to ddprun does: forward (to the workers, and carry on), stop, preempt (notice, "
          "grace, exit code 75) or ignore. May be repeated.",
          set_signal_actions, "", true},
         {"hang-timeout", 0, "SPAN", "",
          "Workers that make no progress for this long hang: says who keeps whom waiting, prints all stacks, then "
          "restarts or ends with exit code 124. No progress is a collective of libddp that stands still, or steps that a worker "
          "reported (in Python: examples/report_progress.py) and reports no more, whatever the processor does; of workers that "
          "tell neither, that no rank uses any processor time, reads or writes: one that spins is not found. Default 0: never.",
          [](Draft& d, Text v) { return store(parse_span(v), d.spec.hang_timeout); }}}};
}

OptionGroup output_options() {
    return {
        "Output",
        {{"log-dir", 0, "DIR", "@directory",
          "Keep files DIR/<id>_<random>/attempt_<k>/<rank>/{stdout,stderr}.log. Without -r and -t all "
          "streams go to the files and to the console. The umask says who may read them: with 022 every user of the "
          "file system, with 077 (set before ddprun) only you.",
          [](Draft& d, Text v) { return store_text(v, d.spec.output.log_dir); }},
         {"redirects", 'r', "STREAMS", "0 1 2 3",
          "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or a map by local rank: 0:1,11:2.",
          [](Draft& d, Text v) { return store(parse_streams(v), d.spec.output.redirects); }},
         {"tee", 't', "STREAMS", "0 1 2 3", "Streams that go to files and to the console; written as for -r.",
          [](Draft& d, Text v) { return store(parse_streams(v), d.spec.output.tee); }},
         {"local-ranks-filter", 0, "RANK,...", "", "The console shows only these local ranks. Default all.",
          [](Draft& d, Text v) { return store(parse_rank_list(v), d.spec.output.local_ranks); }},
         {"duplicate-stdout-filters", 0, "TEXT,...", "",
          "Copy stdout lines with one of the texts to filtered_stdout.log; a double comma is a comma.",
          [](Draft& d, Text v) {
              d.spec.output.stdout_filters = parse_filters(v);
              return Status{};
          }},
         {"duplicate-stderr-filters", 0, "TEXT,...", "", "The same for stderr and filtered_stderr.log.",
          [](Draft& d, Text v) {
              d.spec.output.stderr_filters = parse_filters(v);
              return Status{};
          }},
         {"max-log-size", 0, "SIZE", "", "Rotate each log file at this size, as in 100MiB. Default 0: never.",
          [](Draft& d, Text v) { return store(parse_bytes(v), d.spec.output.max_file_bytes); }},
         // Before --prefix, which wins over it.
         {"log-line-prefix-template", 0, "TEMPLATE", "", "torchrun's name of --prefix.", set_prefix},
         {"prefix", 0, "TEMPLATE", "auto none",
          "Before each line, on the console: none, or a text with ${rank} ${local_rank} ${role_name} ${host} (or ${hostname}) "
          "${time}, or auto: torchrun's '[${role_name}${local_rank}]:' with --tee; nothing where the job has one worker, or where "
          "one rank's lines alone go into a pipe or a file; else '[${rank}]: '. Default "
          "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else auto.",
          set_prefix, "log-prefix"},
         {"color", 0, "WHEN", "auto always never", "Colour the prefixes. Default auto: on a terminal.",
          set_color},
         {"quiet", 'q', "", "", "No lines of ddprun's own but errors.", [](Draft& d, Text) {
              d.spec.quiet = true;
              return Status{};
          }}}};
}

OptionGroup observation_options() {
    return {
        "Reports and observation",
        {{"dry-run", 0, "", "", "Print the complete plan (ranks, commands, environment, binding) and exit.",
          [](Draft& d, Text) {
              d.spec.dry_run = true;
              return Status{};
          }},
         {"report", 0, "FILE", "@file", "Write how the job ended as JSON.",
          [](Draft& d, Text v) { return store_text(v, d.spec.report_file); }},
         // Before --events, which wins over it.
         {"event-log-handler", 0, "NAME", "null console",
          "console writes the job's events to standard error.", set_event_handler},
         {"events", 0, "FILE", "@file", "Write every event of the job, one JSON object per line.",
          [](Draft& d, Text v) { return store_text(v, d.spec.events_file); }},
         {"metrics-port", 0, "PORT", "",
          "Serve Prometheus metrics on this port of the loopback interface, where every user of this host can read them.",
          [](Draft& d, Text v) { return store(parse_port(v), d.spec.metrics_port); }}}};
}

OptionGroup other_options() {
    return {
        "Other",
        {{"config", 0, "FILE", "@file",
          "JSON object with any of these options by long name, \"program\" and \"args\". The command line wins "
          "over PET_<NAME> variables, these over the file.",
          nothing},
         {"print-completion", 0, "SHELL", "bash zsh fish tcsh", "Print a completion script and exit.",
          [](Draft& d, Text v) { return store(parse_choice(v, "bash zsh fish tcsh"), d.shell); }},
         {"print-man", 0, "", "", "Print the manual page (troff) and exit.",
          [](Draft& d, Text) {
              d.print_man = true;
              return Status{};
          }},
         {"version", 'V', "", "", "Print the version and exit.", nothing},
         {"help", 'h', "", "", "Print this text and exit.", nothing},
         {"monitor-interval", 0, "SECONDS", "", "Accepted: ddprun is event-driven.", set_monitor_interval},
         {"start-method", 0, "NAME", "spawn fork forkserver", "Accepted: concerns Python functions only.",
          set_start_method},
         {"logs-specs", 0, "NAME", "", "Accepted: names a Python plug-in.", set_logs_specs},
         {"use-env", 0, "", "", "Accepted: LOCAL_RANK is always in the environment.", [](Draft& d, Text) {
              return without_effect(d, "use-env", "LOCAL_RANK is always in the environment");
          }}}};
}

std::string with_dashes(std::string_view name) {
    std::string dashed(name);
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    return dashed;
}

}  // namespace

const std::vector<OptionGroup>& option_groups() {
    static const std::vector<OptionGroup> groups = {
        worker_options(), start_options(),       rendezvous_options(), supervision_options(),
        output_options(), observation_options(), other_options()};
    return groups;
}

const OptionRow* find_option(std::string_view name) {
    const std::string dashed = with_dashes(name);
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            if (row.name == dashed || (!row.alias.empty() && row.alias == dashed)) return &row;
        }
    }
    return nullptr;
}

const OptionRow* find_option(char letter) {
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            if (row.letter == letter && letter != 0) return &row;
        }
    }
    return nullptr;
}

std::vector<const OptionRow*> options_beginning_with(std::string_view name) {
    const std::string dashed = with_dashes(name);
    std::vector<const OptionRow*> found;
    if (dashed.empty()) return found;
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            if (row.name.starts_with(dashed) || row.alias.starts_with(dashed)) found.push_back(&row);
        }
    }
    return found;
}

std::string nearest_option(std::string_view name) {
    const std::string dashed = with_dashes(name);
    std::vector<std::string> names, longer;
    for (const OptionGroup& group : option_groups()) {
        for (const OptionRow& row : group.rows) {
            names.emplace_back(row.name);
            if (row.name.starts_with(dashed)) longer.emplace_back(row.name);
        }
    }
    if (const std::string near = nearest(dashed, names); !near.empty()) return near;
    // "nproc" in a configuration file is no typing error but a beginning.
    return longer.size() == 1 ? longer.front() : "";
}

std::string environment_name(std::string_view option) {
    std::string name = "PET_";
    for (const char c : option) {
        name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    return name;
}

}  // namespace ddprun
