#include "launcher/launch.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <filesystem>

#include "env/io/socket.h"
#include "env/nodes/launcher_env.h"
#include "env/os/system.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/options.h"
#include "launcher/cli/subcommand.h"
#include "launcher/exit_codes.h"
#include "launcher/gpu/gpu_health.h"
#include "launcher/gpu/nvml.h"
#include "launcher/job.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/program.h"
#include "launcher/report/error_file.h"

namespace ddprun {

namespace {

int refuse(const std::string& why, ExitCode code) {
    ddprun::print(stderr, "ddprun: {}\n", printable(why));
    return static_cast<int>(code);
}

/// A job that did not come about is a failure to whoever started us, as one that failed.
int tell_that_nothing_began(const std::string& why, ExitCode code) {
    const LauncherFailure failure{.message = why, .error_code = static_cast<int>(code), .unix_seconds = ::time(nullptr)};
    if (const Status left = leave_error_file(process_environment, failure); !left) ddprun::print(stderr, "ddprun: {}; ignoring\n", printable(left.error().what));
    return refuse(why, code);
}

ExitCode exit_code_for(const Error& error) {
    switch (error.code) {
        case Errc::InvalidArgument: case Errc::NotFound: case Errc::Mismatch: return ExitCode::Usage;
        case Errc::Timeout: case Errc::Closed: case Errc::Refused: return ExitCode::Unavailable;
        case Errc::System: return error.sys == EADDRINUSE ? ExitCode::Unavailable : ExitCode::Internal;
        case Errc::StaleGeneration: case Errc::Protocol: case Errc::Limit: break;
    }
    return ExitCode::Internal;
}

/// Our own workers stand in libexec beside an installed ddprun, and in the build tree beside a built one.
ProgramSearch search_paths() {
    ProgramSearch search;
    std::error_code ignored;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
    search.own_directories = {(self / "../libexec/ddprun").lexically_normal().string(),
                              (self / "../workers/train").lexically_normal().string(),
                              (self / "../workers/check").lexically_normal().string()};
    search.path = process_environment("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
    search.python = process_environment("PYTHON_EXEC").value_or("");
    return search;
}

int show_plan(const JobSetup& setup) {
    rdzv::StartGeneration order;
    order.local_world_size = setup.workers;
    order.group_world_size = setup.spec.nodes.max;
    order.group_rank = setup.spec.rendezvous.node_rank.value_or(0);
    order.world_size = setup.workers * setup.spec.nodes.max;
    order.first_rank = setup.workers * order.group_rank;
    order.role_first_rank = order.first_rank;
    order.role_world_size = order.world_size;
    order.generation = 1;
    order.master_addr = setup.spec.rendezvous.master_addr.value_or("127.0.0.1");
    order.master_port = setup.spec.rendezvous.master_port.value_or(0);
    const Result<std::vector<WorkerPlan>> plans = plan_workers(setup.spec, setup.program, setup.machine, order);
    if (!plans) return refuse(plans.error().what, ExitCode::Usage);
    ddprun::print("{}", printable_lines(render_plan(setup.spec, setup.program, setup.machine, order, *plans)));
    return 0;
}

/// False: the job must not start, and why has been said.
bool gpus_are_fit(const JobSetup& setup) {
    if (!looks_at_gpus(setup.spec, setup.machine.gpus)) return true;
    const GpuVerdict verdict = judge_job_gpus(setup.spec, setup.workers, read_nvidia_facts(NvidiaDetail::Health),
                                              process_environment("CUDA_VISIBLE_DEVICES"));
    for (const std::string& refusal : verdict.refusals) ddprun::print(stderr, "ddprun: {}\n", printable(refusal));
    if (!setup.spec.quiet) {
        for (const std::string& warning : verdict.warnings) ddprun::print(stderr, "ddprun: {}\n", printable(warning));
    }
    return verdict.refusals.empty();
}

int run(CommandLine line) {
    for (const std::string& remark : line.remarks) ddprun::print(stderr, "ddprun: {}\n", printable(remark));
    JobSetup setup;
    setup.spec = std::move(line.spec);
    const Probe probe = probe_for(setup.spec);
    // NVML counts its users, and its first one may wait a second for the driver: held here, all who ask find it awake.
    std::optional<Result<nvml::Session>> awake;
    if (probe.gpus == Probe::Gpus::Yes) awake.emplace(nvml::Session::open());
    setup.machine = detect_machine(process_environment, probe);
    const Result<int> workers = resolve_worker_count(setup.spec.workers, setup.machine);
    if (!workers) return refuse(workers.error().what, ExitCode::Usage);
    setup.workers = *workers;
    Result<ResolvedProgram> program = resolve_program(setup.spec.program, search_paths());
    if (!program) return tell_that_nothing_began(program.error().what, program_exit_code(program.error()));
    setup.program = std::move(*program);
    setup.environment = os::own_environment();
    setup.log_level = process_environment("LOGLEVEL").value_or("");
    if (setup.spec.dry_run) return show_plan(setup);
    if (!gpus_are_fit(setup)) return static_cast<int>(ExitCode::Unavailable);
    awake.reset();

    const Result<int> code = run_job(std::move(setup));
    return code ? *code : tell_that_nothing_began(code.error().what, exit_code_for(code.error()));
}

/// One ddprun per node under mpirun, mpiexec or srun: which node this is comes from there, unless the user
/// said it. As variables, so that what the user said wins and the whole is checked again.
Result<CommandLine> as_node_of_launcher(CommandLine line, const std::vector<std::string>& arguments) {
    for (const char* said : {"nnodes", "node-rank", "standalone"}) {
        if (line.sources.count(said) != 0) return line;
    }
    const Result<LauncherChoice> choice = choose_launcher(process_environment);
    if (!choice) return choice.error();
    const Result<std::optional<NodePlace>> place = node_place(*choice);
    if (!place) return place.error();
    if (!*place) return line;
    const auto with_place = [&](std::string_view name) -> std::optional<std::string> {
        if (name == "PET_NNODES") return fmt::format("{}", (*place)->nodes);
        if (name == "PET_NODE_RANK") return fmt::format("{}", (*place)->node_rank);
        return process_environment(name);
    };
    Result<CommandLine> placed = parse_command_line(arguments, with_place);
    if (placed) {
        placed->remarks.push_back(
            fmt::format("node {} of {}: {}", (*place)->node_rank, (*place)->nodes, choice->explanation));
    }
    return placed;
}

}  // namespace

void open_standard_streams() {
    // open gives the lowest free number, so this ends at the first descriptor that is none of the three.
    int fd = 0;
    while (fd >= 0 && fd <= 2) fd = ::open("/dev/null", O_RDWR);
    if (fd > 2) ::close(fd);
}

int launch(const std::vector<std::string>& arguments) {
    if (!arguments.empty() && is_subcommand(arguments.front())) return run_subcommand(arguments);
    Result<CommandLine> line = parse_command_line(arguments, process_environment);
    if (line && line->action == CommandLine::Run) line = as_node_of_launcher(*std::move(line), arguments);
    if (!line) return refuse(line.error().what, ExitCode::Usage);
    if (line->action != CommandLine::Run) {
        ddprun::print("{}", line->text);
        return 0;
    }
    return run(std::move(*line));
}

}  // namespace ddprun
