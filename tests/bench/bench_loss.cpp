// A node is lost: how long until the workers of the others are signalled. Several ddpruns on this host are
// the nodes; workers are this program, and write down when SIGTERM came. Then a rank fails, each node on a
// host of its own (tests/support/hosts.h): until all others are signalled, and until all run again. Prints
// medians and the worst; asserts nothing. usage: bench_loss DDPRUN HOST_INIT ON_HOST
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "env/clock.h"
#include "tests/support/hosts.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

constexpr int kNodes = 8, kWorkers = 2, kRounds = 7;

double in_ms(Duration span) { return std::chrono::duration<double, std::milli>(span).count(); }

/// A file that is whole when it has its name.
void note_now(const std::string& directory, const std::string& name) {
    const TimePoint now = MonotonicClock::now();
    std::ofstream(directory + "/unfinished." + name) << now.time_since_epoch().count();
    std::filesystem::rename(directory + "/unfinished." + name, directory + "/" + name);
}

/// The last rank, when it is asked to: as a program that is killed, that ends with an error, or that reports
/// one first.
[[noreturn]] void fail_when_asked(const std::string& directory, const std::string& how) {
    while (!std::filesystem::exists(directory + "/go")) ::usleep(1000);
    note_now(directory, "failed");
    if (how == "killed") ::raise(SIGKILL);
    if (how == "raises")
        std::ofstream(std::getenv("TORCHELASTIC_ERROR_FILE")) << R"({"message": "no such column"})";
    std::_Exit(3);
}

/// Says that it is there, and when it was told to stop. Started again it only says when that was.
int be_worker(const std::string& directory, const std::string& how) {
    if (std::strcmp(std::getenv("TORCHELASTIC_RESTART_COUNT"), "0") != 0) {
        note_now(directory, std::string("again.") + std::getenv("RANK"));
        return 0;
    }
    sigset_t wanted;
    ::sigemptyset(&wanted);
    ::sigaddset(&wanted, SIGTERM);
    ::sigprocmask(SIG_BLOCK, &wanted, nullptr);
    const std::string rank = std::getenv("RANK");
    std::ofstream(directory + "/up." + rank) << rank;
    if (!how.empty() && rank == std::to_string(kNodes * kWorkers - 1)) fail_when_asked(directory, how);
    int signal = 0;
    ::sigwait(&wanted, &signal);
    note_now(directory, "term." + rank);
    return 0;
}

std::size_t count_files(const std::string& directory, const std::string& stem) {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
        count += entry.path().filename().string().starts_with(stem) ? 1 : 0;
    return count;
}
void wait_for_files(const std::string& directory, const std::string& stem, std::size_t count) {
    while (count_files(directory, stem) < count) ::usleep(1000);
}
TimePoint last_of(const std::string& directory, const std::string& stem) {
    std::int64_t last = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
        if (!entry.path().filename().string().starts_with(stem)) continue;
        std::int64_t when = 0;
        std::ifstream(entry.path()) >> when;
        last = std::max(last, when);
    }
    return TimePoint(Duration(last));
}

std::vector<std::unique_ptr<Program>> start_nodes(const std::string& ddprun, const std::string& self,
                                                  const std::string& directory, const ReservedPort& port,
                                                  const std::string& option) {
    std::vector<std::unique_ptr<Program>> nodes;
    for (int rank = 0; rank < kNodes; ++rank) {
        nodes.push_back(std::make_unique<Program>(
            std::vector<std::string>{ddprun, "-q", option, fmt::format("--nnodes={}", kNodes),
                                     fmt::format("--nproc-per-node={}", kWorkers),
                                     fmt::format("--node-rank={}", rank), "--master-addr=127.0.0.1",
                                     "--master-port=" + port.number(), self, "worker", directory},
            with_environment({"DDPRUN_TOKEN=0123456789abcdef0123456789abcdef"})));
    }
    wait_for_files(directory, "up.", kNodes * kWorkers);
    return nodes;
}

/// A node's ddprun is stopped for 5 s, longer than the time-out: from its waking to the last worker's first
/// moment in the next generation. `node` 0 is the head.
Duration stall_one(const std::string& ddprun, const std::string& self, std::size_t node) {
    const TemporaryDirectory directory;
    const ReservedPort port;
    const std::vector<std::unique_ptr<Program>> nodes =
        start_nodes(ddprun, self, directory.path(), port, "--max-restarts=1");
    nodes[node]->signal(SIGSTOP);
    ::sleep(5);
    const TimePoint woken = MonotonicClock::now();
    nodes[node]->signal(SIGCONT);
    wait_for_files(directory.path(), "again.", kNodes * kWorkers);
    const Duration took = last_of(directory.path(), "again.") - woken;
    for (const auto& one : nodes) (void)one->wait();
    return took;
}

void measure_stall(const std::string& ddprun, const std::string& self, const char* name, std::size_t node) {
    std::vector<Duration> spans;
    for (int round = 0; round < kRounds; ++round) spans.push_back(stall_one(ddprun, self, node));
    std::sort(spans.begin(), spans.end());
    fmt::print("{:<24} {:>9.1f} {:>9.1f}\n", name, in_ms(spans[kRounds / 2]), in_ms(spans.back()));
    std::fflush(stdout);
}

/// From the signal to the last node's ddprun to the last of the other nodes' workers.
Duration lose_one(const std::string& ddprun, const std::string& self, int signal) {
    const TemporaryDirectory directory;
    const ReservedPort port;
    const std::vector<std::unique_ptr<Program>> nodes =
        start_nodes(ddprun, self, directory.path(), port, "--max-restarts=0");
    const TimePoint lost = MonotonicClock::now();
    nodes.back()->signal(signal);
    wait_for_files(directory.path(), "term.", (kNodes - 1) * kWorkers);
    const Duration took = last_of(directory.path(), "term") - lost;
    nodes.back()->signal(SIGKILL);
    for (const auto& node : nodes) (void)node->wait();
    return took;
}

struct Healing {
    Duration told, again;
};

/// From the last moment of the rank that fails to the last SIGTERM, and to the last first moment of the next
/// generation.
Healing fail_one(const Hosts& hosts, const std::string& ddprun, const std::string& self,
                 const std::string& how) {
    const std::string directory = hosts.shared() + "/round";
    std::filesystem::remove_all(directory);
    std::filesystem::create_directory(directory);
    std::vector<std::unique_ptr<Program>> nodes;
    for (int rank = 0; rank < kNodes; ++rank) {
        nodes.push_back(std::make_unique<Program>(hosts.command(
            rank,
            {ddprun, "-q", fmt::format("--nnodes={}", kNodes), fmt::format("--nproc-per-node={}", kWorkers),
             fmt::format("--node-rank={}", rank), "--max-restarts=1", "--master-addr=node00",
             "--master-port=29400", self, "worker", directory, how})));
    }
    wait_for_files(directory, "up.", kNodes * kWorkers);
    std::ofstream(directory + "/go") << 1;
    wait_for_files(directory, "again.", kNodes * kWorkers);
    const TimePoint failed = last_of(directory, "failed");
    const Healing healing{last_of(directory, "term.") - failed, last_of(directory, "again.") - failed};
    for (const auto& node : nodes) (void)node->wait();
    return healing;
}

void measure_healing(const std::string& ddprun, const std::string& self) {
    if (const auto reason = Hosts::why_not()) return fmt::print("{}\n", *reason);
    const Hosts hosts(kNodes);
    fmt::print("\na rank of {} hosts, ms       all signalled   worst   all run again   worst of {}\n", kNodes,
               kRounds);
    for (const char* how : {"killed", "exits", "raises"}) {
        std::vector<Duration> told, again;
        for (int round = 0; round < kRounds; ++round) {
            const Healing healing = fail_one(hosts, ddprun, self, how);
            told.push_back(healing.told);
            again.push_back(healing.again);
        }
        for (auto* spans : {&told, &again}) std::sort(spans->begin(), spans->end());
        fmt::print("{:<28} {:>13.1f} {:>7.1f} {:>15.1f} {:>7.1f}\n", how, in_ms(told[kRounds / 2]),
                   in_ms(told.back()), in_ms(again[kRounds / 2]), in_ms(again.back()));
        std::fflush(stdout);
    }
}

void measure(const std::string& ddprun, const std::string& self, const char* name, int signal) {
    std::vector<Duration> spans;
    for (int round = 0; round < kRounds; ++round) spans.push_back(lose_one(ddprun, self, signal));
    std::sort(spans.begin(), spans.end());
    fmt::print("{:<24} {:>9.1f} {:>9.1f}\n", name, in_ms(spans[kRounds / 2]), in_ms(spans.back()));
    std::fflush(stdout);
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    using namespace ddprun::test;
    if (argc >= 3 && std::strcmp(argv[1], "worker") == 0) return be_worker(argv[2], argc > 3 ? argv[3] : "");
    if (argc != 4) return 64;
    ::setenv("HOST_INIT", argv[2], 1);
    ::setenv("ON_HOST", argv[3], 1);
    const std::string self = std::filesystem::canonical("/proc/self/exe");
    fmt::print("one of {} nodes, ms to the others' last SIGTERM   median     worst of {}\n", kNodes, kRounds);
    measure(argv[1], self, "its ddprun is killed", SIGKILL);
    measure(argv[1], self, "its ddprun is stopped", SIGSTOP);
    fmt::print(
        "\none of {} nodes is stopped for 5 s, ms from its waking until all run again   median   worst of {}\n",
        kNodes, kRounds);
    measure_stall(argv[1], self, "a node", kNodes - 1);
    measure_stall(argv[1], self, "the head", 0);
    measure_healing(argv[1], self);
    return 0;
}
