// libddp's waiting against ranks that sleep at once: 2 ranks on 2 cores, alone and beside two busy loops. The
// two run in turns, so that other load of the machine affects both.
//
//   bench_waiting [--passes N]
#include <fmt/core.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/text.h"
#include "env/worker_env.h"

namespace {

using ddprun::MonotonicClock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::chrono::milliseconds kLength{700};

struct Load {
    std::string name;
    std::size_t bytes;
    microseconds computing;  ///< before each call
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

void stay_on_two_cores() {
    cpu_set_t all, two;
    CPU_ZERO(&two);
    ::sched_getaffinity(0, sizeof all, &all);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++cpu) {
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &two);
    }
    ::sched_setaffinity(0, sizeof two, &two);
}

/// Burns CPU time, not wall time.
void compute(std::chrono::nanoseconds time) {
    static const double turns_per_ns = [] {
        const auto before = MonotonicClock::now();
        for (int i = 0; i < 3'000'000; ++i) asm volatile("" : : : "memory");
        return 3e6 / static_cast<double>((MonotonicClock::now() - before).count());
    }();
    const auto turns = static_cast<long>(static_cast<double>(time.count()) * turns_per_ns);
    for (long i = 0; i < turns; ++i) asm volatile("" : : : "memory");
}

/// Processes that burn CPU time until this object ends.
class BusyLoops {
  public:
    explicit BusyLoops(int count) {
        for (int i = 0; i < count; ++i) {
            const pid_t pid = ::fork();
            if (pid == 0) {
                for (;;) asm volatile("" : : : "memory");
            }
            pids_.push_back(pid);
        }
    }
    ~BusyLoops() {
        for (const pid_t pid : pids_) ::kill(pid, SIGKILL), ::waitpid(pid, nullptr, 0);
    }
    BusyLoops(const BusyLoops&) = delete;
    BusyLoops& operator=(const BusyLoops&) = delete;

  private:
    std::vector<pid_t> pids_;
};

/// Microseconds per step of the load. A positive sum ends all ranks in the same step.
double run_rank(int segment, int rank, const Load& load) {
    ddprun::WorkerEnv env = ddp::testing::environment_of(rank, 2);
    env.segment_fd = segment;
    const auto group = ddp::ProcessGroup::create(ddp::Context(env));
    const std::size_t count = load.bytes / sizeof(float);
    const auto region = group->allocate_shared(load.bytes);
    const std::span<float> values(reinterpret_cast<float*>(region.data()), count);
    compute(microseconds(1));  // the first call calibrates the loop
    group->barrier().wait();
    const auto begin = MonotonicClock::now();
    for (double steps = 1;; ++steps) {
        compute(load.computing);
        const auto now = MonotonicClock::now();
        values[0] = now - begin > kLength ? 1.0F : 0.0F;
        group->all_reduce(ddp::buffer_of(values)).wait();
        if (values[0] > 0) return static_cast<double>((MonotonicClock::now() - begin).count()) * 1e-3 / steps;
    }
}

double step_us(const Load& load, std::uint32_t cpus) {
    const ddprun::UniqueFd segment =
        ddp::make_segment({.local_world_size = 2, .world_size = 2, .cpus = cpus});
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 2; ++rank) {
        pids.push_back(::fork());
        if (pids.back() != 0) continue;
        const double us = run_rank(segment.get(), rank, load);
        if (rank == 0 && ::write(ends[1], &us, sizeof us) != sizeof us) std::abort();
        ::_exit(0);
    }
    for (const pid_t pid : pids) ::waitpid(pid, nullptr, 0);
    double us = 0;
    if (::read(ends[0], &us, sizeof us) != sizeof us) std::abort();
    ::close(ends[0]), ::close(ends[1]);
    return us;
}

void print_table(const std::vector<Load>& loads, int busy_loops, int passes) {
    fmt::print("{} busy loops beside 2 ranks on 2 cores\n{:>28} {:>14} {:>14} {:>7}\n", busy_loops, "step",
               "as we do us", "asleep us", "ratio");
    const BusyLoops loops(busy_loops);
    for (const Load& load : loads) {
        std::vector<double> ours, asleep, ratios;
        for (int pass = 0; pass < passes; ++pass) {
            ours.push_back(step_us(load, 0));
            asleep.push_back(step_us(load, 1));  // more ranks than cores, so ranks sleep at once
            ratios.push_back(ours.back() / asleep.back());
        }
        const double ratio = median(ratios);
        fmt::print("{:>28} {:>14.2f} {:>14.2f} {:>7.2f} {}\n", load.name, median(ours), median(asleep), ratio,
                   busy_loops == 0 ? ""
                   : ratio <= 1.5  ? "met"
                                   : "NOT MET (1.5)");
    }
}

}  // namespace

int main(int argc, char** argv) {
    ::setvbuf(stdout, nullptr, _IOLBF, 0);
    const int passes = argc == 3 && std::string(argv[1]) == "--passes" ? std::max(1, std::atoi(argv[2])) : 5;
    stay_on_two_cores();
    const std::vector<Load> loads{{"4 B", 4, microseconds(0)},
                                  {"64 KiB", 64 << 10, microseconds(0)},
                                  {"1 MiB", 1 << 20, microseconds(0)},
                                  {"20 us computing, 4 KiB", 4096, microseconds(20)},
                                  {"200 us computing, 64 KiB", 64 << 10, microseconds(200)},
                                  {"2 ms computing, 1 MiB", 1 << 20, milliseconds(2)}};
    print_table(loads, 0, passes);
    print_table(loads, 2, passes);
    return 0;
}
