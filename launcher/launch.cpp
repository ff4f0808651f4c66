#include "launcher/launch.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <filesystem>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/meeting_point.h"
#include "env/os/system.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/help.h"
#include "launcher/cli/options.h"
#include "launcher/cli/subcommand.h"
#include "launcher/ends/error_file.h"
#include "launcher/job/node.h"
#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/machine/gpu/nvml.h"
#include "launcher/plan/head_choice.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/program.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"
#include "launcher/start/meet.h"

namespace ddprun {

namespace {

/// Why this ddprun runs no job.
struct Refusal {
    std::string why;
    ExitCode code = ExitCode::Usage;
};

int refuse(const Refusal& refusal) {
    ddprun::print(stderr, "ddprun: {}\n", printable(refusal.why));
    return static_cast<int>(refusal.code);
}

/// Reports that no job began: to the head, if it started this ddprun, and to our own starter by an error
/// file. Our starter then sees a failure, as after a job that failed.
int give_up(const JobSetup& setup, const Refusal& refusal) {
    if (setup.started) tell_head(*setup.started, refusal.why);
    const LauncherFailure failure{.message = refusal.why,
                                  .error_code = static_cast<int>(refusal.code),
                                  .unix_seconds = ::time(nullptr)};
    if (const Status left = leave_error_file(process_environment, failure); !left)
        ddprun::print(stderr, "ddprun: {}; ignoring\n", printable(left.error().what));
    return refuse(refusal);
}

ExitCode exit_code_for(const Error& error) {
    switch (error.code) {
        case Errc::InvalidArgument:
        case Errc::NotFound:
        case Errc::Mismatch: return ExitCode::Usage;
        case Errc::Timeout:
        case Errc::Closed:
        case Errc::Refused: return ExitCode::Unavailable;
        case Errc::System: {
            const bool is_about_address = error.sys == EADDRINUSE || error.sys == EADDRNOTAVAIL;
            return is_about_address ? ExitCode::Unavailable : ExitCode::Internal;
        }
        case Errc::StaleGeneration:
        case Errc::Protocol:
        case Errc::Limit: break;
    }
    return ExitCode::Internal;
}

ProgramSearch search_paths() {
    ProgramSearch search = program_search();
    search.own_words = {"--help", "--version"};
    for (const Subcommand& row : subcommands()) search.own_words.emplace_back(row.name);
    return search;
}

/// Checks values that are well-formed but cannot work here. Error: InvalidArgument, with option, value and
/// remedy.
Status check_values(const JobSetup& setup) {
    const JobSpec& spec = setup.spec;
    if (spec.rendezvous.local_addr) {
        if (const Status own = check_local_address(*spec.rendezvous.local_addr, interface_addresses()); !own)
            return own;
    }
    return check_ranks_exist(spec, setup.workers);
}

/// Returns false, and has printed why, when the job must not start.
bool gpus_are_fit(const JobSetup& setup) {
    if (!checks_gpus(setup.spec, setup.machine.gpus)) return true;
    const GpuVerdict verdict =
        judge_job_gpus(setup.spec, setup.workers, read_nvidia_facts(NvidiaDetail::Health),
                       process_environment("CUDA_VISIBLE_DEVICES"));
    for (const std::string& refusal : verdict.refusals)
        ddprun::print(stderr, "ddprun: {}\n", printable(refusal));
    if (!setup.spec.quiet) {
        for (const std::string& warning : verdict.warnings)
            ddprun::print(stderr, "ddprun: {}\n", printable(warning));
    }
    return verdict.refusals.empty();
}

std::string_view variable_name(std::string_view variable) { return variable.substr(0, variable.find('=')); }

/// Replaces the variable of "NAME=VALUE", or adds it.
void set_variable(std::vector<std::string>& environment, const std::string& variable) {
    std::erase_if(environment, [name = variable_name(variable)](const std::string& entry) {
        return variable_name(entry) == name;
    });
    environment.push_back(variable);
}

/// Lets workers that Python runs `import ddprun`, with any interpreter. Our folder comes last in PYTHONPATH,
/// so that it hides no module of the user.
void add_python_folder(std::vector<std::string>& environment) {
    std::error_code ignored;
    const std::filesystem::path self = own_directory();
    for (const char* const place : {"../share/ddprun/python", "../workers/python"}) {
        const std::string folder = (self / place).lexically_normal().string();
        if (!std::filesystem::exists(folder + "/ddprun/__init__.py", ignored)) continue;
        std::string path;
        for (const std::string& entry : environment) {
            if (variable_name(entry) == "PYTHONPATH") path = entry.substr(entry.find('=') + 1);
        }
        // An empty entry is the current directory. One at the end stays, and none is added.
        const bool ends_empty = path.ends_with(':');
        if (!path.empty() && !ends_empty) path += ':';
        return set_variable(environment, "PYTHONPATH=" + path + folder + (ends_empty ? ":" : ""));
    }
}

/// Our environment with the variables of --env NAME=VALUE. The variables by which an outer launcher told us
/// our rank are left out, because a worker that uses MPI would take our rank for its own.
std::vector<std::string> workers_environment(const JobSpec& spec) {
    std::vector<std::string> environment = os::own_environment();
    if (!spec.pass_mpi_env)
        std::erase_if(environment,
                      [](const std::string& entry) { return is_rank_variable(variable_name(entry)); });
    for (const std::string& given : spec.start.environment) {
        if (variable_name(given) != given) set_variable(environment, given);
    }
    return environment;
}

/// The names of --env NAME, whose values the other hosts get.
std::vector<std::string> variables_to_send(const StartSpec& start) {
    std::vector<std::string> names;
    for (const std::string& given : start.environment) {
        if (variable_name(given) != given) continue;
        names.push_back(given);
        if (!process_environment(given))
            ddprun::print(stderr, "ddprun: --env {}: is not set here, so nothing is sent\n",
                          printable(given));
    }
    return names;
}

// ---- the steps that complete a JobSetup, in their order. Each returns why this ddprun cannot go on, or
// nullopt.

using Step = std::optional<Refusal>;

/// True unless this host only directs the job. A dry run shows the workers of a host like this one.
bool has_workers(const JobSetup& setup) {
    return !setup.start || !setup.spec.rendezvous.head_is_apart || setup.spec.dry_run;
}

Step settle_trace(JobSetup& setup) {
    if (setup.spec.trace.empty()) return {};
    std::error_code gone;
    setup.spec.trace = std::filesystem::absolute(setup.spec.trace, gone).string();
    if (!gone) return {};
    return Refusal{fmt::format("--trace: the current directory: {}", gone.message())};
}

Step count_workers(JobSetup& setup) {
    if (!has_workers(setup)) return {};
    const Result<int> workers = resolve_worker_count(setup.spec.workers, setup.machine);
    if (!workers) return Refusal{workers.error().what};
    setup.workers = *workers;
    return {};
}

Step find_program(JobSetup& setup) {
    Result<ResolvedProgram> program = resolve_program(setup.spec.program, search_paths());
    if (!program) return Refusal{program.error().what, program_exit_code(program.error())};
    setup.program = *std::move(program);
    return {};
}

/// Takes what the head told the ddprun that it started here.
Step follow_head(JobSetup& setup) {
    if (!setup.started) return {};
    if (const Status same = check_same_program(*setup.started, setup.program); !same)
        return Refusal{same.error().what};
    setup.token = JobToken{setup.started->token, "", ""};
    setup.head_elsewhere = setup.started->elsewhere;
    return {};
}

/// Completes what this ddprun tells those that it starts on other hosts.
Step prepare_start(JobSetup& setup) {
    if (!setup.start) return {};
    const std::vector<std::string> asked = variables_to_send(setup.spec.start);
    if (const Status complete = complete_order(*setup.start, setup.program, asked); !complete)
        return Refusal{complete.error().what, ExitCode::Internal};
    Result<std::string> token = make_start_token(*setup.start, process_environment);
    if (!token) return Refusal{token.error().what, ExitCode::Internal};
    setup.token = JobToken{*std::move(token), "", ""};
    return {};
}

Step make_environment(JobSetup& setup) {
    setup.environment = workers_environment(setup.spec);
    if (is_run_by_python(setup.program)) add_python_folder(setup.environment);
    setup.log_level = process_environment("LOGLEVEL").value_or("");
    const Status possible = check_values(setup);
    return possible ? Step() : Refusal{possible.error().what};
}

/// Finds the address of --iface: this node, one of several, listens there and sends it to the others.
Step settle_address(JobSetup& setup) {
    RendezvousSpec& rendezvous = setup.spec.rendezvous;
    if (rendezvous.iface.empty() || (setup.spec.nodes.max == 1 && !rendezvous.head_is_apart)) return {};
    const std::vector<InterfaceAddress> interfaces = list_interfaces();
    Result<std::string> address = address_on(rendezvous.iface, interfaces);
    if (!address) return Refusal{address.error().with("--iface").what};
    rendezvous.listen_on = *std::move(address);
    if (!rendezvous.local_addr) rendezvous.local_addr = rendezvous.listen_on;
    if (setup.start) rendezvous.endpoint->host = rendezvous.listen_on;  // the other nodes get this address
    const bool prints = !setup.spec.quiet && (!setup.task || !setup.task->place.is_rank);
    if (prints)
        ddprun::print(stderr, "ddprun: the other nodes reach {} at {} (--iface={})\n", host_name(),
                      printable(*rendezvous.local_addr), printable(rendezvous.iface));
    for (const InterfaceAddress& one : interfaces) {
        if (one.address == rendezvous.listen_on) use_interface(setup.machine.fabric, one.interface);
    }
    return {};
}

/// Learns where the nodes meet, over the outer launcher.
Step meet_others(JobSetup& setup, const std::string& who, bool prints) {
    MeetingOutcome outcome = meet_unless_stopped(setup.spec, *setup.task, process_environment);
    if (outcome.signal != 0)
        return Refusal{
            fmt::format("{}: {} while the nodes were waited for", who, signal_name(outcome.signal)),
            ExitCode::TryAgain};
    if (!outcome.meeting) {
        const Error& error = outcome.meeting.error();
        return Refusal{fmt::format("{}: {}", who, error.what), exit_code_for(error)};
    }
    setup.task = std::move(outcome.task);
    JobMeeting& meeting = setup.meeting.emplace(*std::move(outcome.meeting));
    setup.head = meeting.head;
    setup.head_elsewhere = std::move(meeting.elsewhere);
    setup.token = std::move(meeting.token);
    setup.spec.rendezvous.endpoint = meeting.head.endpoint;
    setup.spec.rendezvous.run_id = meeting.run_id;
    if (prints)
        ddprun::print(stderr, "ddprun: {}\n",
                      printable(fmt::format("{}; they meet at {} ({})", who, to_string(meeting.head.endpoint),
                                            meeting.head.why)));
    return {};
}

/// Fills in where the nodes meet, when an outer launcher started them.
Step settle_meeting(JobSetup& setup) {
    if (!setup.task) return {};
    const std::string who = describe(*setup.task);
    // If each rank has a ddprun, only the first one prints. If each node has one, all print.
    const bool prints = !setup.task->place.is_rank || setup.task->place.node_rank == 0;
    if (!shared_endpoint(setup.spec)) {
        if (Step refused = meet_others(setup, who, prints)) return refused;
    } else if (prints) {
        ddprun::print(stderr, "ddprun: {}\n", printable(who));
    }
    setup.task->pmix.reset();
    if (!setup.task->place.is_rank) return {};
    const Result<OuterRank> rank = outer_rank_of(*setup.task);
    if (!rank) return Refusal{rank.error().what};
    setup.spec.outer_rank = *rank;
    if (!wants_fabric(setup.spec)) setup.machine.fabric = {};  // several ddpruns, all on this host
    return {};
}

/// Runs this node until the job has ended. A node that was to be a head, and learns that the job goes on
/// under another one, runs again and joins that head.
int run_node(JobSetup& setup) {
    for (;;) {
        const Result<std::optional<int>> code = Node(setup).run();
        if (!code) return give_up(setup, {code.error().what, exit_code_for(code.error())});
        if (*code) return **code;
    }
}

/// `setup` already says how this ddprun relates to those of other hosts.
int run(CommandLine line, JobSetup setup) {
    for (const std::string& remark : line.remarks) ddprun::print(stderr, "ddprun: {}\n", printable(remark));
    setup.spec = std::move(line.spec);
    complete_signals(setup.spec.signals);
    // mpirun gives its processes terminals that nobody reads.
    OutputSpec::Color& color = setup.spec.output.color;
    if (setup.task && color == OutputSpec::Color::Auto) color = OutputSpec::Color::Never;
    const Probe probe = probe_for(setup.spec);
    // NVML counts its users, and the first one may wait a second for the driver. This session keeps NVML open
    // for all later users.
    std::optional<Result<nvml::Session>> nvml;
    if (probe.gpus == Probe::Gpus::Yes) nvml.emplace(nvml::Session::open());
    setup.machine = detect_machine(process_environment, probe);
    for (const auto step :
         {settle_trace, count_workers, find_program, follow_head, prepare_start, make_environment}) {
        if (const Step refused = step(setup)) return give_up(setup, *refused);
    }
    if (has_workers(setup) && !gpus_are_fit(setup)) {
        if (setup.started)
            tell_head(*setup.started, "its GPUs are not fit for the job (its own lines say why)");
        return static_cast<int>(ExitCode::Unavailable);
    }
    if (const Step refused = settle_address(setup)) return give_up(setup, *refused);
    if (setup.spec.dry_run) {
        const Status shown = show_plan(setup, line.sources.contains("nproc-per-node"));
        return shown ? 0 : refuse({shown.error().what, exit_code_for(shown.error())});
    }
    if (const Step refused = settle_meeting(setup)) return give_up(setup, *refused);
    nvml.reset();
    setup.descriptors = raise_descriptor_limit();
    return run_node(setup);
}

/// Takes this ddprun's node rank from mpirun, mpiexec or srun, unless the user gave it. It is passed as PET_
/// variables, so that the user's own options win and everything is checked again.
Result<CommandLine> as_task_of_launcher(CommandLine line, const std::vector<std::string>& arguments,
                                        JobSetup& setup) {
    Result<std::optional<OuterTask>> task = find_outer_task(line, process_environment);
    if (!task) return task.error();
    if (!*task) {
        Result<std::optional<HostStart>> start = use_allocation(line, arguments);
        if (!start) return start.error();
        setup.start = *std::move(start);
        return line;
    }
    const NodePlace place = (*task)->place;
    if (place.nodes == 1) return line;  // the hosts are the launcher's, whatever is allocated
    setup.task = *std::move(task);
    const auto with_place = [&](std::string_view name) -> std::optional<std::string> {
        if (name == "PET_NNODES") return fmt::format("{}", place.nodes);
        if (name == "PET_NODE_RANK") return fmt::format("{}", place.node_rank);
        return process_environment(name);
    };
    return parse_command_line(arguments, with_place);
}

/// `ddprun agent`: the command that a head starts on the other hosts.
int launch_agent(const std::vector<std::string>& words) {
    const Result<AgentCall> call = parse_agent_words(words);
    if (!call) return refuse({"agent: " + call.error().what});
    Result<StartedNode> started = ask_head(*call);
    if (!started) return refuse({started.error().what, exit_code_for(started.error())});
    Result<CommandLine> line = take_order(*started);
    if (!line) {
        tell_head(*started, line.error().what);
        return refuse({line.error().what});
    }
    JobSetup setup;
    setup.started = *std::move(started);
    return run(*std::move(line), std::move(setup));
}

}  // namespace

void open_standard_streams() {
    // open returns the lowest free number, so this ends at the first descriptor above 2.
    int fd = 0;
    while (fd >= 0 && fd <= 2) fd = ::open("/dev/null", O_RDWR);
    if (fd > 2) ::close(fd);
}

int launch(const std::vector<std::string>& arguments) {
    const std::string first = arguments.empty() ? "" : arguments.front();
    if (find_subcommand(first) != nullptr) return run_subcommand(arguments);
    if (first == "agent") return launch_agent({arguments.begin() + 1, arguments.end()});
    if (first == "__complete") return print_completions({arguments.begin() + 1, arguments.end()});
    Result<CommandLine> line = parse_command_line(arguments, process_environment);
    JobSetup setup;
    if (line && line->text.empty()) line = as_task_of_launcher(*std::move(line), arguments, setup);
    if (!line) return refuse({line.error().what});
    if (!line->text.empty()) {
        ddprun::print("{}", line->text);
        return 0;
    }
    if (!line->spec.quiet) {
        for (std::string& remark : remarks_on_variables(os::own_environment()))
            line->remarks.push_back(std::move(remark));
    }
    return run(std::move(*line), std::move(setup));
}

}  // namespace ddprun
