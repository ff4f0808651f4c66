// mpiexec without ddprun: from the last rank's first instruction to the end of the first all-reduce on all
// ranks. usage: bench_mpi_start OPEN_MPI|- HYDRA|- [RUNS]      or, as a rank: bench_mpi_start rank FILE
#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "ddp/context.h"
#include "ddp/process_group.h"
#include "env/clock.h"

namespace {

constexpr int kRanks = 8;

std::int64_t now_ns() { return ddprun::MonotonicClock::now().time_since_epoch().count(); }

/// One line: when this rank began, and when its first all-reduce had ended.
int be_rank(const std::string& file) {
    const std::int64_t began = now_ns();
    const ddp::Context context = ddp::Context::from_env();
    const auto group = ddp::ProcessGroup::create(context);
    std::array<float, 1000> values = {};
    group->all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    const std::int64_t ended = now_ns();
    std::ofstream(fmt::format("{}.{}", file, context.rank())) << began << ' ' << ended << '\n';
    return 0;
}

struct Times {
    double to_first = 0;  ///< from the last rank's start
    double whole = 0;     ///< from before the launcher
};

bool run_once(const std::vector<std::string>& command, const std::string& file, Times& times) {
    const std::int64_t before = now_ns();
    const pid_t pid = ::fork();
    if (pid == 0) {
        std::vector<char*> argv;
        for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
        argv.push_back(nullptr);
        ::execv(argv[0], argv.data());
        ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    std::int64_t last_start = 0, last_end = 0;
    int seen = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
        const std::string name = fmt::format("{}.{}", file, rank);
        std::ifstream line(name);
        std::int64_t began = 0, ended = 0;
        if (line >> began >> ended) ++seen;
        last_start = std::max(last_start, began);
        last_end = std::max(last_end, ended);
        ::unlink(name.c_str());
    }
    times = {static_cast<double>(last_end - last_start) / 1e6, static_cast<double>(last_end - before) / 1e6};
    return status == 0 && seen == kRanks;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? -1 : values[values.size() / 2];
}

void measure(const std::string& name, const std::vector<std::string>& command, const std::string& file,
             int runs) {
    std::vector<double> first, whole;
    for (int run = 0; run < runs; ++run) {
        Times times;
        if (!run_once(command, file, times)) continue;
        first.push_back(times.to_first);
        whole.push_back(times.whole);
    }
    if (first.empty()) return fmt::print("{}: no run succeeded\n", name);
    fmt::print(
        "{} -n {}, no ddprun: last rank's start to first all-reduce: median {:.1f} ms, worst {:.1f} ms of {} runs  [bar: 100 ms]; "
        "with the launcher's own start {:.0f} ms\n",
        name, kRanks, median(first), *std::max_element(first.begin(), first.end()), first.size(),
        median(whole));
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (words.size() == 2 && words[0] == "rank") return be_rank(words[1]);
    if (words.size() < 2) {
        fmt::print(stderr, "usage: bench_mpi_start OPEN_MPI|- HYDRA|- [RUNS]\n");
        return 64;
    }
    const int runs = words.size() > 2 ? std::atoi(words[2].c_str()) : 15;
    char file[] = "/tmp/ddprun-bench-XXXXXX";
    if (::mkdtemp(file) == nullptr) return 1;
    const std::string stamps = std::string(file) + "/stamp", self = "/proc/self/exe";
    std::array<char, 4096> own{};
    if (::readlink(self.c_str(), own.data(), own.size() - 1) < 0) return 1;
    const std::vector<std::string> rank = {own.data(), "rank", stamps};
    const auto with_rank = [&](std::vector<std::string> command) {
        command.insert(command.end(), rank.begin(), rank.end());
        return command;
    };
    const std::string number = std::to_string(kRanks);
    if (words[0] != "-")
        measure("Open MPI", with_rank({words[0], "--allow-run-as-root", "--oversubscribe", "-n", number}),
                stamps, runs);
    if (words[1] != "-") measure("Hydra", with_rank({words[1], "-n", number}), stamps, runs);
    ::rmdir(file);
    return 0;
}
