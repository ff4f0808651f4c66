// Faults against recovery in place: every run has to end with the digest of an undisturbed one, or with the
// refusal that is stated for the fault.
//   campaign KILLS RUNS    KILLS random SIGKILLs of train's ranks, and RUNS runs of each other fault
#include <fmt/core.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "env/text.h"
#include "tests/support/comes.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Row {
    std::string fault;
    int runs = 0, equal = 0, refused = 0;
    std::string otherwise = {};  ///< the first run that ended in another way
};

std::string content_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

int occurrences(const std::string& text, const std::string& piece) {
    int n = 0;
    for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
    return n;
}

/// The number in the environment of a process; -1 when it has ended.
int rank_of(pid_t pid) {
    const std::string all = content_of(fmt::format("/proc/{}/environ", pid));
    for (const std::string_view one : split(all, '\0')) {
        if (one.starts_with("RANK=")) return std::atoi(std::string(one.substr(5)).c_str());
    }
    return -1;
}

/// What train, or recovering, says of the weights that it ends with.
std::string digest_in(const std::string& out) {
    static const std::regex line(R"((sha256|digest) [0-9a-f]{64}.*)");
    std::smatch found;
    return std::regex_search(out, found, line) ? found.str() : "";
}

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
        : errors_(directory + "/errors"), program_(with_errors_in(errors_, command)) {}

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
        for (const pid_t pid : children_named(program_.pid(), "train")) all[rank_of(pid)] = pid;
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
        program_.wait_for_output("epoch  1/");
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

struct Kills {
    Row row{"SIGKILL at random"};
    std::vector<double> milliseconds;  ///< from each kill until all ranks have joined
    int changed_survivors = 0;
};

/// Kills random ranks of one job until it ends or `most` were killed.
void kill_ranks_of_a_job(Kills& kills, int most, const std::string& expected, std::mt19937& random) {
    constexpr int kRanks = 8;
    const TemporaryDirectory directory;
    Job job(directory.path(),
            under_ddprun(kRanks, {"--max-restarts=0"}, train_command(directory.file("ck"))));
    int done = 0;
    std::map<int, pid_t> before = job.training_workers();
    while (done < most) {
        if (job.stuck_recoveries() > 1) std::this_thread::sleep_for(1s);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
        const int victim = static_cast<int>(random() % kRanks);
        const Clock::time_point killed = Clock::now();
        if (job.has_ended() || ::kill(before[victim], SIGKILL) != 0) break;
        if (!comes([&] { return job.recoveries() > done || job.has_ended(); }) || job.has_ended()) break;
        kills.milliseconds.push_back(
            std::chrono::duration<double, std::milli>(Clock::now() - killed).count());
        ++done;
        const std::map<int, pid_t> after = job.workers();
        for (const auto& [rank, pid] : after) {
            if ((rank != victim) != (before[rank] == pid)) ++kills.changed_survivors;
        }
        before = after;
    }
    const Outcome outcome = job.program().wait();
    const std::string errors = job.errors();
    // A rank that dies when all have finished, and are ending, is an ordinary failure.
    const bool was_late =
        errors.find("not recovered in place: all ranks had finished") != std::string::npos ||
        errors.find("not recovered in place: a rank has ended") != std::string::npos;
    const bool is_equal = (outcome.status == 0 || was_late) && digest_in(outcome.out) == expected;
    kills.row.runs += std::max(done + (was_late ? 1 : 0), is_equal ? 0 : 1);
    if (is_equal) kills.row.equal += done, kills.row.refused += was_late ? 1 : 0;
    else if (kills.row.otherwise.empty()) kills.row.otherwise = outcome.out + errors;
}

std::string quantiles(std::vector<double> values) {
    if (values.empty()) return "none";
    std::sort(values.begin(), values.end());
    const auto at = [&](double part) {
        return values[std::min(values.size() - 1,
                               static_cast<std::size_t>(part * static_cast<double>(values.size())))];
    };
    return fmt::format("p50 {:.0f} ms, p90 {:.0f} ms, p99 {:.0f} ms, most {:.0f} ms", at(0.5), at(0.9),
                       at(0.99), values.back());
}

std::string undisturbed(int ranks, const std::vector<std::string>& program) {
    return digest_in(run(under_ddprun(ranks, {}, program)).out);
}

/// A fault that `recovering` has in itself. `refusal`: the reason for which ddprun may end or restart all
/// ranks instead.
Row own_fault(const std::string& fault, int runs, const std::string& expected, std::mt19937& random,
              const std::string& refusal = {}) {
    Row row{fault};
    for (; row.runs < runs; ++row.runs) {
        const std::string unit = fmt::format("{}", random() % 40);
        const Outcome outcome =
            run(under_ddprun(4, {"--max-restarts=0", "--recover-within=2s", "--hang-timeout=1s"},
                             {path_of("RECOVERING"), fault, unit}));
        const bool is_refused =
            !refusal.empty() && outcome.err.find("not recovered in place: " + refusal) != std::string::npos;
        if (is_refused) ++row.refused;
        else if (outcome.status == 0 && digest_in(outcome.out) == expected) ++row.equal;
        else if (row.otherwise.empty())
            row.otherwise =
                fmt::format("in unit {}: exit {}\n{}{}", unit, outcome.status, outcome.out, outcome.err);
    }
    return row;
}

/// SIGTERM to ddprun while a killed rank comes back: the run saves, and continues to the same digest.
Row stop_in_recovery(int runs, const std::string& expected, std::mt19937& random) {
    Row row{"stop in recovery"};
    for (; row.runs < runs; ++row.runs) {
        const TemporaryDirectory directory;
        const std::vector<std::string> command = train_command(directory.file("ck"));
        Job job(directory.path(), under_ddprun(4, {"--max-restarts=0"}, command));
        std::map<int, pid_t> workers = job.training_workers();
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
        ::kill(workers[static_cast<int>(random() % 4)], SIGKILL);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
        job.program().signal(SIGTERM);
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

void print(const Row& row) {
    const int others = row.runs - row.equal - row.refused;
    fmt::print("{:<28} {:>6} {:>14} {:>18} {:>15}\n", row.fault, row.runs, row.equal, row.refused, others);
    if (others > 0) fmt::print("{}\n", row.otherwise);
}

int campaign(int kills, int runs) {
    std::mt19937 random(static_cast<unsigned>(::getpid()));
    std::setbuf(stdout, nullptr);
    fmt::print("{:<28} {:>6} {:>14} {:>18} {:>15}\n", "fault", "runs", "equal digest", "refused as stated",
               "anything else");
    std::vector<Row> rows;
    const auto add = [&](const Row& row) { print(row), rows.push_back(row); };
    const TemporaryDirectory directory;
    const std::string of_eight = undisturbed(8, train_command(directory.file("eight")));
    Kills random_kills;
    while (random_kills.row.runs < kills && random_kills.row.otherwise.empty())
        kill_ranks_of_a_job(random_kills, kills - random_kills.row.runs, of_eight, random);
    add(random_kills.row);
    const std::string own = undisturbed(4, {path_of("RECOVERING"), "none", "0"});
    for (const char* fault : {"in all-reduce", "between reduce and commit", "in commit", "in let go",
                              "in join", "in transfer", "half of the ranks", "exit 1", "throw", "abort()"})
        add(own_fault(fault, runs, own, random));
    // A stopped rank is found by the hang detector, which may see only that nobody makes progress.
    add(own_fault("SIGSTOP", runs, own, random, "it does not tell which rank is to start again"));
    add(own_fault("most of the ranks", runs, own, random, "3 of 4 ranks failed"));
    add(stop_in_recovery(runs, undisturbed(4, train_command(directory.file("four"))), random));
    add(kill_of_the_agent(runs));
    fmt::print("from kill to all joined, 8 ranks: {}\n", quantiles(random_kills.milliseconds));
    fmt::print("survivors with another process: {}\n", random_kills.changed_survivors);
    const bool all_well = std::ranges::all_of(
        rows, [](const Row& row) { return row.runs > 0 && row.runs == row.equal + row.refused; });
    return all_well && random_kills.changed_survivors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
    return ddprun::test::campaign(number(1, 100), number(2, 2));
}
