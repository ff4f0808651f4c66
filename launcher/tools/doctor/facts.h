#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "launcher/machine/fabric/network.h"
#include "launcher/machine/gpu/gpu_facts.h"
#include "launcher/machine/machine.h"

namespace ddprun::doctor {

/// A soft and a hard limit; nullopt is unlimited.
struct Limit {
    std::optional<std::uint64_t> soft, hard;
};

/// The limits of a cgroup; nullopt is unlimited, or not known.
struct CgroupFacts {
    int version = 0;  ///< 2, 1, or 0: none
    std::optional<std::uint64_t> memory_limit, memory_used;
    std::optional<std::uint64_t> pids_limit, pids_used;
};

struct ClockFacts {
    std::string source;                ///< "tsc"
    bool has_tsc = true;               ///< the kernel offers a tsc
    std::optional<bool> synchronised;  ///< by NTP or PTP, by the kernel's flag
    std::int64_t unix_seconds = 0;
};

struct HostFacts {
    std::string name, kernel, cpu_model;
    Machine machine;
    std::uint64_t memory_total = 0, memory_available = 0;
    std::optional<std::uint64_t> shm_size, shm_free;
    Limit memlock, open_files, processes, stack, core;
    bool is_root = false;
    CgroupFacts cgroup;
    ClockFacts clock;
    std::optional<int> ptrace_scope;
    bool may_ptrace = false;  ///< CAP_SYS_PTRACE
    std::string governor;     ///< of the first CPU: "performance"
    std::string core_pattern;
};

/// The variables NCCL_*, CUDA_*, UCX_*, FI_* and the like that are set, by name.
using Variables = std::vector<std::pair<std::string, std::string>>;

/// The result of the all-reduce.
struct TrialFacts {
    enum class State : std::uint8_t { NotAsked, Failed, Done } state = State::NotAsked;
    std::string command;   ///< as a user would type it
    std::string problem;   ///< why it Failed: the last lines of the job
    std::string why_cpus;  ///< why it ran on the CPUs despite GPUs; "" it did not
    int exit_code = 0;
    // The rest is valid when Done.
    int workers = 0;
    std::string backend;
    std::uint64_t bytes = 0;
    std::uint64_t rounds = 0;
    double seconds = 0;                   ///< of all rounds
    double bus_gigabytes_per_second = 0;  ///< per worker, as nccl-tests counts
    Duration start{};                     ///< time from our start to the first all-reduce
};

struct Facts {
    HostFacts host;
    NvidiaFacts nvidia;
    std::optional<std::string> visible_devices;  ///< CUDA_VISIBLE_DEVICES
    NetworkFacts network;
    Variables variables;
    TrialFacts trial;
};

}  // namespace ddprun::doctor
