#include "launcher/cli/option_table.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/core.h>

#include "env/nodes/pmix_source.h"
#include "env/text.h"
#include "launcher/cli/option_values.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/start/start_order.h"
#include "launcher/start/start_plan.h"
#include "launcher/tools/batch/job_request.h"

namespace ddprun {
namespace {

using Draft = OptionDraft;
using Text = std::string_view;

TakeValue by(Draft& draft, Status (*take)(Draft&, Text)) {
    return [&draft, take](const std::string& value) { return take(draft, value); };
}

Status without_effect(Draft& draft, Text option, Text why) {
    draft.remarks.push_back(fmt::format("--{}: accepted, without effect: {}", option, why));
    return {};
}

Result<std::string> parse_backend(Text value) {
    if (value.starts_with("etcd")) {
        return invalid(
            fmt::format("'{}' is not supported (expected static or c10d; ddprun's own server needs no etcd)",
                        excerpt(value)));
    }
    return parse_choice(value, "static c10d");
}

Status set_endpoint(Draft& draft, Text value) {
    if (value.empty()) return {};
    Result<Endpoint> endpoint = parse_endpoint(value, 29400);
    if (!endpoint) return endpoint.error();
    draft.spec.rendezvous.endpoint = *std::move(endpoint);
    return {};
}

/// MASTER_ADDR has no port; an IPv6 address has several colons.
Result<std::string> parse_master_addr(Text value) {
    const std::size_t colon = value.find(':');
    const bool has_port = colon != value.npos && value.find(':', colon + 1) == value.npos;
    if (has_port || value.starts_with('['))
        return invalid(
            fmt::format("'{}' is not an address alone; its port goes into --master-port", excerpt(value)));
    return parse_text(value);
}

/// Refuses a timeout so short that a delay on a busy machine would lose a node.
Result<Duration> parse_heartbeat_timeout(Text value) {
    const Result<Duration> span = parse_span(value);
    if (!span) return span.error();
    if (*span < std::chrono::milliseconds(100))
        return invalid(fmt::format("'{}' is not a time of at least 100 ms", excerpt(value)));
    return *span;
}

/// torchrun's keys that have no effect here.
constexpr std::array<std::pair<const char*, Text>, 3> kConfWithoutEffect = {{
    {"close_timeout", "closing takes no round trip; the job ends when its nodes have been told"},
    {"heartbeat_timeout", "a heartbeat is no store operation that could hang; see --heartbeat-timeout"},
    {"read_timeout", "nodes are told of changes and wait for no read; see join_timeout"},
}};

/// Applies values that were checked when they were read.
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

Status set_backoff(Draft& draft, Text value) {
    RestartSpec& restart = draft.spec.restart;
    const std::size_t colon = value.find(':');
    const Result<Duration> first = parse_span(value.substr(0, colon));
    if (!first) return first.error();
    const Result<Duration> longest =
        colon == Text::npos ? std::max(restart.backoff_max, *first) : parse_span(value.substr(colon + 1));
    if (!longest) return longest.error();
    if (*first > *longest)
        return invalid(fmt::format("'{}': the first wait is above the longest", excerpt(value)));
    restart.backoff = *first;
    restart.backoff_max = *longest;
    return {};
}

template <int Least, int Most>
Result<int> parse_number(Text value) {
    const Result<std::int64_t> number = parse_int_between(value, Least, Most);
    return number ? Result<int>(static_cast<int>(*number)) : number.error();
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

/// In torchrun every listed signal ends the job. Our default signals that are not listed still stop it:
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

Status add_variable(Draft& draft, Text value) {
    const Text name = value.substr(0, value.find('='));
    if (!is_variable_name(name))
        return invalid(fmt::format("'{}' is not NAME or NAME=VALUE of a variable", excerpt(value)));
    if (name == value && is_never_sent(name))
        return invalid(fmt::format("{} is never sent to another host", name));
    draft.spec.start.environment.emplace_back(value);
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

Status set_pmix(Draft& draft, Text value) {
    const Result<std::string> word = parse_choice(value, "auto on off");
    if (!word) return word.error();
    if (*word == "on" && !built_with_pmix())
        return Error{Errc::InvalidArgument, fmt::format("on: {}", kNoPmix), 0};
    draft.spec.pmix = *word == "auto" ? PmixUse::Auto : *word == "on" ? PmixUse::On : PmixUse::Off;
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

void worker_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Workers");
    options
        .value("--nproc-per-node", "N", into(spec.workers, parse_worker_count),
               "Workers per node: a count, auto (one per GPU, else one per CPU), gpu, or cpu. Default 1.")
        ->option_text("auto gpu cpu");
    options.value(
        "--nnodes", "N|MIN:MAX", into(spec.nodes, parse_nodes),
        "Number of nodes, or a range for an elastic job. Default: from the "
        "launcher around us (mpirun, srun: one ddprun per node), else all hosts of the batch job, else 1.");
    options.flag(
        "--per-rank", spec.per_rank,
        "This ddprun is one of several that mpiexec or srun started, one for each rank: it runs one "
        "worker, with the launcher's rank and local rank, and restarts it with the others. Default where the launcher put "
        "several ddpruns on a node and --nproc-per-node is not given.");
    options.flag("--pass-mpi-env", spec.pass_mpi_env,
                 "The workers get the variables by which mpiexec or srun told ddprun its rank, and its PMI "
                 "descriptor, for programs that speak MPI themselves. Without it they see ddprun's alone.");
    options.flag("-m,--module", draft.module, "The program is a Python module: run python -m PROGRAM.");
    options.flag("--no-python", draft.no_python,
                 "Execute the program directly, also when its name ends in .py.");
    options.flag("--run-path", draft.run_path,
                 "Run the Python script with runpy.run_path. Wins over --no-python and -m.");
    options.value("--role", "NAME", into(spec.role, parse_text),
                  "Name of the workers' role (ROLE_NAME). Default: default.");
    options.choice(
        "--numa-binding", "POLICY", spec.binding,
        {{"none", NumaBinding::None},
         {"auto", NumaBinding::Auto},
         {"node", NumaBinding::Node},
         {"socket", NumaBinding::Socket},
         {"exclusive", NumaBinding::Exclusive},
         {"core-complex", NumaBinding::CoreComplex}},
        "Bind each worker's CPUs and memory: node (the NUMA node of its GPU), socket, exclusive (own cores of "
        "that node), core-complex (cores that share a last-level cache), none, or auto: by node where there "
        "are several and the workers divide evenly, unless a batch system gave an unknown part of the host. Default auto.");
    options.flag(
        "--virtual-local-rank", spec.virtual_local_rank,
        "LOCAL_RANK is 0 for all; each worker sees only its GPU in CUDA_VISIBLE_DEVICES, or in HIP_ or "
        "ROCR_VISIBLE_DEVICES where that is set and no NVIDIA GPU is found.");
    options.flag("--narrow-gpus", spec.narrow_gpus, "As --virtual-local-rank, but LOCAL_RANK stays.");
    options.choice(
        "--fabric", "NAME", spec.fabric,
        {{"auto", std::nullopt},
         {"slingshot", Fabric::Slingshot},
         {"ib", Fabric::Infiniband},
         {"efa", Fabric::Efa},
         {"ethernet", Fabric::Ethernet},
         {"none", Fabric::None}},
        "Variables for NCCL and libfabric that suit what connects the nodes; what you set yourself stands. auto: by what "
        "the node has (Slingshot, EFA, InfiniBand, else Ethernet), in jobs of several nodes. none: leave all alone. "
        "--dry-run and ddprun env show them with their reasons. Default auto.");
    options.choice(
        "--cgroup", "auto|none", spec.use_cgroup, {{"auto", true}, {"none", false}},
        "auto: the workers run in a cgroup below ours, where cgroup v2 lets us make one, so that none of their "
        "processes can escape the end of the job. Default auto.");
    options
        .value(
            "--pmix", "WHEN", by(draft, set_pmix),
            "Be the PMIx server of the workers, so that programs of Open MPI form one world: on, off, or auto: where the "
            "program itself is linked with such an MPI and libpmix is installed. MPI behind a script or in Python needs on. "
            "Default auto.")
        ->option_text("auto on off");
    options.choice(
        "--torch-store", "WHEN", spec.torch_store,
        {{"auto", TorchStoreUse::Auto}, {"on", TorchStoreUse::On}, {"off", TorchStoreUse::Off}},
        "Serve the store of PyTorch's workers at MASTER_ADDR:MASTER_PORT, without authentication, to this job's nodes: on, off "
        "(rank 0 may listen there itself), or auto: where Python runs the program, unless several nodes have --tls. Default auto.");
    options.choice(
        "--gpu-check", "WHEN", spec.gpu_check,
        {{"auto", GpuCheck::Auto},
         {"off", GpuCheck::Off},
         {"warn", GpuCheck::Warn},
         {"refuse", GpuCheck::Refuse}},
        "Look at the GPUs' health before anything starts: off, warn (one line for each trouble), refuse (also a GPU that is "
        "in use), or auto: where the job asks for GPUs, refuse what no program can use, warn of the rest. Default auto.");
    options
        .value("--stdin", "RANK|none", by(draft, set_stdin),
               "The rank that reads ddprun's standard input. Default none.")
        ->option_text("none");
    options.value("--attach", "RANK=CMD", into(spec.attach, parse_attach),
                  "Run this rank under CMD in the terminal, as in --attach 0='gdb --args'.");
}

void rendezvous_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Rendezvous");
    options.flag("--standalone", draft.standalone,
                 "One node, any free port, a job id of its own. Overrides --rdzv-*.");
    options
        .value("--rdzv-backend", "NAME", into(spec.rendezvous.backend, parse_backend),
               "static or c10d. ddprun's own server stands behind both. Default static.")
        ->option_text("static c10d");
    options.value(
        "--rdzv-endpoint", "HOST[:PORT]", by(draft, set_endpoint),
        "Where the first node's ddprun listens. Default port 29400. Default: what the launcher around us carries "
        "(PMIx, PMI), else its first host; on one node any free port.");
    options.value("--rdzv-id", "ID", into(spec.rendezvous.run_id, parse_text),
                  "Name of the job; all its nodes pass the same. Default: none, on one node a fresh one.");
    options.value(
        "--rdzv-conf", "K=V,...", by(draft, set_conf),
        "join_timeout (also called timeout; default 600), last_call_timeout (30), keep_alive_interval (5), in "
        "seconds; keep_alive_max_attempt (3): a node that is silent for that many intervals is lost (with "
        "neither: after --heartbeat-timeout); is_host. "
        "Accepted without effect: close_timeout, heartbeat_timeout, read_timeout, store_type=tcp, and keys of other "
        "back ends.");
    options.value(
        "--heartbeat-timeout", "SPAN", into(spec.rendezvous.heartbeat_timeout, parse_heartbeat_timeout),
        "A node that is silent for this long is lost, and who loses the first node ends its workers; a fault of the network "
        "that is shorter costs nothing. A lost node that wakes joins again by itself. All nodes give the same. Default 3s.");
    options.value("--node-rank", "N", into(spec.rendezvous.node_rank, parse_rank),
                  "Index of this node, 0 to nnodes-1. Default: from the launcher around us.");
    options.value("--master-addr", "HOST", into(spec.rendezvous.master_addr, parse_master_addr),
                  "MASTER_ADDR of the workers. Default: the address that was reached.");
    options.value("--master-port", "PORT", into(spec.rendezvous.master_port, parse_port),
                  "MASTER_PORT of the workers. Default: a free port.");
    options.value(
        "--local-addr", "HOST", into(spec.rendezvous.local_addr, parse_text),
        "The address under which the other nodes reach this one: MASTER_ADDR where this is the first node, unless "
        "--master-addr is given.");
    options.value(
        "--iface", "NAME", into(spec.rendezvous.iface, parse_text),
        "The network of several nodes: an interface of this node by its name, or a network as 10.1.0.0/16. Its address is the one "
        "under which the other nodes reach this one (as --local-addr says it), and what ddprun listens on for them is there only; gloo and NCCL are told it. "
        "Default: all interfaces.");
    options.flag(
        "--insecure", spec.rendezvous.insecure,
        "Several nodes without a secret: whoever reaches the port can join the job and stop it. Without it they share "
        "DDPRUN_TOKEN, else a file that is made at first use ($XDG_CONFIG_HOME/ddprun/secret, else "
        "~/.config/ddprun/secret). All nodes must give the same. DDPRUN_INSECURE=1 is the same.");
    options.flag(
        "--tls", spec.rendezvous.tls,
        "Encrypt what nodes and workers say to the first node's ddprun, and the keys of its store (TLS 1.3, by a certificate made for "
        "this job that the job's secret vouches for). All nodes must give it. What workers say to each other (NCCL, PyTorch's own "
        "store) is not ddprun's to encrypt.");
}

void start_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Hosts");
    options.value(
        "--hosts", "HOST,...", into(spec.start.hosts, parse_text),
        "Run on these hosts: names, ranges as in n[01-16], HOST:SLOTS. ddprun starts itself on the others; on a host "
        "that is none of them it is the head only. Default: those of the PBS, Slurm or LSF job around us, unless --node-rank or --rdzv-endpoint is given.");
    options
        .value(
            "--hostfile", "FILE", into(spec.start.hostfile, parse_text),
            "The same from a file, as MPI launchers read it: a host a line, slots=N or :N behind it, # comments.")
        ->option_text("@file");
    options.choice(
        "--start", "HOW", spec.start.starter,
        {{"auto", Starter::Auto},
         {"none", Starter::None},
         {"pbsdsh", Starter::Pbsdsh},
         {"tm", Starter::Tm},
         {"mpiexec", Starter::Mpiexec},
         {"srun", Starter::Srun},
         {"blaunch", Starter::Blaunch},
         {"ssh", Starter::Ssh}},
        "What starts ddprun on the other hosts; none: somebody else does, with --nnodes, --node-rank and --rdzv-endpoint. auto: "
        "in a PBS job pbsdsh, else pbs_tmrsh (tm), else mpiexec (PALS's or Hydra's: Cray, MPICH, Intel MPI; not Open MPI's), else ssh; "
        "in a Slurm job srun; in an LSF job blaunch, else ssh; else ssh. Default auto.");
    options
        .value(
            "--env", "NAME[=VALUE]", by(draft, add_variable),
            "NAME=VALUE: a variable for all workers. NAME: send this host's value to the other hosts that ddprun starts, "
            "also where it belongs to a host (TMPDIR). Others are sent without it: docs/hosts.md has the list. May be repeated.")
        ->take_all();
    options.value(
        "--start-timeout", "SPAN", into(spec.start.timeout, parse_span),
        "A host that has not joined this long after the last ssh (or other starter) began cannot take part, "
        "and the job ends. Default 60s.");
}

void supervision_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Failures, restarts and signals");
    options.value("--max-restarts", "N[/SPAN]", into(spec.restart, parse_restarts),
                  "Restarts before giving up, as in 3, or 3/1h: 3 within any hour. Default 0.");
    options.value("--restart-backoff", "SPAN[:MAX]", by(draft, set_backoff),
                  "Wait before the second restart in a row, doubled each time up to MAX. Default 0:60s.");
    options.choice(
        "--recover", "HOW", spec.recover.mode,
        {{"auto", RecoverSpec::Mode::Auto},
         {"restart", RecoverSpec::Mode::Restart},
         {"program", RecoverSpec::Mode::Program}},
        "What follows a worker's failure: auto (where all workers have announced that they survive it, as those with ddp::Recovery "
        "do, the failed one starts again in place and the others go on, which uses up no restart), restart (all workers end, and "
        "start again while --max-restarts allows it), or program (the others go on without it, for programs that recover by "
        "themselves, as with NVRx; the first failure gives the exit code). Default auto.");
    options.value(
        "--recover-within", "SPAN", into(spec.recover.within, parse_span),
        "The longest wait for workers in a recovery in place; then the late ones are killed. Default 60s.");
    options.value(
        "--rehearse", "N", into(spec.recover.rehearse, parse_number<1, 1'000'000'000>),
        "Every N committed steps or more, all workers let go of their generation and meet in the next one, as after a failure, but "
        "none is killed. A program that keeps the contract of ddp::Recovery ends with the same result as without. Default: never.");
    options.value(
        "--gpu-memory-wait", "SPAN", into(spec.gpu_memory_wait, parse_span),
        "Wait at most so long before a restart until the GPU memory of the workers that have ended is free. 0: do not "
        "look. Default 30s.");
    options.value(
        "--shutdown-timeout", "SECONDS", into(spec.shutdown_timeout, parse_span),
        "Grace between the stop signal and SIGKILL. Default TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.");
    options.choice(
        "--grow", "WHEN", spec.grow, {{"now", Grow::Now}, {"restart", Grow::Restart}},
        "When nodes that come to a running --nnodes=MIN:MAX job are taken in: now (its workers get a notice, SIGTERM and "
        "--preempt-grace, and start again in the larger world, which uses up no restart), or restart (when it is started again for "
        "another reason). Default now.");
    options.value(
        "--failure-grace", "SPAN", into(spec.failure_grace, parse_span),
        "How long workers may go on after a failure: the others when one has failed, and one that has written its error report, or "
        "called MPI_Abort, and does not exit; then SIGKILL. At most --shutdown-timeout. Default 5s.");
    options.value("--preempt-grace", "SPAN", into(spec.preempt_grace, parse_span),
                  "Grace after a preemption notice, for a checkpoint. Default 30s.");
    options.value(
        "--walltime-notice", "SPAN", into(spec.walltime_notice, parse_span),
        "Preempt the job so long before its walltime ends, where the scheduler (PBS, Torque, Slurm, LSF) tells it: notice, SIGTERM, "
        "--preempt-grace, exit code 75. Default 0: never. No restart begins less than 60 s before that, or before the end.");
    options.choice(
        "--requeue", "WHEN", spec.requeue.mode,
        {{"no", RequeueSpec::Mode::No}, {"auto", RequeueSpec::Mode::Auto}, {"self", RequeueSpec::Mode::Self}},
        "Put a batch job back into its queue when its walltime ends it, or a failure that another run may not meet: self (by scontrol "
        "requeue under Slurm, by qsub of --requeue-script under PBS; the job does not start where that cannot be), auto (where "
        "it can be), no. Not without progress, not after a signal from its user or scheduler, nor a wrong configuration. Brings a "
        "--walltime-notice of 2m. Default no.");
    options.value("--requeue-limit", "N", into(spec.requeue.limit, parse_number<0, 1'000'000>),
                  "At most so many times in all. Default 10.");
    options
        .value("--requeue-script", "FILE", into(spec.requeue.script, parse_text),
               "PBS: the job script, as it was given to qsub.")
        ->option_text("@file");
    options.value("--signals-to-handle", "NAME,...", by(draft, set_stop_signals),
                  "Signals that stop the job, besides TERM, INT, HUP and QUIT.");
    options
        .value(
            "--signal", "NAME=ACTION", by(draft, set_signal_actions),
            "What a signal sent to ddprun does: forward (to the workers, and carry on), stop, preempt (notice, "
            "grace, exit code 75) or ignore. May be repeated. A signal that was ignored when ddprun was started, "
            "as HUP under nohup, stays ignored for ddprun and its workers unless it is named here.")
        ->take_all();
    options.value(
        "--hang-timeout", "SPAN", into(spec.hang_timeout, parse_span),
        "Workers that make no progress for this long hang: says who keeps whom waiting, prints all stacks, then "
        "restarts or ends with exit code 124. No progress is a collective of libddp that stands still, or steps that a worker "
        "reported (in Python: ddprun.step) and reports no more, whatever the processor does; of workers that "
        "tell neither, that no rank uses any processor time, reads or writes: one that spins is not found. Where all workers can "
        "recover in place, only the rank that keeps the others waiting starts again. Default 0: --recover-within there, else never.");
}

void output_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Output");
    options
        .value(
            "--log-dir", "DIR", into(spec.output.log_dir, parse_text),
            "Keep files DIR/<id>_<random>/attempt_<k>/<rank>/{stdout,stderr}.log. Without -r and -t all "
            "streams go to the files and to the console. The umask says who may read them: with 022 every user of the "
            "file system, with 077 (set before ddprun) only you.")
        ->option_text("@directory");
    options
        .value(
            "-r,--redirects", "STREAMS", into(spec.output.redirects, parse_streams),
            "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or a map by local rank: 0:1,11:2.")
        ->option_text("0 1 2 3");
    options
        .value("-t,--tee", "STREAMS", into(spec.output.tee, parse_streams),
               "Streams that go to files and to the console; written as for -r.")
        ->option_text("0 1 2 3");
    options.value("--local-ranks-filter", "RANK,...", into(spec.output.local_ranks, parse_rank_list),
                  "The console shows only these local ranks. Default all.");
    options.value(
        "--duplicate-stdout-filters", "TEXT,...", into(spec.output.stdout_filters, parse_filters),
        "Copy stdout lines with one of the texts to filtered_stdout.log; a double comma is a comma.");
    options.value("--duplicate-stderr-filters", "TEXT,...", into(spec.output.stderr_filters, parse_filters),
                  "The same for stderr and filtered_stderr.log.");
    options.value("--max-log-size", "SIZE", into(spec.output.max_file_bytes, parse_bytes),
                  "Rotate each log file at this size, as in 100MiB. Default 0: never.");
    // Declared before --prefix, which wins over it.
    options.value("--log-line-prefix-template", "TEMPLATE", by(draft, set_prefix),
                  "torchrun's name of --prefix.");
    options
        .value(
            "--prefix,--log-prefix", "TEMPLATE", by(draft, set_prefix),
            "Before each line, on the console: none, or a text with ${rank} ${local_rank} ${role_name} ${host} (or ${hostname}) "
            "${time}, or auto: torchrun's '[${role_name}${local_rank}]:' with --tee; nothing where the job has one worker, or where "
            "one rank's lines alone go into a pipe or a file; else '[${rank}]: '. Default "
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else auto.")
        ->option_text("auto none");
    options.choice("--color", "WHEN", spec.output.color,
                   {{"auto", OutputSpec::Color::Auto},
                    {"always", OutputSpec::Color::Always},
                    {"never", OutputSpec::Color::Never}},
                   "Colour the prefixes. Default auto: on a terminal.");
    options.flag("-q,--quiet", spec.quiet, "No lines of ddprun's own but errors.");
}

void observation_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Reports and observation");
    options.flag("--dry-run", spec.dry_run,
                 "Print the complete plan (ranks, commands, environment, binding) and exit.");
    options.value("--report", "FILE", into(spec.report_file, parse_text), "Write how the job ended as JSON.")
        ->option_text("@file");
    // Declared before --events, which wins over it.
    options
        .value("--event-log-handler", "NAME", by(draft, set_event_handler),
               "console writes the job's events to standard error.")
        ->option_text("null console");
    options
        .value("--events", "FILE", into(spec.events_file, parse_text),
               "Write every event of the job, one JSON object per line.")
        ->option_text("@file");
    options.value(
        "--metrics-port", "[ADDR:]PORT", into(spec.metrics_at, parse_metrics_address),
        "Serve Prometheus metrics on this port of the loopback interface, where every user of this host can read them; "
        "or at this address of the host, *:PORT at all, for everyone who reaches it.");
    options
        .value(
            "--tensorboard", "DIR", into(spec.tensorboard, parse_text),
            "Write curves of the job for TensorBoard below DIR/RUN, where RUN is --rdzv-id, else the batch job's id or the "
            "one that ddprun ps shows: steps per second, communication, CPU, memory, GPUs, restarts.")
        ->option_text("@directory");
    options
        .value(
            "--trace", "DIR", into(spec.trace, parse_text),
            "Workers that use libddp record steps, collectives and their own spans there, ddprun its events: 'ddprun "
            "trace DIR' merges them.")
        ->option_text("@directory");
}

void other_options(OptionList& options, OptionDraft& draft) {
    options.begin_group("Other");
    options
        .value(
            "--config", "FILE", [](const std::string&) { return Status(); },
            "JSON object with any of these options by long name, \"program\" and \"args\". The command line wins "
            "over PET_<NAME> variables, these over the file.")
        ->option_text("@file");
    options.choice("--print-completion", "SHELL", draft.shell,
                   {{"bash", "bash"}, {"zsh", "zsh"}, {"fish", "fish"}, {"tcsh", "tcsh"}},
                   "Print a completion script and exit.");
    options.flag("--print-man", draft.print_man, "Print the manual page (troff) and exit.");
    options.flag(
        "-V,--version", [] {}, "Print the version and exit.");
    options
        .value(
            "-h,--help", "[all]", [](const std::string&) { return Status(); },
            "Print the options that are used most and exit; --help=all: print all options.")
        ->option_text("all")
        ->expected(0, 1);
    options.value("--monitor-interval", "SECONDS", by(draft, set_monitor_interval),
                  "Accepted: ddprun is event-driven.");
    options
        .value("--start-method", "NAME", by(draft, set_start_method),
               "Accepted: concerns Python functions only.")
        ->option_text("spawn fork forkserver");
    options.value("--logs-specs", "NAME", by(draft, set_logs_specs), "Accepted: names a Python plug-in.");
    options.flag(
        "--use-env",
        [&draft] { (void)without_effect(draft, "use-env", "LOCAL_RANK is always in the environment"); },
        "Accepted: LOCAL_RANK is always in the environment.");
}

}  // namespace

void declare_options(OptionList& options, OptionDraft& draft) {
    worker_options(options, draft);
    start_options(options, draft);
    rendezvous_options(options, draft);
    supervision_options(options, draft);
    output_options(options, draft);
    observation_options(options, draft);
    other_options(options, draft);
}

}  // namespace ddprun
