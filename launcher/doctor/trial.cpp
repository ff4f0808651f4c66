#include "launcher/doctor/trial.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "env/json.h"
#include "env/os/system.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddprun::doctor {
namespace {

constexpr int kMostCpuWorkers = 64;
constexpr Duration kTrialPatience =
    std::chrono::seconds(60);  ///< for the job; CUDA contexts of many GPUs take their time
constexpr Duration kGrace = std::chrono::seconds(10);  ///< between asking it to end and killing it
constexpr std::size_t kMaxOutput = 1 << 20;
constexpr std::string_view kResultMark = "{\"allreduce_check\":";
constexpr std::size_t kShownLines = 3;

std::vector<std::string> child_environment(const TrialPlan& plan) {
    // Ours first: of two equal names the first counts.
    std::vector<std::string> all = plan.environment;
    // The user's defaults for jobs are not meant for this one.
    for (std::string& one : os::own_environment()) {
        if (!one.starts_with("PET_")) all.push_back(std::move(one));
    }
    return all;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
    std::vector<char*> all;
    for (std::string& word : words) all.push_back(word.data());
    all.push_back(nullptr);
    return all;
}

/// Starts ddprun with its output in `out`. -1: it could not be started.
pid_t start(const TrialPlan& plan, int out) {
    std::vector<std::string> words = {"ddprun"};
    words.insert(words.end(), plan.arguments.begin(), plan.arguments.end());
    std::vector<std::string> environment = child_environment(plan);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, out, 1);
    ::posix_spawn_file_actions_adddup2(&actions, out, 2);
    pid_t child = -1;
    const int failed = ::posix_spawn(&child, "/proc/self/exe", &actions, nullptr, pointers(words).data(),
                                     pointers(environment).data());
    ::posix_spawn_file_actions_destroy(&actions);
    return failed == 0 ? child : -1;
}

/// Reads until the end of file; false when the deadline came first.
bool read_until(int fd, TimePoint deadline, std::string& text) {
    char block[4096];
    for (;;) {
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - MonotonicClock::now()).count();
        pollfd ready{fd, POLLIN, 0};
        if (left <= 0) return false;
        if (::poll(&ready, 1, static_cast<int>(left)) <= 0) continue;
        const ssize_t n = ::read(fd, block, sizeof block);
        if (n <= 0) return true;
        if (text.size() < kMaxOutput) text.append(block, static_cast<std::size_t>(n));
    }
}

int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

/// What the workers wrote, else what ddprun wrote.
std::string telling_lines(std::string_view output) {
    std::vector<std::string> workers, ours;
    for (const std::string_view line : split(output, '\n')) {
        const std::string text(trim(line));
        if (!text.empty()) (text.starts_with('[') ? workers : ours).push_back(text);
    }
    std::vector<std::string>& lines = workers.empty() ? ours : workers;
    if (lines.size() > kShownLines) lines.resize(kShownLines);
    return lines.empty() ? "it wrote nothing" : join(lines, "; ");
}

}  // namespace

TrialPlan plan_trial(const HostFacts& host, const NvidiaFacts& nvidia, int visible_gpus,
                     const TrialSize& size) {
    TrialPlan plan;
    const bool broken = std::any_of(nvidia.gpus.begin(), nvidia.gpus.end(),
                                    [](const GpuFacts& gpu) { return !gpu.lost.empty(); });
    plan.on_gpus = visible_gpus > 0 && !broken;
    if (visible_gpus > 0 && broken) plan.why = "a GPU is lost";
    int cpus = host.machine.cpus;
    if (host.cgroup.cpus) cpus = std::min(cpus, static_cast<int>(std::floor(*host.cgroup.cpus)));
    plan.workers = plan.on_gpus ? visible_gpus : std::clamp(cpus, 1, kMostCpuWorkers);
    // A GPU's links show their speed with more.
    const std::string bytes = !size.bytes.empty() ? size.bytes : plan.on_gpus ? "256MiB" : "64MiB";
    plan.arguments = {"--standalone", "--quiet",         fmt::format("--nproc-per-node={}", plan.workers),
                      "--no-python",  "allreduce-check", "--seconds",
                      size.seconds,   "--bytes",         bytes,
                      "--json"};
    // By which lines of the workers are told from ddprun's, also where there is one worker.
    plan.environment = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${rank}]: "};
    if (!plan.on_gpus) return plan;
    // NCCL by name: libddp's own choice would go through the host where it sees fewer devices than NVML does.
    plan.arguments.insert(plan.arguments.end(), {"--device", "cuda", "--backend", "nccl"});
    return plan;
}

TrialFacts read_trial(std::string_view output, int exit_code, std::int64_t started_at_ns) {
    TrialFacts facts;
    facts.exit_code = exit_code;
    const std::size_t at = output.find(kResultMark);
    const std::string_view line =
        at == std::string_view::npos ? "" : output.substr(at, output.find('\n', at) - at);
    const std::optional<Json> result = parse_json_object(line);
    if (exit_code != 0 || !result) {
        facts.state = TrialFacts::State::Failed;
        facts.problem = telling_lines(output);
        return facts;
    }
    facts.state = TrialFacts::State::Done;
    std::int64_t first_at_ns = 0;
    take(*result, "workers", facts.workers);
    take(*result, "backend", facts.backend);
    take(*result, "bytes", facts.bytes);
    take(*result, "rounds", facts.rounds);
    take(*result, "seconds", facts.seconds);
    take(*result, "bus_gigabytes_per_second", facts.bus_gigabytes_per_second);
    take(*result, "first_at_ns", first_at_ns);
    facts.start = Duration(first_at_ns - started_at_ns);
    return facts;
}

TrialFacts run_trial(const TrialPlan& plan) {
    TrialFacts facts;
    facts.state = TrialFacts::State::Failed;
    facts.exit_code = 70;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
        facts.problem = Error::system("pipe").what;
        return facts;
    }
    const UniqueFd in(ends[0]);
    UniqueFd out(ends[1]);
    const TimePoint started = MonotonicClock::now();
    const pid_t child = start(plan, out.get());
    out.reset();
    if (child < 0) {
        facts.problem = "ddprun could not be started again";
        return facts;
    }
    std::string output;
    const bool ended = read_until(in.get(), deadline_after(started, kTrialPatience), output);
    if (!ended) {
        ::kill(child, SIGTERM);
        if (!read_until(in.get(), deadline_after(MonotonicClock::now(), kGrace), output))
            ::kill(child, SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    facts = read_trial(output, exit_code_of(status), started.time_since_epoch().count());
    if (!ended)
        facts.problem =
            fmt::format("it did not end within {}; {}", format_duration(kTrialPatience), facts.problem);
    facts.why_cpus = plan.why;
    facts.command = "ddprun " + join(plan.arguments, " ");
    return facts;
}

}  // namespace ddprun::doctor
