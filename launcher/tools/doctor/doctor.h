#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "launcher/machine/fabric/network.h"
#include "launcher/machine/gpu/gpu_facts.h"
#include "launcher/machine/gpu/gpu_health.h"
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

/// Reads this machine. A fact that cannot be read keeps its default. Both calls together take about ten
/// milliseconds.
HostFacts collect_host();
Variables collect_variables();

/// The parts of judge(), each for one section of the report. Pure.
std::vector<Finding> judge_host(const HostFacts& host, bool has_rdma);
std::vector<Finding> judge_gpus(const NvidiaFacts& nvidia, const std::optional<std::string>& visible_devices);
std::vector<Finding> judge_variables(const Variables& variables);
std::vector<Finding> judge_network(const NetworkFacts& network, const Variables& variables);
std::vector<Finding> judge_trial(const TrialFacts& trial);

/// All findings, section by section, in the order of the report. Pure.
std::vector<Finding> judge(const Facts& facts);

/// The user's choices for the trial, a short all-reduce that runs as a real job of this ddprun.
struct TrialSize {
    std::string seconds = "2";
    std::string bytes;  ///< "" the device's default
};

struct TrialPlan {
    int workers = 1;
    bool on_gpus = false;
    std::vector<std::string> arguments;    ///< of ddprun
    std::vector<std::string> environment;  ///< "NAME=value", added to ours
    std::string why;                       ///< why it uses the CPUs despite GPUs; "" it does not
};

/// Plans one worker per visible GPU, with NCCL. When there is no GPU, or one is lost, plans one worker per
/// CPU of our quota. Pure.
TrialPlan plan_trial(const HostFacts& host, const NvidiaFacts& nvidia, int visible_gpus,
                     const TrialSize& size = {});

/// Runs the trial, for a minute at most. An error becomes a part of the facts.
TrialFacts run_trial(const TrialPlan& plan);

/// The facts from the job's output and exit code. `started_at_ns` is on the steady clock. Pure.
TrialFacts read_trial(std::string_view output, int exit_code, std::int64_t started_at_ns);

struct TextStyle {
    bool color = false;
    std::optional<std::size_t> width{};  ///< columns of the terminal; nullopt (no terminal): do not wrap
};

/// "ok", "note", "warning", "error".
const char* name_of(Severity severity);
/// A table by sections, and a line with the counts. Pure.
std::string render_text(const std::vector<Finding>& findings, const TextStyle& style);
/// One JSON object with the findings and the facts they come from. Documented in docs/doctor.md. Pure.
std::string render_json(const Facts& facts, const std::vector<Finding>& findings);

/// The options of `ddprun doctor`.
struct Options {
    bool json = false;  ///< --json
    bool run = true;    ///< false with --no-run
    TrialSize size{};   ///< --seconds, --bytes
};

/// `ddprun doctor`: examines this machine, tries an all-reduce, and prints what is wrong and what to set.
/// Returns the exit code: 0, or 1 when a finding is an error (a warning is none).
int run(const Options& options);

}  // namespace ddprun::doctor
