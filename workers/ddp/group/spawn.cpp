#include "ddp/spawn.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/nodes/launcher_env.h"
#include "env/unique_fd.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::TimePoint;
using ddprun::UniqueFd;
using ddprun::WorkerEnv;

constexpr int kMostRanks = 512;
constexpr std::string_view kRunPrefix = "spawn-";  ///< of a world's run id
constexpr std::size_t kMostText = 60'000;          ///< bytes of an error's text: a pipe holds it
// A rank's end is an event on its pipe, unless a process that the rank has forked still holds that pipe.
constexpr std::chrono::milliseconds kLookAgain{100}, kLookAgainSoon{5};

/// The first byte of a rank's report. A lost peer is the consequence of another rank's failure.
constexpr char kDone = 'd', kFailed = 'f', kLostPeer = 'l';

void flush_streams() {
    std::cout.flush(), std::cerr.flush(), std::clog.flush();
    std::fflush(nullptr);
}

std::string report_of(const std::function<void(const Context&)>& fn, const Context& context) {
    try {
        fn(context);
        return {kDone};
    } catch (const PeerLostError& error) {
        return kLostPeer + std::string(error.what());
    } catch (const std::exception& error) {
        return kFailed + std::string(error.what());
    } catch (...) {
        return kFailed + std::string("an exception that is not a std::exception");
    }
}

void write_all(int fd, std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = ::write(fd, text.data(), text.size());
        if (n < 0 && errno != EINTR) return;  // the parent has ended, and so does this process
        if (n > 0) text.remove_prefix(static_cast<std::size_t>(n));
    }
}

/// Makes Context::from_env of this process return the rank's context.
void set_environment(const WorkerEnv& env) {
    for (const ddprun::EnvironmentRow& row : ddprun::environment_contract()) {
        if (row.name.starts_with("DDPRUN_") || row.name.starts_with("TORCHELASTIC_"))
            ::unsetenv(std::string(row.name).c_str());
    }
    for (const auto& [name, value] : ddprun::to_environment(env)) ::setenv(name.c_str(), value.c_str(), 1);
}

[[noreturn]] void run_rank(const std::function<void(const Context&)>& fn, const WorkerEnv& env, pid_t parent,
                           int report) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);  // the parent ended before that call
    set_environment(env);
    std::string text =
        report_of(fn, Context(env, fmt::format("launcher=spawn rank {}/{}", env.rank, env.world_size)));
    flush_streams();
    text.resize(std::min(text.size(), kMostText));
    write_all(report, text);
    ::_exit(text.front() == kDone ? 0 : 1);
}

struct Failure {
    int rank = 0;
    std::string what;
    bool is_consequence = false;
};

std::string how_it_ended(int status) {
    if (WIFSIGNALED(status))
        return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
    return fmt::format("exited with code {}", WEXITSTATUS(status));
}

/// A rank's failure, from its report, and from its exit status, which is lost where SIGCHLD is ignored.
std::optional<Failure> failure_of(int rank, const std::string& report, std::optional<int> status) {
    const std::string name = fmt::format("rank {}", rank);
    if (report.empty()) {
        if (status == 0) return std::nullopt;
        if (status) return Failure{rank, name + " " + how_it_ended(*status), false};
        return Failure{rank, name + " ended before its function returned (this process ignores SIGCHLD)",
                       false};
    }
    if (report.front() == kDone) return std::nullopt;
    const std::string what = report.substr(1);
    const bool has_name = what.starts_with(name + ":") || what.starts_with(name + " ");
    return Failure{rank, has_name ? what : name + ": " + what, report.front() == kLostPeer};
}

/// One rank's process, until it is reaped.
struct Process {
    int rank = 0;
    pid_t pid = 0;
    UniqueFd pipe;  ///< none once all writers have closed it
    std::string report;

    void read_report() {
        std::array<char, 4096> part;
        for (ssize_t n = 1; pipe && n > 0;) {
            n = ::read(pipe.get(), part.data(), part.size());
            if (n > 0 && report.size() <= kMostText) report.append(part.data(), static_cast<std::size_t>(n));
            if (n == 0) pipe.reset();
        }
    }
};

/// The ranks that have not ended. The destructor kills and reaps them.
class Processes {
  public:
    Processes() = default;
    ~Processes() {
        signal_all(SIGKILL);
        for (const Process& one : alive_) ::waitpid(one.pid, nullptr, 0);
    }
    Processes(const Processes&) = delete;
    Processes& operator=(const Processes&) = delete;

    void start(const std::function<void(const Context&)>& fn, const WorkerEnv& env) {
        std::array<int, 2> ends{};
        if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_system(env.rank, "pipe2");
        UniqueFd read(ends[0]);
        const UniqueFd write(ends[1]);
        ::fcntl(read.get(), F_SETFL, O_NONBLOCK);
        alive_.reserve(alive_.size() + 1);
        const pid_t parent = ::getpid(), pid = ::fork();
        if (pid < 0) throw_system(env.rank, "fork");
        if (pid == 0) {
            for (Process& sibling : alive_) sibling.pipe.reset();
            read.reset();
            run_rank(fn, env, parent, write.get());
        }
        alive_.push_back({.rank = env.rank, .pid = pid, .pipe = std::move(read), .report = {}});
    }

    [[nodiscard]] bool any() const { return !alive_.empty(); }
    void signal_all(int signal) const {
        for (const Process& one : alive_) ::kill(one.pid, signal);
    }

    /// Waits for news of a rank, or until the deadline; reaps the ranks that have ended. Returns the failures
    /// of these, by rank.
    std::vector<Failure> wait(std::optional<TimePoint> deadline = std::nullopt) {
        wait_for_news(deadline);
        std::vector<Failure> failures;
        std::erase_if(alive_, [&](Process& one) {
            const std::optional<std::optional<int>> ended = reap(one);
            if (!ended) return false;
            if (std::optional<Failure> failure = failure_of(one.rank, one.report, *ended))
                failures.push_back(*std::move(failure));
            return true;
        });
        return failures;
    }

  private:
    [[noreturn]] static void throw_system(int rank, const char* attempt) {
        throw Error(fmt::format("spawn: starting rank {}: {}: {}", rank, attempt, std::strerror(errno)));
    }

    void wait_for_news(std::optional<TimePoint> deadline) const {
        auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(kLookAgain);
        std::vector<pollfd> pipes;
        for (const Process& one : alive_) {
            if (one.pipe) pipes.push_back({.fd = one.pipe.get(), .events = POLLIN, .revents = 0});
            else slice = kLookAgainSoon;
        }
        if (deadline) slice = std::clamp(*deadline - MonotonicClock::now(), slice.zero(), slice);
        ::poll(pipes.data(), pipes.size(),
               static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(slice).count()));
    }

    /// The exit status (none: lost) of a process that has ended; nullopt while it runs.
    static std::optional<std::optional<int>> reap(Process& one) {
        one.read_report();
        // A rank that has reported and closed its pipe calls nothing but _exit.
        const bool is_ending = !one.pipe && !one.report.empty();
        int status = 0;
        pid_t ended = 0;
        do ended = ::waitpid(one.pid, &status, is_ending ? 0 : WNOHANG);
        while (ended < 0 && errno == EINTR);
        if (ended == 0) return std::nullopt;
        one.read_report();
        return ended == one.pid ? std::optional(status) : std::optional<int>();
    }

    std::vector<Process> alive_;
};

/// The program that made this process a rank. ddprun's and spawn's ranks have torchrun's variables too.
std::string starter_of(const ddprun::LauncherChoice& launcher) {
    const auto value_of = [](const char* name) { return ddprun::process_environment(name).value_or(""); };
    if (value_of("DDPRUN_GENERATION").empty()) return launcher.explanation;
    return fmt::format("rank {} of {} under {}", value_of("RANK"), value_of("WORLD_SIZE"),
                       value_of("TORCHELASTIC_RUN_ID").starts_with(kRunPrefix) ? "another spawn" : "ddprun");
}

void check(const std::function<void(const Context&)>& fn, int ranks, const SpawnOptions& options) {
    if (!fn) throw InvalidInput("spawn: the function is empty");
    if (ranks < 1 || ranks > kMostRanks)
        throw InvalidInput(fmt::format("spawn: {} ranks; 1 to {} are possible", ranks, kMostRanks));
    if (options.grace < options.grace.zero())
        throw InvalidInput(fmt::format("spawn: a grace of {} ns; at least 0", options.grace.count()));
    const ddprun::Result<ddprun::LauncherChoice> launcher =
        ddprun::choose_launcher(ddprun::process_environment);
    if (launcher && launcher->placement && launcher->placement->size.value_or(1) > 1) {
        throw InvalidInput(fmt::format(
            "spawn: this process is a rank itself ({}): every rank would make a world of its own; use "
            "Context::from_env, or start one process",
            starter_of(*launcher)));
    }
}

/// The contract's variables that are set, such as MASTER_PORT, and a world of this host.
WorkerEnv world_of(int ranks, int segment) {
    ddprun::Result<WorkerEnv> given = ddprun::worker_env_from(ddprun::process_environment);
    if (!given) throw InvalidInput("spawn: reading the environment: " + given.error().what);
    WorkerEnv world;
    world.master_addr = given->master_addr;
    world.master_port = given->master_port;
    world.world_size = world.local_world_size = world.role_world_size = ranks;
    world.run_id = fmt::format("{}{}", kRunPrefix, ::getpid());
    world.segment_fd = segment;
    return world;
}

/// The failure that caused the others, as far as they are known.
const Failure& cause_of(const std::vector<Failure>& failures) {
    const auto cause = std::ranges::find_if(failures, [](const Failure& one) { return !one.is_consequence; });
    return cause != failures.end() ? *cause : failures.front();
}

}  // namespace

void spawn(const std::function<void(const Context&)>& fn, int ranks, const SpawnOptions& options) {
    check(fn, ranks, options);
    const auto size = static_cast<std::uint32_t>(ranks);
    SegmentMap segment(make_segment({.local_world_size = size, .world_size = size}));
    WorkerEnv env = world_of(ranks, segment.descriptor());
    flush_streams();  // or every rank would write what is buffered
    Processes processes;
    for (int rank = 0; rank < ranks; ++rank) {
        env.rank = env.local_rank = env.role_rank = rank;
        processes.start(fn, env);
    }
    std::vector<Failure> failures;
    while (processes.any() && failures.empty()) failures = processes.wait();
    if (failures.empty()) return;
    // A rank that has lost its peer may be seen first.
    for (Failure& other : processes.wait(MonotonicClock::now())) failures.push_back(std::move(other));
    segment.header().aborted.store(1 + static_cast<std::uint32_t>(cause_of(failures).rank));
    processes.signal_all(SIGTERM);
    const TimePoint deadline = ddprun::deadline_after(MonotonicClock::now(), options.grace);
    while (processes.any() && MonotonicClock::now() < deadline) static_cast<void>(processes.wait(deadline));
    processes.signal_all(SIGKILL);
    while (processes.any()) static_cast<void>(processes.wait());
    throw SpawnError(cause_of(failures).rank, cause_of(failures).what);
}

}  // namespace ddp
