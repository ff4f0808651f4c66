// Faults against recovery in place: every run has to end with the digest of an undisturbed one, or with the
// refusal that is stated for the fault.
//   campaign KILLS RUNS    KILLS random SIGKILLs of train's ranks, and RUNS runs of each other fault
#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "env/kept.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "tests/support/comes.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/campaign.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;

/// A number in the environment of a process; -1 when it has ended.
int number_in(pid_t pid, std::string_view name) {
    const std::string all = content_of(fmt::format("/proc/{}/environ", pid));
    for (const std::string_view one : split(all, '\0')) {
        if (one.starts_with(name) && one.substr(name.size()).starts_with('='))
            return std::atoi(std::string(one.substr(name.size() + 1)).c_str());
    }
    return -1;
}

/// The kept memory of a job on one node, by a worker's descriptor.
class KeptLines {
  public:
    KeptLines(pid_t worker, int workers) : workers_(workers) {
        const UniqueFd fd(
            ::open(fmt::format("/proc/{}/fd/{}", worker, number_in(worker, "DDPRUN_KEPT_FD")).c_str(),
                   O_RDONLY | O_CLOEXEC));
        const std::size_t bytes = kept_slots_offset(static_cast<std::uint32_t>(workers));
        if (fd) base_ = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    }
    ~KeptLines() {
        if (base_ != MAP_FAILED) ::munmap(base_, kept_slots_offset(static_cast<std::uint32_t>(workers_)));
    }
    KeptLines(const KeptLines&) = delete;
    KeptLines& operator=(const KeptLines&) = delete;
    /// The generation in which all ranks have committed.
    [[nodiscard]] std::uint64_t generation() const {
        std::uint64_t least = base_ == MAP_FAILED ? 0 : ~std::uint64_t{0};
        for (int i = 0; i < workers_ && base_ != MAP_FAILED; ++i)
            least = std::min(least, line(i).generation.load());
        return least;
    }

  private:
    [[nodiscard]] const KeptLine& line(int i) const {
        return reinterpret_cast<const KeptLine*>(static_cast<const char*>(base_) + kKeptLinesOffset)[i];
    }
    int workers_;
    void* base_ = MAP_FAILED;
};

std::vector<std::string> train_command(const std::string& directory) {
    return {path_of("TRAIN"),         "--device=cpu",     "--data=synthetic:6000,32,10",
            "--hidden=256",           "--epochs=60",      "--batch-size=32",
            "--optimizer=adamw",      "--clip=1",         "--schedule=cosine",
            "--checkpoint-every=100", "--checkpoint-dir", directory};
}

std::vector<std::string> under_ddprun(int ranks, std::vector<std::string> options,
                                      const std::vector<std::string>& program) {
    options.insert(options.begin(), {path_of("DDPRUN"), fmt::format("--nproc-per-node={}", ranks)});
    options.insert(options.end(), program.begin(), program.end());
    return options;
}

/// A job whose errors go to a file, which is read while it runs.
class Job {
  public:
    Job(const std::string& directory, const std::vector<std::string>& command)
        : errors_(directory + "/errors"),
          program_(with_errors_in(errors_, command), with_environment({"LOGLEVEL=debug"})) {}

    [[nodiscard]] std::string errors() const { return content_of(errors_); }
    [[nodiscard]] int recoveries() const { return occurrences(errors(), "recovered after "); }
    /// How many recoveries in a row came no step further. ddprun gives up after some.
    [[nodiscard]] int stuck_recoveries() const {
        constexpr std::string_view kStep = "at step ";
        const std::string all = errors();
        int same = 0;
        std::string last;
        for (const std::string_view line : split(all, '\n')) {
            const std::size_t at = line.find(kStep);
            if (at == line.npos) continue;
            same = line.substr(at) == last ? same + 1 : 0;
            last = line.substr(at);
        }
        return same;
    }
    /// Its workers by rank.
    [[nodiscard]] std::map<int, pid_t> workers() const {
        std::map<int, pid_t> all;
        for (const pid_t pid : children_named(program_.pid(), "train")) all[number_in(pid, "RANK")] = pid;
        all.erase(-1);
        return all;
    }
    [[nodiscard]] bool has_ended() const {
        siginfo_t ended{};
        return ::waitid(P_PID, static_cast<id_t>(program_.pid()), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
               ended.si_pid != 0;
    }
    /// Waits until all ranks train, and returns them.
    std::map<int, pid_t> training_workers() {
        program_.wait_for_output("epoch ");
        return workers();
    }
    Program& program() { return program_; }

  private:
    static std::vector<std::string> with_errors_in(const std::string& path,
                                                   std::vector<std::string> command) {
        command.insert(command.begin(), {"/bin/sh", "-c", "exec \"$@\" 2>'" + path + "'", "sh"});
        return command;
    }
    std::string errors_;
    Program program_;
};

/// Seconds since midnight (UTC), by the clock of --events.
double seconds_of_day() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::fmod(std::chrono::duration<double>(now).count(), 86400);
}

/// Times of recoveries in milliseconds, by part.
class Parts {
  public:
    /// Looks up what happened after a kill in the job's events and log.
    void note(double killed, double first_step, std::uint64_t generation, const std::string& events,
              const std::string& log) {
        const double seen = time_of("worker_exited", killed, events);
        const double spawned = time_of("worker_started", killed, events);
        const double joined = time_of("recovered", killed, events);
        if (seen < 0 || spawned < seen || joined < spawned) return;
        add(kSeen, seen - killed);
        if (const double let_go = last_let_go(generation, log); let_go >= 0) add(kLetGo, let_go);
        add(kSpawned, spawned - seen);
        add(kJoined, joined - spawned);
        add(kAllJoined, joined - killed);
        if (first_step >= 0) add(kFirstStep, first_step - killed);
    }
    void print() const {
        fmt::print("{:<44} {:>7} {:>9} {:>9}\n", "recovery with 8 ranks, by part", "kills", "p50", "p99");
        for (std::size_t part = 0; part < kParts; ++part) {
            std::vector<double> all = seconds_[part];
            if (all.empty()) continue;
            std::sort(all.begin(), all.end());
            const auto at = [&](std::size_t percent) { return 1000 * all[(all.size() - 1) * percent / 100]; };
            fmt::print("{:<44} {:>7} {:>6.1f} ms {:>6.1f} ms\n", kNames[part], all.size(), at(50), at(99));
        }
    }

  private:
    enum Part : std::uint8_t { kSeen, kLetGo, kSpawned, kJoined, kAllJoined, kFirstStep, kParts };
    static constexpr const char* kNames[kParts] = {"death seen",
                                                   "survivors told to last one's let go",
                                                   "death seen to replacement spawned",
                                                   "spawned to all joined (start, transfer)",
                                                   "kill to all joined",
                                                   "kill to first step of all ranks"};
    void add(Part part, double seconds) { seconds_[part].push_back(seconds); }

    /// The first event of this name after `since`, in seconds since midnight; -1: none.
    static double time_of(const std::string& event, double since, const std::string& events) {
        for (const std::string_view line : split(events, '\n')) {
            if (line.find("\"event\":\"" + event + '"') == line.npos) continue;
            const std::size_t at = line.find("\"time\":\"");
            if (at == line.npos) continue;
            const std::string time(line.substr(at + 8, 27));  // 2026-11-24T02:54:28.123456Z
            const double seconds = 3600 * std::atof(time.substr(11).c_str()) +
                                   60 * std::atof(time.substr(14).c_str()) +
                                   std::atof(time.substr(17).c_str());
            if (seconds >= since) return seconds;
        }
        return -1;
    }
    /// "rank 3 has left generation 2 at step 812, 9 ms after it was told: ...", of the slowest rank.
    static double last_let_go(std::uint64_t generation, const std::string& log) {
        const std::regex line(
            fmt::format("left generation {} at step \\d+, (\\d+) (us|ms) after", generation));
        double last = -1;
        for (std::sregex_iterator it(log.begin(), log.end(), line); it != std::sregex_iterator(); ++it)
            last = std::max(last, std::stod((*it)[1]) / ((*it)[2] == "us" ? 1e6 : 1e3));
        return last;
    }
    std::vector<double> seconds_[kParts];
};

struct Kills {
    Row row{"SIGKILL at random"};
    Parts parts;
    int changed_survivors = 0;
};

/// One kill, as the job's events do not have it.
struct Kill {
    double at, first_step;     ///< seconds since midnight; -1: no rank has made a step
    std::uint64_t generation;  ///< in which it came
};

/// Waits until all ranks have recovered, and then made a step; false when the job ends before.
bool recovers(const Job& job, int done, const KeptLines& kept, Kill& kill) {
    for (int turn = 1; !job.has_ended(); ++turn) {
        if (kill.first_step < 0 && kept.generation() > kill.generation) kill.first_step = seconds_of_day();
        const bool reads_log =
            kill.first_step >= 0 || turn % 2000 == 0;  // where no step follows, each second
        if (reads_log && job.recoveries() > done) return true;
        std::this_thread::sleep_for(500us);
    }
    return false;
}

/// Kills the worker of a rank. False: the workers have none of that rank, as while one is being started.
bool kill_rank(const std::map<int, pid_t>& workers, int rank) {
    const auto found = workers.find(rank);
    return found != workers.end() && ::kill(found->second, SIGKILL) == 0;
}

/// Kills random ranks of one job until it ends or `most` were killed.
void kill_ranks_of_a_job(Kills& kills, int most, const std::string& expected, std::mt19937& random) {
    constexpr int kRanks = 8;
    const TemporaryDirectory directory;
    const std::string events = directory.file("events");
    Job job(directory.path(), under_ddprun(kRanks, {"--max-restarts=0", "--events=" + events},
                                           train_command(directory.file("ck"))));
    std::vector<Kill> done;
    std::map<int, pid_t> before = job.training_workers();
    const KeptLines kept(before[0], kRanks);
    while (static_cast<int>(done.size()) < most) {
        if (job.stuck_recoveries() > 1) std::this_thread::sleep_for(1s);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
        const int victim = static_cast<int>(random() % kRanks);
        Kill kill{seconds_of_day(), -1, kept.generation()};
        if (job.has_ended() || !kill_rank(before, victim)) break;
        const int before_this = static_cast<int>(done.size());
        if (!recovers(job, before_this, kept, kill)) break;
        done.push_back(kill);
        const std::map<int, pid_t> after = job.workers();
        for (const auto& [rank, pid] : after) {
            if ((rank != victim) != (before[rank] == pid)) ++kills.changed_survivors;
        }
        before = after;
    }
    const Outcome outcome = job.program().wait();
    const std::string errors = job.errors();
    const std::string all_events = content_of(events);
    for (const Kill& kill : done)
        kills.parts.note(kill.at, kill.first_step, kill.generation, all_events, errors);
    // A rank that dies when all have finished, and are ending, is an ordinary failure.
    const bool was_late =
        errors.find("not recovered in place: all ranks had finished") != std::string::npos ||
        errors.find("not recovered in place: a rank has ended") != std::string::npos;
    const bool is_equal = (outcome.status == 0 || was_late) && digest_in(outcome.out) == expected;
    const int count = static_cast<int>(done.size());
    kills.row.runs += std::max(count + (was_late ? 1 : 0), is_equal ? 0 : 1);
    if (is_equal) kills.row.equal += count, kills.row.refused += was_late ? 1 : 0;
    else if (kills.row.otherwise.empty()) kills.row.otherwise = outcome.out + errors;
}

/// Kills a rank of a long job every three seconds, and prints how much of its time was useful (ETTR).
Row kill_at_intervals(int kills, std::mt19937& random) {
    constexpr int kRanks = 8;
    Row row{"a kill every 3 s, recovered"};
    const TemporaryDirectory directory;
    const std::string report = directory.file("report");
    std::vector<std::string> command = train_command(directory.file("ck"));
    std::ranges::replace(command, "--epochs=60", "--epochs=1000000");
    Job job(directory.path(), under_ddprun(kRanks, {"--max-restarts=0", "--report=" + report}, command));
    (void)job.training_workers();
    for (; row.runs < kills && row.equal == row.runs; ++row.runs) {
        std::this_thread::sleep_for(3s);
        const int victim = static_cast<int>(random() % kRanks);
        if (comes([&] { return kill_rank(job.workers(), victim); }) &&
            comes([&] { return job.recoveries() > row.runs; }))
            ++row.equal;
    }
    job.program().signal(SIGTERM);
    const Outcome outcome = job.program().wait();
    if (row.equal < row.runs) row.otherwise = outcome.out + job.errors();
    const std::string json = content_of(report);
    const auto number = [&](const std::string& name) {
        std::smatch found;
        const std::regex member('"' + name + "\": *([0-9.]+)");
        return std::regex_search(json, found, member) ? std::stod(found[1]) : 0;
    };
    fmt::print("of {:.0f} s with {} kills {:.2f} % were useful (ETTR)\n", number("seconds"), row.runs,
               100 * number("useful_seconds") / number("seconds"));
    return row;
}

std::string undisturbed(int ranks, const std::vector<std::string>& program) {
    return digest_in(run(under_ddprun(ranks, {}, program)).out);
}

/// A fault that `recovering` has in itself.
struct OwnFault {
    const char* name;
    /// What ddprun or a rank says where the job ends instead; none of them: it has to go on.
    std::vector<std::string> refusals = {};
    std::vector<std::string> options = {};
};

Row own_fault(const OwnFault& fault, int runs, const std::string& expected, std::mt19937::result_type seed) {
    std::mt19937 random(seed);
    Row row{fault.name};
    for (; row.runs < runs; ++row.runs) {
        const std::string unit = fmt::format("{}", random() % 40);
        std::vector<std::string> options = fault.options;
        options.emplace_back("--max-restarts=0");
        const Outcome outcome = run(under_ddprun(4, options, {path_of("RECOVERING"), fault.name, unit}));
        const bool is_refused = std::ranges::any_of(fault.refusals, [&](const std::string& refusal) {
            const std::string digest = digest_in(outcome.out);
            return outcome.status != 0 && outcome.err.find(refusal) != std::string::npos &&
                   (digest.empty() || digest == expected);
        });
        if (is_refused) ++row.refused;
        else if (outcome.status == 0 && digest_in(outcome.out) == expected) ++row.equal;
        else if (row.otherwise.empty())
            row.otherwise =
                fmt::format("in unit {}: exit {}\n{}{}", unit, outcome.status, outcome.out, outcome.err);
    }
    return row;
}

/// A signal to ddprun while a killed rank comes back: the run saves, and continues to the same digest.
Row stop_in_recovery(const char* fault, int signal, int runs, const std::string& expected,
                     std::mt19937& random) {
    Row row{fault};
    for (; row.runs < runs; ++row.runs) {
        const TemporaryDirectory directory;
        const std::vector<std::string> command = train_command(directory.file("ck"));
        Job job(directory.path(), under_ddprun(4, {"--max-restarts=0", "--signal=USR1=preempt"}, command));
        (void)job.training_workers();
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
        const int victim = static_cast<int>(random() % 4);
        (void)comes([&] { return kill_rank(job.workers(), victim); });
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
        job.program().signal(signal);
        const Outcome stopped = job.program().wait();
        std::vector<std::string> rest = command;
        rest.push_back("--resume");
        const Outcome outcome = run(under_ddprun(4, {}, rest));
        if (digest_in(outcome.out) == expected) ++row.equal;
        else if (row.otherwise.empty())
            row.otherwise = stopped.out + job.errors() + outcome.out + outcome.err;
    }
    return row;
}

/// Rank 0 cannot write its next checkpoint: a limit on the size of its files ends it, and the rank that
/// replaces it has room again.
Row full_disk_in_a_checkpoint(int runs, const std::string& expected) {
    Row row{"full disk (RLIMIT_FSIZE)"};
    for (; row.runs < runs; ++row.runs) {
        const TemporaryDirectory directory;
        Job job(directory.path(), under_ddprun(4, {"--max-restarts=0"}, train_command(directory.file("ck"))));
        const rlimit limit{16384, 16384};
        ::prlimit(job.training_workers()[0], RLIMIT_FSIZE, &limit, nullptr);
        const Outcome outcome = job.program().wait();
        if (outcome.status == 0 && digest_in(outcome.out) == expected && job.recoveries() == 1) ++row.equal;
        else if (row.otherwise.empty()) row.otherwise = outcome.out + job.errors();
    }
    return row;
}

/// No rank can go on with weights that are not finite: the job ends with the reason.
Row nan_on_all_ranks(int runs) {
    Row row{"NaN on all ranks"};
    for (; row.runs < runs; ++row.runs) {
        const TemporaryDirectory directory;
        std::vector<std::string> command = train_command(directory.file("ck"));
        std::erase(command, "--clip=1");  // which skips a step whose gradients are not finite
        command.emplace_back("--lr=1e30");
        const Outcome outcome = run(under_ddprun(4, {"--max-restarts=0"}, command));
        if (outcome.status != 0 && outcome.err.find("training has diverged") != std::string::npos)
            ++row.refused;
        else if (row.otherwise.empty()) row.otherwise = outcome.out + outcome.err;
    }
    return row;
}

/// ddprun itself, which is the agent of a job on one node: its workers end, and nothing is left.
Row kill_of_the_agent(int runs) {
    Row row{"SIGKILL of ddprun"};
    for (; row.runs < runs; ++row.runs) {
        const TemporaryDirectory directory;
        Job job(directory.path(), under_ddprun(4, {}, train_command(directory.file("ck"))));
        const std::map<int, pid_t> workers = job.training_workers();
        job.program().signal(SIGKILL);
        const bool all_end = comes([&] {
            return std::ranges::none_of(workers, [](const auto& one) { return ::kill(one.second, 0) == 0; });
        });
        if (all_end) ++row.refused;
        else row.otherwise = "workers are left";
    }
    return row;
}

int campaign(int kills, int runs) {
    std::mt19937 random(static_cast<unsigned>(::getpid()));
    std::setbuf(stdout, nullptr);
    print_head();
    std::vector<Row> rows;
    const auto add = [&](const Row& row) { print(row), rows.push_back(row); };
    const TemporaryDirectory directory;
    const std::string of_eight = undisturbed(8, train_command(directory.file("eight")));
    Kills random_kills;
    while (random_kills.row.equal < kills && random_kills.row.otherwise.empty())
        kill_ranks_of_a_job(random_kills, kills - random_kills.row.equal, of_eight, random);
    add(random_kills.row);
    const std::string own = undisturbed(4, {path_of("RECOVERING"), "none", "0"});
    // These wait for a limit most of the time, so they run beside the others. A stopped rank is found by the
    // hang detector, which may see only that nobody makes progress.
    const std::string no_culprit = "the hanging rank is not known";
    const std::vector<std::string> limits = {"--recover-within=2s", "--hang-timeout=1s",
                                             "--failure-grace=500ms"};
    std::vector<std::future<Row>> waiting;
    for (const OwnFault& fault : {OwnFault{"SIGSTOP", {no_culprit}, limits},
                                  {"busy loop", {no_culprit}, limits},
                                  {"SIGSTOP of all ranks", {no_culprit, "of 4 ranks failed"}, limits},
                                  {"deaf", {}, {"--recover-within=500ms"}},
                                  {"hang in atexit", {}, {"--failure-grace=500ms"}}})
        waiting.push_back(std::async(std::launch::async, own_fault, fault, runs, own, random()));
    for (const char* fault :
         {"in all-reduce", "between reduce and commit", "in commit", "in let go", "in transfer",
          "half of the ranks", "exit 1", "throw", "abort()", "out of memory"})
        add(own_fault({fault}, runs, own, random()));
    // The second kill of these comes at a random time, which may be after the last unit.
    for (const char* fault : {"in join", "source in transfer"})
        add(own_fault({fault, {"all ranks had finished", "a rank has ended"}}, runs, own, random()));
    add(own_fault({"most of the ranks", {"3 of 4 ranks failed"}}, runs, own, random()));
    add(own_fault({"bit flip", {"not bitwise equal"}}, runs, own, random()));
    add(own_fault({"bit flip, verified"}, runs, own, random()));
    add(nan_on_all_ranks(runs));
    const std::string of_four = undisturbed(4, train_command(directory.file("four")));
    add(full_disk_in_a_checkpoint(runs, of_four));
    add(stop_in_recovery("stop in recovery", SIGTERM, runs, of_four, random));
    add(stop_in_recovery("preemption in recovery", SIGUSR1, runs, of_four, random));
    add(kill_of_the_agent(runs));
    for (std::future<Row>& row : waiting) add(row.get());
    add(kill_at_intervals(std::max(2, runs), random));
    random_kills.parts.print();
    fmt::print("survivors with another process: {}\n", random_kills.changed_survivors);
    const bool all_well = std::ranges::all_of(
        rows, [](const Row& row) { return row.runs > 0 && row.runs == row.equal + row.refused; });
    return all_well && random_kills.changed_survivors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
    return ddprun::test::campaign(number(1, 100), number(2, 1));
}
