#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/os/system.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/machine/grant.h"

namespace ddprun::doctor {
namespace {

constexpr std::size_t kMaxFile = 1 << 20;

/// A small file of /proc or /sys without the white space around it; "" when it cannot be read.
std::string content_of(const std::string& path) {
    return std::string(trim(read_file(path, kMaxFile).value_or("")));
}

std::optional<std::uint64_t> number_in(const std::string& path) {
    const Result<std::uint64_t> number = parse_uint(content_of(path));
    return number ? std::optional(*number) : std::nullopt;
}

/// The value after "key:" in a file of such lines: /proc/meminfo, /proc/cpuinfo.
std::string field(std::string_view text, std::string_view key) {
    for (const std::string_view line : split(text, '\n')) {
        const std::size_t colon = line.find(':');
        if (colon != std::string_view::npos && trim(line.substr(0, colon)) == key)
            return std::string(trim(line.substr(colon + 1)));
    }
    return "";
}

/// The bytes of "16384 kB".
std::uint64_t kilobytes(const std::string& text) {
    return parse_uint(split(text, ' ').front()).value_or(0) * 1024;
}

Limit limit_of(__rlimit_resource resource) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0) return {};
    const auto value = [](rlim_t number) {
        return number == RLIM_INFINITY ? std::nullopt : std::optional<std::uint64_t>(number);
    };
    return {value(limit.rlim_cur), value(limit.rlim_max)};
}

void read_memory(HostFacts& host) {
    const std::string meminfo = content_of("/proc/meminfo");
    host.memory_total = kilobytes(field(meminfo, "MemTotal"));
    host.memory_available = kilobytes(field(meminfo, "MemAvailable"));
    struct statvfs shm {};
    if (::statvfs("/dev/shm", &shm) != 0) return;
    host.shm_size = std::uint64_t{shm.f_blocks} * shm.f_frsize;
    host.shm_free = std::uint64_t{shm.f_bavail} * shm.f_frsize;
}

std::optional<std::uint64_t> first_number(const CgroupPlaces& places, const char* file) {
    for (const std::string& directory : places.directories) {
        if (const auto number = number_in(fmt::format("{}/{}", directory, file))) return number;
    }
    return std::nullopt;
}

CgroupFacts read_cgroup() {
    CgroupFacts facts;
    const std::string text = content_of("/proc/self/cgroup");
    const CgroupPlaces memory = cgroup_places(text, "memory");
    facts.version = memory.version;
    facts.memory_limit = tightest_limit(memory, memory.version == 2 ? "memory.max" : "memory.limit_in_bytes");
    facts.memory_used =
        first_number(memory, memory.version == 2 ? "memory.current" : "memory.usage_in_bytes");
    const CgroupPlaces pids = cgroup_places(text, "pids");
    facts.pids_limit = tightest_limit(pids, "pids.max");
    facts.pids_used = first_number(pids, "pids.current");
    return facts;
}

ClockFacts read_clock() {
    ClockFacts clock;
    const std::string directory = "/sys/devices/system/clocksource/clocksource0/";
    clock.source = content_of(directory + "current_clocksource");
    clock.has_tsc = content_of(directory + "available_clocksource").find("tsc") != std::string::npos;
    timex state{};
    const int answer = ::adjtimex(&state);
    if (answer >= 0) clock.synchronised = answer != TIME_ERROR;
    clock.unix_seconds = ::time(nullptr);
    return clock;
}

bool has_capability(unsigned capability) {
    const std::string effective = field(content_of("/proc/self/status"), "CapEff");
    std::uint64_t bits = 0;
    for (const char c : effective)
        bits = bits * 16 + static_cast<std::uint64_t>(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    return (bits >> capability & 1) != 0;
}

bool matters(std::string_view name) {
    for (const std::string_view prefix : {"NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "DDP_", "CUDA_DEVICE_",
                                          "CUDA_LAUNCH_", "CUDA_MODULE_", "CUBLAS_"}) {
        if (name.starts_with(prefix)) return true;
    }
    return name == "LD_PRELOAD";
}

}  // namespace

HostFacts collect_host() {
    HostFacts host;
    host.name = host_name();
    utsname kernel{};
    if (::uname(&kernel) == 0)
        host.kernel = fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine);
    host.cpu_model = field(content_of("/proc/cpuinfo"), "model name");
    Probe probe;
    probe.gpus = Probe::Gpus::No;
    host.machine = detect_machine(process_environment, probe);
    read_memory(host);
    host.memlock = limit_of(RLIMIT_MEMLOCK);
    host.open_files = limit_of(RLIMIT_NOFILE);
    host.processes = limit_of(RLIMIT_NPROC);
    host.stack = limit_of(RLIMIT_STACK);
    host.core = limit_of(RLIMIT_CORE);
    host.is_root = ::geteuid() == 0;
    host.cgroup = read_cgroup();
    host.clock = read_clock();
    if (const auto scope = number_in("/proc/sys/kernel/yama/ptrace_scope"))
        host.ptrace_scope = static_cast<int>(*scope);
    host.may_ptrace = has_capability(CAP_SYS_PTRACE);
    host.governor = content_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    host.core_pattern = content_of("/proc/sys/kernel/core_pattern");
    return host;
}

Variables collect_variables() {
    Variables variables;
    for (const std::string& one : os::own_environment()) {
        const std::string_view text(one);
        const std::size_t equals = text.find('=');
        if (equals != std::string_view::npos && matters(text.substr(0, equals)))
            variables.emplace_back(text.substr(0, equals), text.substr(equals + 1));
    }
    std::sort(variables.begin(), variables.end());
    return variables;
}

}  // namespace ddprun::doctor
