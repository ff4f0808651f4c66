#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "env/text.h"

namespace ddprun::doctor {
namespace {

constexpr std::uint64_t kGiB = 1ULL << 30;
constexpr std::uint64_t kMiB = 1ULL << 20;
constexpr std::uint64_t kSmallShm = 256 * kMiB;     // containers get 64 MiB by default
constexpr std::uint64_t kEnoughLocked = 64 * kMiB;  // RDMA registers buffers of this size
constexpr std::uint64_t kEnoughFiles = 4096;
constexpr std::uint64_t kEnoughProcesses = 4096;
constexpr std::uint64_t kEnoughPids = 1024;
constexpr std::uint64_t kSmallStack = 8 * kMiB;
constexpr std::int64_t kYear2024 = 1'704'067'200;

using Rows = std::vector<Finding>;

void add_host(Rows& rows, Severity severity, const char* subject, std::string what, std::string remedy = "") {
    rows.push_back({severity, "Host", subject, std::move(what), std::move(remedy)});
}

std::string count_of(std::size_t n, const char* what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

void judge_cpus(const HostFacts& host, Rows& rows) {
    std::set<int> nodes, packages, cores;
    for (const Cpu& cpu : host.machine.cpu_places) {
        nodes.insert(cpu.numa_node);
        packages.insert(cpu.package);
        cores.insert(cpu.core);
    }
    add_host(rows, Severity::Ok, "cpu",
             fmt::format("{}: {} of our affinity, {}, {}", host.cpu_model.empty() ? "CPUs" : host.cpu_model,
                         count_of(static_cast<std::size_t>(host.machine.cpus), "CPU"),
                         count_of(cores.size(), "core"), count_of(packages.size(), "socket")));
    add_host(rows, Severity::Ok, "numa", count_of(nodes.size(), "NUMA node"));
    if (host.governor == "powersave")
        add_host(rows, Severity::Note, "cpu governor", "powersave: launches of kernels may be slower",
                 "cpupower frequency-set -g performance");
}

void judge_memory(const HostFacts& host, Rows& rows) {
    const bool low = host.memory_total > 0 && host.memory_available < host.memory_total / 20;
    add_host(rows, low ? Severity::Warning : Severity::Ok, "memory",
             fmt::format("{} available of {}", format_bytes(host.memory_available),
                         format_bytes(host.memory_total)),
             low ? "see what holds it (ps aux --sort -rss)" : "");
    if (!host.shm_size) {
        add_host(rows, Severity::Warning, "/dev/shm",
                 "is not there: NCCL and data loaders share memory through it",
                 "mount -t tmpfs tmpfs /dev/shm");
    } else if (*host.shm_size < kSmallShm) {
        add_host(
            rows, Severity::Warning, "/dev/shm",
            fmt::format("{}: too small for data loaders and NCCL (SIGBUS); ddprun's own shared memory does "
                        "not need it",
                        format_bytes(*host.shm_size)),
            "docker run --shm-size=8g (or --ipc=host); podman the same; mount -o remount,size=8g /dev/shm");
    } else if (host.shm_free && *host.shm_free < *host.shm_size / 10) {
        add_host(rows, Severity::Warning, "/dev/shm",
                 fmt::format("{} free of {}", format_bytes(*host.shm_free), format_bytes(*host.shm_size)),
                 "remove what earlier jobs have left in /dev/shm");
    } else {
        add_host(rows, Severity::Ok, "/dev/shm",
                 fmt::format("{} free of {}", format_bytes(host.shm_free.value_or(0)),
                             format_bytes(*host.shm_size)));
    }
}

std::string amount(const std::optional<std::uint64_t>& value, bool is_bytes) {
    if (!value) return "unlimited";
    return is_bytes ? format_bytes(*value) : fmt::format("{}", *value);
}

std::string in_capitals(std::string text) {
    for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    return text;
}

void judge_limit(Rows& rows, const char* subject, const Limit& limit, std::uint64_t enough, bool is_bytes,
                 const char* why, const char* letter, Severity severity = Severity::Warning) {
    const std::string text =
        fmt::format("{} (hard {})", amount(limit.soft, is_bytes), amount(limit.hard, is_bytes));
    const bool low = limit.soft && *limit.soft < enough;
    if (!low) return add_host(rows, Severity::Ok, subject, text);
    const bool can_raise = !limit.hard || *limit.hard >= enough;
    add_host(rows, severity, subject, fmt::format("{}: {}", text, why),
             can_raise ? fmt::format("ulimit -{} {}", letter,
                                     limit.hard && !is_bytes ? fmt::format("{}", *limit.hard)
                                     : is_bytes              ? "unlimited"
                                                             : fmt::format("{}", enough))
                       : fmt::format("raise the hard limit ({0} in /etc/security/limits.conf, Limit{1}= of a "
                                     "systemd service, docker run --ulimit {0}=...)",
                                     subject, in_capitals(subject)));
}

void judge_limits(const HostFacts& host, bool has_rdma, Rows& rows) {
    judge_limit(rows, "memlock", host.memlock, kEnoughLocked, true,
                "too little for RDMA (InfiniBand, Slingshot, GPUDirect)", "l",
                has_rdma ? Severity::Warning : Severity::Note);
    judge_limit(rows, "nofile", host.open_files, kEnoughFiles, false,
                "too few for many workers with data loaders", "n");
    judge_limit(rows, "nproc", host.processes, kEnoughProcesses, false, "too few for threads of many workers",
                "u");
    judge_limit(rows, "stack", host.stack, kSmallStack, true,
                "deep recursion and OpenMP threads may overflow it", "s");
    const bool no_core = host.core.soft && *host.core.soft == 0;
    add_host(rows, Severity::Ok, "core",
             no_core
                 ? "0: a crash leaves no core file (ulimit -c unlimited; the report has its stack trace all "
                   "the same)"
                 : fmt::format("{}, to {}", amount(host.core.soft, true), host.core_pattern));
}

void judge_cgroup(const HostFacts& host, Rows& rows) {
    const CgroupFacts& cgroup = host.cgroup;
    if (cgroup.version == 0) return add_host(rows, Severity::Ok, "cgroup", "none");
    std::vector<std::string> limits;
    if (cgroup.memory_limit)
        limits.push_back(fmt::format(
            "memory {}{}", format_bytes(*cgroup.memory_limit),
            cgroup.memory_used ? fmt::format(" ({} used)", format_bytes(*cgroup.memory_used)) : ""));
    if (cgroup.pids_limit) limits.push_back(fmt::format("{} processes and threads", *cgroup.pids_limit));
    const std::optional<double> quota = host.machine.quota;
    if (quota) limits.push_back(fmt::format("{:.1f} CPUs", *quota));
    add_host(
        rows, Severity::Ok, "cgroup",
        fmt::format("version {}: {}", cgroup.version, limits.empty() ? "no limits" : join(limits, ", ")));
    if (cgroup.memory_limit && *cgroup.memory_limit < kGiB)
        add_host(
            rows, Severity::Warning, "cgroup memory",
            fmt::format("only {}: workers will be killed for want of it", format_bytes(*cgroup.memory_limit)),
            "ask the scheduler or container for more (docker run --memory, sbatch --mem)");
    if (cgroup.pids_limit && *cgroup.pids_limit < kEnoughPids)
        add_host(rows, Severity::Warning, "cgroup pids",
                 fmt::format("only {} processes and threads", *cgroup.pids_limit),
                 "docker run --pids-limit -1");
    if (quota && *quota + 0.5 < host.machine.cpus)
        add_host(
            rows, Severity::Warning, "cgroup cpu",
            fmt::format(
                "{:.1f} CPUs of quota, {} CPUs visible: workers that count CPUs start too many threads",
                *quota, host.machine.cpus),
            "ddprun itself sets OMP_NUM_THREADS by the quota; for others docker run --cpuset-cpus in place "
            "of --cpus");
}

void judge_clock(const HostFacts& host, Rows& rows) {
    const ClockFacts& clock = host.clock;
    if (clock.unix_seconds < kYear2024) {
        add_host(rows, Severity::Error, "clock",
                 "shows a year before 2024: certificates, builds and logs go wrong",
                 "set it (chronyc makestep, timedatectl)");
    } else if (clock.synchronised && !*clock.synchronised) {
        add_host(rows, Severity::Note, "clock",
                 "not synchronised, says the kernel: times of several nodes cannot be compared",
                 "start chronyd or ntpd (on the host, for a container)");
    } else {
        add_host(rows, Severity::Ok, "clock",
                 clock.synchronised ? "synchronised" : "the kernel does not say whether it is synchronised");
    }
    const bool slow = clock.source == "hpet" || clock.source == "acpi_pm" || clock.source == "jiffies";
    add_host(rows, slow ? Severity::Warning : Severity::Ok, "clock source",
             slow ? fmt::format("{}: reading the time is a hundred times slower than with tsc", clock.source)
             : clock.source.empty() ? "not known"
                                    : clock.source,
             slow ? "dmesg | grep -i tsc says why; clocksource=tsc on the kernel's command line" : "");
}

void judge_ptrace(const HostFacts& host, Rows& rows) {
    if (!host.ptrace_scope) return add_host(rows, Severity::Ok, "ptrace", "not restricted by Yama");
    const int scope = *host.ptrace_scope;
    if (scope == 0 || (scope < 3 && host.may_ptrace))
        return add_host(rows, Severity::Ok, "ptrace", fmt::format("allowed (ptrace_scope {})", scope));
    add_host(
        rows, Severity::Note, "ptrace",
        fmt::format("restricted (ptrace_scope {}): ddprun stacks shows only workers that link libddp", scope),
        scope == 1 ? "sysctl kernel.yama.ptrace_scope=0 for py-spy and gdb"
                   : "an administrator must set kernel.yama.ptrace_scope=0");
}

}  // namespace

std::vector<Finding> judge_host(const HostFacts& host, bool has_rdma) {
    Rows rows;
    add_host(rows, Severity::Ok, "host", fmt::format("{}, {}", host.name, host.kernel));
    judge_cpus(host, rows);
    judge_memory(host, rows);
    judge_limits(host, has_rdma, rows);
    judge_cgroup(host, rows);
    judge_clock(host, rows);
    judge_ptrace(host, rows);
    return rows;
}

std::vector<Finding> judge(const Facts& facts) {
    std::vector<Finding> rows;
    const bool has_rdma = !facts.network.ports.empty() || has_slingshot(facts.network);
    for (std::vector<Finding> part :
         {judge_host(facts.host, has_rdma), judge_gpus(facts.nvidia, facts.visible_devices),
          judge_variables(facts.variables), judge_network(facts.network, facts.variables),
          judge_trial(facts.trial)}) {
        for (Finding& finding : part) rows.push_back(std::move(finding));
    }
    return rows;
}

/// Warns of variables that slow a job down, which people set to find an error and then forget.
std::vector<Finding> judge_variables(const Variables& variables) {
    struct Trap {
        const char* name;
        const char* value;  ///< "" any
        const char* why;
    };
    constexpr Trap kTraps[] = {
        {"CUDA_LAUNCH_BLOCKING", "1", "every kernel waits for the one before it: for debugging only"},
        {"NCCL_P2P_DISABLE", "1", "GPUs exchange data through the host: many times slower"},
        {"NCCL_SHM_DISABLE", "1", "ranks of one node talk over the network"},
        {"NCCL_IB_DISABLE", "1", "InfiniBand is not used"},
        {"NCCL_NET_GDR_LEVEL", "0", "GPUDirect RDMA is not used"},
        {"NCCL_DEBUG", "TRACE", "every NCCL call is logged: slow"},
        {"NCCL_ALGO", "", "NCCL may not choose its algorithm"},
        {"NCCL_PROTO", "", "NCCL may not choose its protocol"},
    };
    std::vector<Finding> rows;
    const auto add = [&rows](Severity severity, std::string what, std::string remedy) {
        rows.push_back({severity, "Variables", "variable", std::move(what), std::move(remedy)});
    };
    for (const auto& [name, value] : variables) {
        const auto trap =
            std::find_if(std::begin(kTraps), std::end(kTraps), [&n = name, &v = value](const Trap& one) {
                return n == one.name && (one.value[0] == '\0' || v == one.value);
            });
        if (trap == std::end(kTraps)) add(Severity::Ok, fmt::format("{}={}", name, value), "");
        else
            add(Severity::Warning, fmt::format("{}={}: {}", name, value, trap->why),
                fmt::format("unset {}", name));
    }
    return rows;
}

}  // namespace ddprun::doctor
