#include "launcher/cli/option_table.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/core.h>

#include "env/nodes/pmix_source.h"
#include "env/text.h"
#include "launcher/cli/help.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/start/start_order.h"
#include "launcher/start/start_plan.h"
#include "launcher/tools/batch/batch.h"

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
        return Error::invalid(
            fmt::format("'{}' is not supported (expected static or c10d; ddprun's own server needs no etcd)",
                        excerpt(value)));
    }
    return parse_choice<std::string>(value, {{"static", "static"}, {"c10d", "c10d"}});
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
        return Error::invalid(
            fmt::format("'{}' is not an address alone; its port goes into --master-port", excerpt(value)));
    return parse_text(value);
}

/// Refuses a timeout so short that a delay on a busy machine would lose a node.
Result<Duration> parse_heartbeat_timeout(Text value) {
    const Result<Duration> span = parse_span(value);
    if (!span) return span.error();
    if (*span < std::chrono::milliseconds(100))
        return Error::invalid(fmt::format("'{}' is not a time of at least 100 ms", excerpt(value)));
    return *span;
}

Status set_conf(Draft& draft, Text value) {
    const Result<std::vector<std::string>> remarks = apply_rdzv_conf(value, draft.spec.rendezvous);
    if (!remarks) return remarks.error();
    for (const std::string& remark : *remarks) draft.remarks.push_back("--rdzv-conf: " + remark);
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
        return Error::invalid(fmt::format("'{}': the first wait is above the longest", excerpt(value)));
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
    if (value.empty()) return Error::invalid("the value is empty");
    if (value == "null") return {};
    if (value == "console") {
        draft.spec.events_file = "/dev/stderr";
        return {};
    }
    return without_effect(draft, "event-log-handler",
                          "handlers are Python plug-ins; --events FILE writes the events");
}

Status set_logs_specs(Draft& draft, Text value) {
    if (value.empty()) return Error::invalid("the value is empty");
    if (value == "default") return {};
    return without_effect(draft, "logs-specs", "it names a Python plug-in; see the options under Output");
}

Status set_monitor_interval(Draft& draft, Text value) {
    const Result<double> seconds = parse_double(value);
    if (!seconds || !(*seconds >= 0))
        return Error::invalid(fmt::format("'{}' is not a number of seconds", excerpt(value)));
    return without_effect(draft, "monitor-interval", "ddprun is told of every event and polls nothing");
}

Status set_start_method(Draft& draft, Text value) {
    const Result<int> known = parse_choice<int>(value, {{"spawn", 0}, {"fork", 0}, {"forkserver", 0}});
    if (!known) return known.error();
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
        return Error::invalid(fmt::format("'{}' is not NAME or NAME=VALUE of a variable", excerpt(value)));
    if (name == value && is_never_sent(name))
        return Error::invalid(fmt::format("{} is never sent to another host", name));
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

Result<PmixUse> parse_pmix(Text value) {
    const Result<PmixUse> use =
        parse_choice<PmixUse>(value, {{"auto", PmixUse::Auto}, {"on", PmixUse::On}, {"off", PmixUse::Off}});
    if (use && *use == PmixUse::On && !built_with_pmix())
        return Error::invalid(fmt::format("on: {}", kNoPmix));
    return use;
}

Status set_stdin(Draft& draft, Text value) {
    draft.spec.stdin_rank.reset();
    if (value == "none") return {};
    const Result<int> rank = parse_rank(value);
    if (!rank) return Error::invalid(rank.error().what + ", nor none");
    draft.spec.stdin_rank = *rank;
    return {};
}

void program_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Workers");
    options.value("--nproc-per-node", "N", into(spec.workers, parse_worker_count),
                  "Workers per node: a count, auto (one per GPU, else one per CPU), gpu, or cpu. Default 1.",
                  "auto gpu cpu");
    options.value("--nnodes", "N|MIN:MAX", into(spec.nodes, parse_nodes),
                  "Number of nodes, or a range for an elastic job. Default: the number that mpirun or srun "
                  "started (one ddprun per node), else all hosts of the batch job, else 1.");
    options.flag("--per-rank", spec.per_rank,
                 "This ddprun is one of several that mpiexec or srun started, one for each rank. It runs one "
                 "worker, with the launcher's rank and local rank, and restarts it with the others. Default "
                 "when the launcher put several ddpruns on a node and --nproc-per-node is not given.");
    options.flag("--pass-mpi-env", spec.pass_mpi_env,
                 "Give the workers the variables by which mpiexec or srun told ddprun its rank, and its PMI "
                 "descriptor. Programs that use MPI themselves need them. By default the workers see only "
                 "ddprun's own variables.");
    options.flag("-m,--module", draft.module, "The program is a Python module: run python -m PROGRAM.");
    options.flag("--no-python", draft.no_python,
                 "Execute the program directly, even when its name ends in .py.");
    options.flag("--run-path", draft.run_path,
                 "Run the Python script with runpy.run_path. It wins over --no-python and -m.");
    options.value("--role", "NAME", into(spec.role, parse_text),
                  "Name of the workers' role (ROLE_NAME). Default: default.");
}

void placement_options(OptionList& options, JobSpec& spec) {
    options.choice(
        "--numa-binding", "POLICY", spec.binding,
        {{"none", NumaBinding::None},
         {"auto", NumaBinding::Auto},
         {"node", NumaBinding::Node},
         {"socket", NumaBinding::Socket},
         {"exclusive", NumaBinding::Exclusive},
         {"core-complex", NumaBinding::CoreComplex}},
        "Bind each worker's CPUs and memory: node, socket, exclusive, core-complex, none, or auto. node is "
        "the NUMA node of the worker's GPU. exclusive is cores of its own on that node. core-complex is "
        "cores that share a last-level cache. auto is node on a host with several NUMA nodes among which the "
        "workers divide evenly. auto is none when a batch system gave an unknown part of the host. Default "
        "auto.");
    options.flag(
        "--virtual-local-rank", spec.virtual_local_rank,
        "LOCAL_RANK is 0 for all workers, and each sees only its GPU in CUDA_VISIBLE_DEVICES. Without "
        "an NVIDIA GPU the variable is HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, if that is set.");
    options.flag("--narrow-gpus", spec.narrow_gpus,
                 "Each worker sees only its GPU, as with --virtual-local-rank, but LOCAL_RANK stays.");
    options.choice(
        "--fabric", "NAME", spec.fabric,
        {{"auto", std::nullopt},
         {"slingshot", Fabric::Slingshot},
         {"ib", Fabric::Infiniband},
         {"efa", Fabric::Efa},
         {"ethernet", Fabric::Ethernet},
         {"none", Fabric::None}},
        "Set the variables of NCCL and libfabric that suit the network between the nodes. A variable "
        "that you set yourself stays. auto chooses by the node's hardware (Slingshot, EFA, "
        "InfiniBand, else Ethernet) in jobs of several nodes; none sets nothing. --dry-run and "
        "ddprun env show the variables with their reasons. Default auto.");
    options.choice(
        "--cgroup", "auto|none", spec.use_cgroup, {{"auto", true}, {"none", false}},
        "Run the workers in a cgroup below ddprun's own, so that no process of theirs outlives the "
        "job. auto does it when cgroup v2 permits it. Default auto.");
    options.choice(
        "--gpu-check", "WHEN", spec.gpu_check,
        {{"auto", GpuCheck::Auto},
         {"off", GpuCheck::Off},
         {"warn", GpuCheck::Warn},
         {"refuse", GpuCheck::Refuse}},
        "Check the GPUs' health before anything starts: off, warn (one line for each problem), "
        "refuse (also a GPU that is in use), or auto. In jobs that ask for GPUs, auto refuses what "
        "no program can use and warns of the rest. Default auto.");
}

void service_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.value(
        "--pmix", "WHEN", into(spec.pmix, parse_pmix),
        "Be the PMIx server of the workers, so that programs of Open MPI form one world: on, off, or "
        "auto. auto is on when the program itself is linked with such an MPI and libpmix is "
        "installed. MPI behind a script or in Python needs on. Default auto.",
        "auto on off");
    options.choice(
        "--torch-store", "WHEN", spec.torch_store,
        {{"auto", TorchStoreUse::Auto}, {"on", TorchStoreUse::On}, {"off", TorchStoreUse::Off}},
        "Serve the store of PyTorch's workers at MASTER_ADDR:MASTER_PORT: on, off, or auto. Every "
        "process of this job's nodes can use the store, without authentication. With off, rank 0 "
        "may listen there itself. auto is on when Python runs the program, except for several nodes "
        "with --tls. Default auto.");
    options.value("--stdin", "RANK|none", by(draft, set_stdin),
                  "The rank that reads ddprun's standard input. Default none.", "none");
    options.value("--attach", "RANK=CMD", into(spec.attach, parse_attach),
                  "Run this rank under CMD in the terminal, as in --attach 0='gdb --args'.");
}

void host_options(OptionList& options, OptionDraft& draft) {
    StartSpec& start = draft.spec.start;
    options.begin_group("Hosts");
    options.value(
        "--hosts", "HOST,...", into(start.hosts, parse_text),
        "Run on these hosts: names, ranges such as n[01-16], or HOST:SLOTS. ddprun starts itself on "
        "the others; a host that is not in the list only directs the job. Default: the hosts of the "
        "surrounding PBS, Slurm or LSF job, unless --node-rank or --rdzv-endpoint is given.");
    options.value("--hostfile", "FILE", into(start.hostfile, parse_text),
                  "Run on the hosts of a file, written as for MPI launchers. Each line has a host, then "
                  "optionally slots=N or :N. A # begins a comment.",
                  "@file");
    options.choice(
        "--start", "HOW", start.starter,
        {{"auto", Starter::Auto},
         {"none", Starter::None},
         {"pbsdsh", Starter::Pbsdsh},
         {"tm", Starter::Tm},
         {"mpiexec", Starter::Mpiexec},
         {"srun", Starter::Srun},
         {"blaunch", Starter::Blaunch},
         {"ssh", Starter::Ssh}},
        "The program that starts ddprun on the other hosts. none: you start it yourself there, with "
        "--nnodes, --node-rank and --rdzv-endpoint. auto in a PBS job: pbsdsh, else pbs_tmrsh (tm), "
        "else mpiexec (PALS's or Hydra's: Cray, MPICH, Intel MPI; not Open MPI's), else ssh. auto in "
        "a Slurm job: srun. auto in an LSF job: blaunch, else ssh. auto elsewhere: ssh. Default auto.");
    options
        .value(
            "--env", "NAME[=VALUE]", by(draft, add_variable),
            "NAME=VALUE sets a variable for all workers. NAME sends this host's value to the other hosts "
            "that ddprun starts, even of a variable that belongs to a host (TMPDIR). ddprun sends most other "
            "variables anyway: docs/hosts.md has the list. May be repeated.")
        ->take_all();
    options.value(
        "--start-timeout", "SPAN", into(start.timeout, parse_span),
        "Time to join after the last ssh (or other starter) began. A host that has not joined by then "
        "cannot take part, and the job ends. Default 60s.");
}

void rendezvous_options(OptionList& options, OptionDraft& draft) {
    RendezvousSpec& rendezvous = draft.spec.rendezvous;
    options.begin_group("Rendezvous");
    options.flag("--standalone", draft.standalone,
                 "Run on one node, with any free port and a job id of its own. It overrides --rdzv-*.");
    options.value("--rdzv-backend", "NAME", into(rendezvous.backend, parse_backend),
                  "static or c10d. ddprun's own server stands behind both. Default static.", "static c10d");
    options.value(
        "--rdzv-endpoint", "HOST[:PORT]", by(draft, set_endpoint),
        "The address where the first node's ddprun listens. Default port 29400. Default address: what "
        "the surrounding launcher carries (PMIx, PMI), else its first host. A job of one node takes "
        "any free port.");
    options.value("--rdzv-id", "ID", into(rendezvous.run_id, parse_text),
                  "Name of the job, equal on all its nodes. Default: none, or a new name on one node.");
    options.value(
        "--rdzv-conf", "K=V,...", by(draft, set_conf),
        "Settings of the rendezvous. In seconds: join_timeout (also called timeout; default 600), "
        "last_call_timeout (30), keep_alive_interval (5). A node that is silent for "
        "keep_alive_max_attempt (3) intervals is lost; with neither key, --heartbeat-timeout decides. "
        "is_host says whether this node is the first. Accepted without effect: close_timeout, "
        "heartbeat_timeout, read_timeout, store_type=tcp, and keys of other back ends.");
    options.value(
        "--heartbeat-timeout", "SPAN", into(rendezvous.heartbeat_timeout, parse_heartbeat_timeout),
        "A node that is silent for this long is lost. A node that cannot reach the first one for this "
        "long stops its workers. Shorter faults do no harm. A lost node that wakes joins again by "
        "itself. All nodes must give the same value. Default 3s.");
    options.value("--node-rank", "N", into(rendezvous.node_rank, parse_rank),
                  "Index of this node, 0 to nnodes-1. Default: from the surrounding launcher.");
}

void network_options(OptionList& options, RendezvousSpec& rendezvous) {
    options.value(
        "--master-addr", "HOST", into(rendezvous.master_addr, parse_master_addr),
        "MASTER_ADDR of the workers. Default: the address at which the nodes reached the first one.");
    options.value("--master-port", "PORT", into(rendezvous.master_port, parse_port),
                  "MASTER_PORT of the workers. Default: a free port.");
    options.value(
        "--local-addr", "HOST", into(rendezvous.local_addr, parse_text),
        "The address at which the other nodes reach this one. The first node's becomes MASTER_ADDR, "
        "unless --master-addr is given.");
    options.value(
        "--iface", "NAME", into(rendezvous.iface, parse_text),
        "The network between nodes: an interface, or a network such as 10.1.0.0/16. ddprun listens "
        "only there, gives that address to the other nodes, and sets it for gloo and NCCL. Default: "
        "all interfaces.");
    options.flag(
        "--insecure", rendezvous.insecure,
        "Run several nodes without a secret: whoever reaches the port can join the job and stop it. By "
        "default the nodes share DDPRUN_TOKEN, else a file that ddprun makes at first use "
        "($XDG_CONFIG_HOME/ddprun/secret, else ~/.config/ddprun/secret). All nodes must give the same. "
        "DDPRUN_INSECURE=1 does the same.");
    options.flag(
        "--tls", rendezvous.tls,
        "Encrypt what nodes and workers send to the first node's ddprun, and the keys of its store. "
        "TLS 1.3 runs with a certificate made for this job and authenticated by its secret. All nodes "
        "must give the option. ddprun cannot encrypt what workers send to each other (NCCL, PyTorch's "
        "own store).");
}

void restart_options(OptionList& options, OptionDraft& draft) {
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
        "What follows a worker's failure: restart, program, or auto. restart: all workers end, and "
        "start again while --max-restarts allows it. program: the others go on without it, and the "
        "first failure gives the exit code. This is for programs that recover by themselves, as with "
        "NVRx. auto: the failed worker starts again in place and the others go on, when all workers "
        "have announced that they survive it, as with ddp::Recovery. This uses up no restart. "
        "Otherwise auto is restart. Default auto.");
    options.value("--recover-within", "SPAN", into(spec.recover.within, parse_span),
                  "The longest wait for workers in a recovery in place. ddprun then kills the late ones. "
                  "Default 60s.");
    options.value(
        "--rehearse", "N", into(spec.recover.rehearse, parse_number<1, 1'000'000'000>),
        "Rehearse a recovery every N committed steps or more. All workers leave their generation and "
        "meet in the next one, as after a failure, but none is killed. A program that keeps the "
        "contract of ddp::Recovery ends with the same result as without. Default: never.");
    options.value(
        "--gpu-memory-wait", "SPAN", into(spec.gpu_memory_wait, parse_span),
        "Before a restart, wait at most this long until the GPU memory of the ended workers is free. "
        "0: do not check. Default 30s.");
    options.choice(
        "--grow", "WHEN", spec.grow, {{"now", Grow::Now}, {"restart", Grow::Restart}},
        "When nodes that come to a running --nnodes=MIN:MAX job are taken in: now or restart. now: "
        "the workers get a notice, SIGTERM and --preempt-grace, and start again in the larger world. "
        "This uses up no restart. restart: when the job restarts for another reason. Default now.");
}

void grace_options(OptionList& options, JobSpec& spec) {
    options.value(
        "--shutdown-timeout", "SECONDS", into(spec.shutdown_timeout, parse_span),
        "Grace between the stop signal and SIGKILL. Default TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.");
    options.value(
        "--failure-grace", "SPAN", into(spec.failure_grace, parse_span),
        "Time before SIGKILL: for the others after a failure, and for a worker that reported an error "
        "(or called MPI_Abort) but does not exit. At most --shutdown-timeout. Default 5s.");
    options.value("--preempt-grace", "SPAN", into(spec.preempt_grace, parse_span),
                  "Grace after a preemption notice, for a checkpoint. Default 30s.");
    options.value(
        "--walltime-notice", "SPAN", into(spec.walltime_notice, parse_span),
        "Preempt the job this long before its walltime ends: notice, SIGTERM, --preempt-grace, exit "
        "code 75. The scheduler (PBS, Torque, Slurm, LSF) has to tell the walltime. No restart begins "
        "less than 60 s before the notice, or before the end. Default 0: never.");
    options.choice(
        "--requeue", "WHEN", spec.requeue.mode,
        {{"no", RequeueSpec::Mode::No}, {"auto", RequeueSpec::Mode::Auto}, {"self", RequeueSpec::Mode::Self}},
        "Put a batch job back into its queue when its walltime ends it, or after a failure that "
        "another run may not meet: self, auto, or no. Never after a run without progress, a signal, "
        "or a configuration error. self uses scontrol requeue under Slurm, and qsub of "
        "--requeue-script under PBS; where that cannot be, the job does not start. auto requeues "
        "where it can. Implies --walltime-notice=2m. Default no.");
    options.value("--requeue-limit", "N", into(spec.requeue.limit, parse_number<0, 1'000'000>),
                  "The most times that the job is put back. Default 10.");
    options.value("--requeue-script", "FILE", into(spec.requeue.script, parse_text),
                  "The job script as you gave it to qsub, for --requeue under PBS.", "@file");
}

void signal_options(OptionList& options, OptionDraft& draft) {
    options.value("--signals-to-handle", "NAME,...", by(draft, set_stop_signals),
                  "Signals that stop the job, besides TERM, INT, HUP and QUIT.");
    options
        .value(
            "--signal", "NAME=ACTION", by(draft, set_signal_actions),
            "What a signal sent to ddprun does: forward (to the workers, and the job goes on), stop, preempt "
            "(notice, grace, exit code 75) or ignore. May be repeated. A signal that was ignored when ddprun "
            "started, such as HUP under nohup, stays ignored for ddprun and its workers unless it is named "
            "here.")
        ->take_all();
    options.value(
        "--hang-timeout", "SPAN", into(draft.spec.hang_timeout, parse_span),
        "Act when workers make no progress for this long. Progress is a finished libddp collective or "
        "a reported step (in Python: ddprun.step). Workers that have neither count as hanging only "
        "while none uses CPU, reads or writes; a busy loop is not noticed. ddprun says who waits for "
        "whom, prints all stacks, and restarts or exits with 124. If all workers can recover in "
        "place, only the rank that keeps the others waiting starts again. Default 0: never, or "
        "--recover-within if all workers can recover in place.");
}

void file_options(OptionList& options, OutputSpec& output) {
    options.begin_group("Output");
    options.value(
        "--log-dir", "DIR", into(output.log_dir, parse_text),
        "Keep files DIR/<id>_<random>/attempt_<k>/<rank>/{stdout,stderr}.log. Without -r and -t all "
        "streams go to the files and to the console. The umask decides who may read them: with 022 "
        "every user of the file system, with 077 (set before ddprun) only you.",
        "@directory");
    options.value(
        "-r,--redirects", "STREAMS", into(output.redirects, parse_streams),
        "Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both, or a map by local rank: "
        "0:1,11:2.",
        "0 1 2 3");
    options.value("-t,--tee", "STREAMS", into(output.tee, parse_streams),
                  "Streams that go to files and to the console; written as for -r.", "0 1 2 3");
    options.value("--local-ranks-filter", "RANK,...", into(output.local_ranks, parse_rank_list),
                  "The console shows only these local ranks. Default all.");
    options.value(
        "--duplicate-stdout-filters", "TEXT,...", into(output.stdout_filters, parse_filters),
        "Copy stdout lines with one of the texts to filtered_stdout.log. A double comma is a comma.");
    options.value("--duplicate-stderr-filters", "TEXT,...", into(output.stderr_filters, parse_filters),
                  "Copy stderr lines with one of the texts to filtered_stderr.log.");
    options.value("--max-log-size", "SIZE", into(output.max_file_bytes, parse_bytes),
                  "Rotate each log file at this size, as in 100MiB. Default 0: never.");
}

void console_options(OptionList& options, OptionDraft& draft) {
    // Declared before --prefix, which wins over it.
    options.value("--log-line-prefix-template", "TEMPLATE", by(draft, set_prefix),
                  "torchrun's name of --prefix.");
    options.value(
        "--prefix,--log-prefix", "TEMPLATE", by(draft, set_prefix),
        "The beginning of each line on the console: none, auto, or a text with ${rank} ${local_rank} "
        "${role_name} ${host} (or ${hostname}) ${time}. With --tee, auto is torchrun's "
        "'[${role_name}${local_rank}]:'. Without it, auto is '[${rank}]: ', but nothing for a job of "
        "one worker, or when only one rank's lines go into a pipe or a file. Default "
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else auto.",
        "auto none");
    options.choice("--color", "WHEN", draft.spec.output.color,
                   {{"auto", OutputSpec::Color::Auto},
                    {"always", OutputSpec::Color::Always},
                    {"never", OutputSpec::Color::Never}},
                   "Colour the prefixes. Default auto: on a terminal.");
    options.flag("-q,--quiet", draft.spec.quiet, "Print no lines of ddprun's own but errors.");
}

void observation_options(OptionList& options, OptionDraft& draft) {
    JobSpec& spec = draft.spec;
    options.begin_group("Reports and observation");
    options.flag("--dry-run", spec.dry_run,
                 "Print the complete plan (ranks, commands, environment, binding) and exit.");
    options.value("--report", "FILE", into(spec.report_file, parse_text), "Write how the job ended as JSON.",
                  "@file");
    // Declared before --events, which wins over it.
    options.value("--event-log-handler", "NAME", by(draft, set_event_handler),
                  "console writes the job's events to standard error.", "null console");
    options.value("--events", "FILE", into(spec.events_file, parse_text),
                  "Write every event of the job, one JSON object per line.", "@file");
    options.value("--metrics-port", "[ADDR:]PORT", into(spec.metrics_at, parse_metrics_address),
                  "Serve Prometheus metrics on this port of the loopback interface, where every user of this "
                  "host can read them. ADDR:PORT serves them at that address of the host, and *:PORT at all, "
                  "for everyone who reaches it.");
    options.value(
        "--tensorboard", "DIR", into(spec.tensorboard, parse_text),
        "Write curves of the job for TensorBoard below DIR/RUN: steps per second, communication, CPU, "
        "memory, GPUs, restarts. RUN is --rdzv-id, else the batch job's id, else the id that ddprun "
        "ps shows.",
        "@directory");
    options.value(
        "--trace", "DIR", into(spec.trace, parse_text),
        "Record steps, collectives and spans of workers that use libddp there, and ddprun's events. "
        "'ddprun trace DIR' merges them.",
        "@directory");
}

void other_options(OptionList& options, OptionDraft& draft) {
    options.begin_group("Other");
    const TakeValue nothing = [](const std::string&) { return Status(); };  // read before the others
    options.value("--config", "FILE", nothing,
                  "Read a JSON object with any of these options by long name, \"program\" and \"args\". The "
                  "command line wins over PET_<NAME> variables, and these win over the file.",
                  "@file");
    options.choice("--print-completion", "SHELL", draft.text, completion_scripts(),
                   "Print a completion script and exit.");
    options.flag(
        "--print-man", [&draft] { draft.text = render_man_page(); },
        "Print the manual page (troff) and exit.");
    options.flag(
        "-V,--version", [] {}, "Print the version and exit.");
    options
        .value("-h,--help", "[all]", nothing,
               "Print the options that are used most and exit; --help=all prints all options.", "all")
        ->expected(0, 1);
    options.value("--monitor-interval", "SECONDS", by(draft, set_monitor_interval),
                  "Accepted without effect: ddprun is event-driven.");
    options.value("--start-method", "NAME", by(draft, set_start_method),
                  "Accepted without effect: it concerns Python functions only.", "spawn fork forkserver");
    options.value("--logs-specs", "NAME", by(draft, set_logs_specs),
                  "Accepted without effect: it names a Python plug-in.");
    options.flag(
        "--use-env",
        [&draft] { (void)without_effect(draft, "use-env", "LOCAL_RANK is always in the environment"); },
        "Accepted without effect: LOCAL_RANK is always in the environment.");
}

}  // namespace

void declare_options(OptionList& options, OptionDraft& draft) {
    program_options(options, draft);
    placement_options(options, draft.spec);
    service_options(options, draft);
    host_options(options, draft);
    rendezvous_options(options, draft);
    network_options(options, draft.spec.rendezvous);
    restart_options(options, draft);
    grace_options(options, draft.spec);
    signal_options(options, draft);
    file_options(options, draft.spec.output);
    console_options(options, draft);
    observation_options(options, draft);
    other_options(options, draft);
}

}  // namespace ddprun
