// A node is lost: how long until the workers of the others are signalled. Several ddpruns on this host are the nodes; workers are
// this program, and write down when SIGTERM came. Prints medians and the worst; asserts nothing.
// usage: bench_loss DDPRUN
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
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

constexpr int kNodes = 8, kWorkers = 2, kRounds = 7;

double in_ms(Duration span) { return std::chrono::duration<double, std::milli>(span).count(); }

/// Says that it is there, and when it was told to stop.
int be_worker(const std::string& directory) {
    sigset_t wanted;
    ::sigemptyset(&wanted);
    ::sigaddset(&wanted, SIGTERM);
    ::sigprocmask(SIG_BLOCK, &wanted, nullptr);
    const std::string rank = std::getenv("RANK");
    std::ofstream(directory + "/up." + rank) << rank;
    int signal = 0;
    ::sigwait(&wanted, &signal);
    const TimePoint now = MonotonicClock::now();
    const std::string unfinished = directory + "/unfinished." + rank;
    std::ofstream(unfinished) << now.time_since_epoch().count();
    std::filesystem::rename(unfinished, directory + "/term." + rank);
    return 0;
}

std::size_t count_files(const std::string& directory, const std::string& stem) {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) count += entry.path().filename().string().starts_with(stem) ? 1 : 0;
    return count;
}
void wait_for_files(const std::string& directory, const std::string& stem, std::size_t count) {
    while (count_files(directory, stem) < count) ::usleep(1000);
}
TimePoint last_told(const std::string& directory) {
    std::int64_t last = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
        if (!entry.path().filename().string().starts_with("term")) continue;
        std::int64_t when = 0;
        std::ifstream(entry.path()) >> when;
        last = std::max(last, when);
    }
    return TimePoint(Duration(last));
}

/// From the signal to the last node's ddprun to the last of the other nodes' workers.
Duration lose_one(const std::string& ddprun, const std::string& self, int signal) {
    const TemporaryDirectory directory;
    const ReservedPort port;
    std::vector<std::unique_ptr<Program>> nodes;
    for (int rank = 0; rank < kNodes; ++rank) {
        nodes.push_back(std::make_unique<Program>(
            std::vector<std::string>{ddprun, "-q", fmt::format("--nnodes={}", kNodes), fmt::format("--nproc-per-node={}", kWorkers),
                                     fmt::format("--node-rank={}", rank), "--master-addr=127.0.0.1", "--master-port=" + port.number(), self, "worker", directory.path()},
            with_environment({"DDPRUN_TOKEN=0123456789abcdef0123456789abcdef"})));
    }
    wait_for_files(directory.path(), "up.", kNodes * kWorkers);
    const TimePoint lost = MonotonicClock::now();
    nodes.back()->signal(signal);
    wait_for_files(directory.path(), "term.", (kNodes - 1) * kWorkers);
    const Duration took = last_told(directory.path()) - lost;
    nodes.back()->signal(SIGKILL);
    for (const auto& node : nodes) (void)node->wait();
    return took;
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
    if (argc == 3 && std::strcmp(argv[1], "worker") == 0) return be_worker(argv[2]);
    if (argc != 2) return 64;
    const std::string self = std::filesystem::canonical("/proc/self/exe");
    fmt::print("one of {} nodes, ms to the others' last SIGTERM   median     worst of {}\n", kNodes, kRounds);
    measure(argv[1], self, "its ddprun is killed", SIGKILL);
    measure(argv[1], self, "its ddprun is stopped", SIGSTOP);
    return 0;
}
