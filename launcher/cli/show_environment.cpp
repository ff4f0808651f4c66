#include <fmt/core.h>
#include <sys/utsname.h>

#include <set>

#include "env/io/socket.h"
#include "env/nodes/launcher_env.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/cli/options.h"
#include "launcher/cli/subcommand.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/machine/machine.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/start/start_plan.h"

namespace ddprun {
namespace {

/// Variables in which launchers and batch systems describe the allocation.
constexpr std::string_view kAllocation =
    "SLURM_JOB_ID SLURM_STEP_ID SLURM_JOB_NUM_NODES SLURM_JOB_NODELIST SLURM_NTASKS "
    "SLURM_TASKS_PER_NODE SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GPUS_ON_NODE "
    "SLURM_CPUS_PER_TASK SLURM_CPUS_ON_NODE PBS_JOBID PBS_NODEFILE PBS_NUM_NODES NCPUS PBS_NODENUM "
    "PBS_TASKNUM LSB_JOBID LSB_HOSTS JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE FLUX_JOB_ID "
    "FLUX_TASK_RANK FLUX_JOB_SIZE PALS_APID PALS_RANKID PALS_NODEID OMPI_COMM_WORLD_RANK "
    "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMIX_NAMESPACE PMIX_RANK PMI_RANK PMI_SIZE "
    "MPI_LOCALRANKID MV2_COMM_WORLD_RANK";
constexpr std::string_view kDevices =
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES PYTHON_EXEC OMP_NUM_THREADS "
    "TMPDIR LOGLEVEL NO_COLOR";

/// The variables among `names` (separated by blanks) that are set, a line each.
std::string variables(std::string_view names) {
    std::string text;
    for (const std::string_view name : split(names, ' ')) {
        if (const std::optional<std::string> value = process_environment(name))
            text += fmt::format("  {}={}\n", name, printable(*value));
    }
    return text.empty() ? "  none\n" : text;
}

std::string host_lines() {
    utsname kernel{};
    ::uname(&kernel);
    return fmt::format("ddprun {}\nhost: {}, {} {} {}\n", DDPRUN_VERSION, host_name(), kernel.sysname,
                       kernel.release, kernel.machine);
}

std::string machine_lines(const Machine& machine) {
    std::set<int> nodes, packages, cores;
    for (const Cpu& cpu : machine.cpu_places) {
        nodes.insert(cpu.numa_node);
        packages.insert(cpu.package);
        cores.insert(cpu.core);
    }
    std::string text = fmt::format("CPUs: {} usable (of our affinity), {} cores, {} sockets, {} NUMA nodes\n",
                                   machine.cpus, cores.size(), packages.size(), nodes.size());
    if (machine.quota) text += fmt::format("CPU quota: {:.1f} CPUs (of our cgroups)\n", *machine.quota);
    text += fmt::format("GPUs: {} ({})\n", machine.gpus, printable(machine.gpus_from));
    for (const Gpu& gpu : machine.gpu_places) {
        text +=
            fmt::format("  {}{}{}\n", printable(gpu.id), gpu.uuid.empty() ? "" : " " + printable(gpu.uuid),
                        gpu.numa_node < 0 ? "" : fmt::format(", NUMA node {}", gpu.numa_node));
    }
    return text;
}

std::string option_lines(const CommandLine& line) {
    std::string text;
    for (const auto& [name, source] : line.sources) {
        text += fmt::format("  --{} {}  (from {})\n", name, printable(line.values.at(name)), source);
    }
    return text.empty() ? "  none\n" : text;
}

/// The hosts of a job that is started here, not as a task of another launcher.
std::string hosts_of_a_job(const JobSpec& spec) {
    const Result<StartFacts> facts = look_for_hosts(spec.start);
    if (!facts) return facts.error().what;
    const Result<StartPlan> plan = plan_start(spec, NodesSaid::Nothing, *facts);
    if (!plan) return plan.error().what;
    return plan->why.empty() ? "this one" : plan->why;
}

/// Reads the options of `env`, which needs no program. A program that is given, or named in --config, does no
/// harm.
Result<CommandLine> read_options(std::vector<std::string> options) {
    Result<CommandLine> line = parse_command_line(options, process_environment);
    if (line || !line.error().what.starts_with("no program given")) return line;
    options.emplace_back("program");
    return parse_command_line(options, process_environment);
}

}  // namespace

int show_environment(const std::vector<std::string>& options) {
    const Result<CommandLine> line = read_options(options);
    if (!line) {
        ddprun::print(stderr, "ddprun env: {}\n", printable(line.error().what));
        return static_cast<int>(ExitCode::Usage);
    }
    if (!line->text.empty()) {
        ddprun::print("{}", line->text);
        return 0;
    }
    const Machine machine = detect_machine(process_environment);
    const Result<int> workers = resolve_worker_count(line->spec.workers, machine);
    ddprun::print("{}{}", host_lines(), machine_lines(machine));
    ddprun::print("workers of this node: {}\n",
                  workers ? std::to_string(*workers) : printable(workers.error().what));
    const FabricProfile fabric = choose_fabric(line->spec.fabric, detect_network());
    ddprun::print("fabric, for jobs of several nodes: {}",
                  printable_lines(render_fabric(fabric, process_environment)));
    const Result<LauncherChoice> launcher = choose_launcher(process_environment);
    ddprun::print("launcher around us: {}\n",
                  printable(launcher ? launcher->explanation : launcher.error().what));
    ddprun::print("hosts of a job: {}\n", printable(hosts_of_a_job(line->spec)));
    ddprun::print("allocation:\n{}", variables(kAllocation));
    ddprun::print("variables that matter here:\n{}", variables(kDevices));
    ddprun::print("options that are set (all others have their defaults, see ddprun --help):\n{}",
                  option_lines(*line));
    return 0;
}

}  // namespace ddprun
