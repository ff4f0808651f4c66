// Collectives of float32 between processes of one node: libddp (buffers in shared and in private memory),
// Open MPI, Gloo's library and PyTorch's gloo (PYTHON_EXEC names a Python with PyTorch). They run in turn in
// each pass, and medians over the passes count. Prints ratios and their bars; slow runs are no failure.
//
// The other libraries run as their users run them: Open MPI binds ranks to cores, and yields only where ranks
// share a core; gloo uses the loopback interface, with threads on all cores.
//
//   bench_collectives [--passes N] [--only COLLECTIVE] [--mpi PROGRAM] [--gloo PROGRAM]
//                     [--ddprun PROGRAM --torch SCRIPT]
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "libddp_collective.h"
#include "torch_python.h"

namespace {

using Sizes = std::vector<std::size_t>;
using Times = std::map<std::size_t, double>;  ///< microseconds by bytes
using Contestant = std::function<Times(const Sizes&)>;

const Sizes kTwoRankSizes = {4,         64,      256,     1024,    4096,    16 << 10, 64 << 10, 256 << 10,
                             512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 25 << 20, 64 << 20};
/// Typical sizes of gradient buckets.
const Sizes kTorchSizes = {4096, 1 << 20, 25 << 20, 64 << 20};
/// Sizes of the collectives other than all_reduce.
const Sizes kOtherSizes = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
const Sizes kFourRankSizes = {4, 4096, 64 << 10, 1 << 20, 16 << 20};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[values.size() / 2];
}

Times read_times(FILE* from) {
    Times times;
    char line[256];
    std::size_t bytes = 0;
    double us = 0;
    while (::fgets(line, sizeof line, from) != nullptr) {
        if (::sscanf(line, "%zu %lf", &bytes, &us) == 2) times[bytes] = us;
    }
    return times;
}

/// Forks `ranks` processes. Rank 0 writes "bytes microseconds" to its `out`.
Times forked(int ranks, const std::function<void(int rank, FILE* out)>& body) {
    int ends[2];
    if (::pipe(ends) != 0) return {};
    for (int rank = 0; rank < ranks; ++rank) {
        if (::fork() != 0) continue;
        ::close(ends[0]);
        bench::bind_to(rank);
        FILE* out = ::fdopen(ends[1], "w");
        body(rank, out);
        ::fflush(out);
        ::_exit(0);
    }
    ::close(ends[1]);
    FILE* in = ::fdopen(ends[0], "r");
    Times times = read_times(in);
    ::fclose(in);
    while (::wait(nullptr) > 0) {
    }
    return times;
}

enum class Memory { Shared, Private };

Times run_libddp(bench::Collective collective, int ranks, Memory memory, const Sizes& sizes) {
    const ddprun::UniqueFd segment = ddp::make_segment({.local_world_size = static_cast<std::uint32_t>(ranks),
                                                        .world_size = static_cast<std::uint32_t>(ranks)});
    return forked(ranks, [&](int rank, FILE* out) {
        ddprun::WorkerEnv env = ddp::testing::environment_of(rank, ranks);
        env.segment_fd = segment.get();
        const auto group = ddp::ProcessGroup::create(ddp::Context(env));
        const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
        std::vector<float> own(memory == Memory::Private ? 2 * most / sizeof(float) : 0);
        float* const from = memory == Memory::Private
                                ? own.data()
                                : reinterpret_cast<float*>(group->allocate_shared(2 * most).data());
        for (const std::size_t bytes : sizes) {
            const double us = bench::microseconds_per_call(ranks, from, bytes, [&](std::size_t count) {
                bench::call_libddp(*group, collective, from, from + most / sizeof(float), count);
            });
            if (rank == 0) fmt::print(out, "{} {:.4f}\n", bytes, us);
        }
    });
}

Times run_command(std::string command, const Sizes& sizes) {
    for (const std::size_t bytes : sizes) command += fmt::format(" {}", bytes);
    FILE* in = ::popen((command + " 2>/dev/null").c_str(), "r");
    if (in == nullptr) return {};
    Times times = read_times(in);
    ::pclose(in);
    return times;
}

/// `command` is a program and the collective.
Times run_mpi(const std::string& command, int ranks, const Sizes& sizes) {
    // `mpirun` may be MPICH's where both are installed.
    const bool has_own_name = std::system("command -v mpirun.openmpi >/dev/null 2>&1") == 0;
    return run_command(
        fmt::format("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 {} {} -np {} {}",
                    has_own_name ? "mpirun.openmpi" : "mpirun",
                    ranks > ::sysconf(_SC_NPROCESSORS_ONLN) ? "--oversubscribe" : "--bind-to core", ranks,
                    command),
        sizes);
}

/// The bytes per microsecond that two processes together copy: the yardstick for large buffers.
double copy_bandwidth() {
    constexpr std::size_t kBytes = 64 << 20;
    constexpr int kRounds = 15;
    const Times times = forked(2, [&](int rank, FILE* out) {
        std::vector<float> from(kBytes / sizeof(float), 1.0F), to(kBytes / sizeof(float), 2.0F);
        std::vector<double> rounds;
        for (int round = 0; round < kRounds; ++round) {
            const double before = bench::now_us();
            std::memcpy(to.data(), from.data(), kBytes);
            rounds.push_back(bench::now_us() - before);
            asm volatile("" : : "r"(to.data()) : "memory");
        }
        if (rank == 0) fmt::print(out, "{} {:.4f}\n", kBytes, median(rounds));
    });
    return times.empty() ? 0 : 2.0 * kBytes / times.at(kBytes);
}

struct Table {
    std::vector<std::string> names;
    std::vector<std::map<std::size_t, std::vector<double>>> samples;

    /// 0 without measurements.
    [[nodiscard]] double us(std::size_t contestant, std::size_t bytes) const {
        const auto found = samples[contestant].find(bytes);
        return found == samples[contestant].end() ? 0 : median(found->second);
    }
};

Table measure(const std::vector<std::pair<std::string, Contestant>>& contestants, const Sizes& sizes,
              int passes) {
    Table table;
    for (const auto& [name, run] : contestants) table.names.push_back(name);
    table.samples.resize(contestants.size());
    for (int pass = 0; pass < passes; ++pass) {
        for (std::size_t c = 0; c < contestants.size(); ++c) {
            for (const auto& [bytes, us] : contestants[c].second(sizes))
                table.samples[c][bytes].push_back(us);
        }
    }
    return table;
}

std::string ratio(double peer, double ours) {
    return peer > 0 && ours > 0 ? fmt::format("{:.2f}", peer / ours) : "-";
}

void print_table(const Table& table, const Sizes& sizes) {
    fmt::print("{:>9}", "size");
    for (const std::string& name : table.names) fmt::print(" {:>15}", name + " us");
    fmt::print(" {:>14}", "private/shared");
    for (std::size_t c = 2; c < table.names.size(); ++c) {
        fmt::print(" {:>14} {:>14}", table.names[c] + "/shared", table.names[c] + "/private");
    }
    fmt::print("\n");
    for (const std::size_t bytes : sizes) {
        fmt::print("{:>9}", ddprun::format_bytes(bytes));
        for (std::size_t c = 0; c < table.names.size(); ++c) fmt::print(" {:>15.2f}", table.us(c, bytes));
        fmt::print(" {:>14}", ratio(table.us(1, bytes), table.us(0, bytes)));
        for (std::size_t c = 2; c < table.names.size(); ++c) {
            fmt::print(" {:>14} {:>14}", ratio(table.us(c, bytes), table.us(0, bytes)),
                       ratio(table.us(c, bytes), table.us(1, bytes)));
        }
        fmt::print("\n");
    }
}

const char* verdict(bool holds) { return holds ? "met" : "NOT MET"; }

/// Prints the smallest ratio peer/ours over sizes of at least `from` bytes, and its size.
void print_bar(const Table& table, const std::string& peer, Memory memory, std::size_t from, double bar,
               const Sizes& sizes) {
    const std::size_t ours = memory == Memory::Shared ? 0 : 1;
    for (std::size_t c = 2; c < table.names.size(); ++c) {
        if (table.names[c] != peer) continue;
        double least = 1e9;
        std::size_t where = 0;
        for (const std::size_t bytes : sizes) {
            if (bytes < from || table.us(c, bytes) <= 0) continue;
            const double r = table.us(c, bytes) / table.us(ours, bytes);
            if (r < least) least = r, where = bytes;
        }
        if (where == 0) continue;
        fmt::print("  {} / {}: at least {:.2f} wanted, least is {:.2f} at {}: {}\n", peer, table.names[ours],
                   bar, least, ddprun::format_bytes(where), verdict(least >= bar));
    }
}

// The reduction must read and write every rank's buffer: 2 * 64 MiB read, 2 * 64 MiB written. A copy of b
// bytes reads and writes b bytes. So the least time is that of two processes that together copy 2 * 64 MiB.
// Both are measured in turn, since a machine's bandwidth changes with its other load. Private buffers must be
// staged, which moves twice as much.
void print_copy_bar(int passes) {
    constexpr std::size_t kBytes = 64 << 20;
    std::vector<double> bandwidths, shared, staged;
    for (int pass = 0; pass < passes; ++pass) {
        const double bandwidth = copy_bandwidth();
        const double least = 2.0 * kBytes / bandwidth;
        bandwidths.push_back(bandwidth);
        shared.push_back(run_libddp(bench::Collective::AllReduce, 2, Memory::Shared, {kBytes})[kBytes] /
                         least);
        staged.push_back(run_libddp(bench::Collective::AllReduce, 2, Memory::Private, {kBytes})[kBytes] /
                         least);
    }
    const double bandwidth = median(bandwidths);
    fmt::print("  64 MiB: two processes copy {:.1f} GB/s together, which allows {:.0f} us\n",
               bandwidth * 1e-3, 2.0 * kBytes / bandwidth);
    fmt::print("  shared: {:.2f} times that (least {:.2f}), at most 1.30 wanted: {}\n", median(shared),
               *std::min_element(shared.begin(), shared.end()), verdict(median(shared) <= 1.3));
    fmt::print("  private, staged: {:.2f} times that\n", median(staged));
}

}  // namespace

int main(int argc, char** argv) {
    ::setvbuf(stdout, nullptr, _IOLBF, 0);
    int passes = 5;
    std::string only, mpi, gloo, ddprun, torch;
    const std::string python = bench::torch_python();
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--passes") passes = std::max(1, std::atoi(argv[i + 1]));
        if (option == "--only") only = argv[i + 1];
        if (option == "--mpi") mpi = argv[i + 1];
        if (option == "--gloo") gloo = argv[i + 1];
        if (option == "--ddprun") ddprun = argv[i + 1];
        if (option == "--torch") torch = argv[i + 1];
    }
    const auto contestants = [&](const std::string& name, int ranks) {
        const bench::Collective collective = bench::collective_named(name);
        const auto ours = [=](Memory memory) {
            return [=](const Sizes& sizes) { return run_libddp(collective, ranks, memory, sizes); };
        };
        std::vector<std::pair<std::string, Contestant>> all = {{"shared", ours(Memory::Shared)},
                                                               {"private", ours(Memory::Private)}};
        if (!mpi.empty())
            all.emplace_back("mpi",
                             [=](const Sizes& sizes) { return run_mpi(mpi + " " + name, ranks, sizes); });
        if (!gloo.empty()) {
            // Gloo takes 0.3 ms for the smallest message, so it is measured from 64 KiB only.
            all.emplace_back("gloo", [=](Sizes sizes) {
                std::erase_if(sizes, [](std::size_t bytes) { return bytes < (64 << 10); });
                return run_command(fmt::format("{} {} {}", gloo, ranks, name), sizes);
            });
        }
        if (!torch.empty() && !python.empty()) {
            all.emplace_back("torch", [=](Sizes sizes) {
                if (collective == bench::Collective::AllReduce)
                    std::erase_if(sizes, [](std::size_t bytes) {
                        return std::ranges::find(kTorchSizes, bytes) == kTorchSizes.end();
                    });
                return run_command(
                    fmt::format("OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo {} --numa-binding=none "
                                "--prefix=none --nproc-per-node={} {} {} {}",
                                ddprun, ranks, python, torch, name),
                    sizes);
            });
        }
        return all;
    };

    for (const char* const name : bench::kCollectives) {
        if (name == std::string("all_reduce") || (!only.empty() && only != name)) continue;
        fmt::print("{}, 2 ranks, float32, input written before each call, medians over {} passes\n", name,
                   passes);
        const Table table = measure(contestants(name, 2), kOtherSizes, passes);
        print_table(table, kOtherSizes);
        for (const Memory memory : {Memory::Shared, Memory::Private}) {
            print_bar(table, "mpi", memory, 0, 1.0, kOtherSizes);
            print_bar(table, "torch", memory, 0, 5.0, kOtherSizes);
        }
    }
    if (!only.empty() && only != "all_reduce") return 0;

    fmt::print("all_reduce, 2 ranks, float32 sum, buffer written before each call, medians over {} passes\n",
               passes);
    const Table two = measure(contestants("all_reduce", 2), kTwoRankSizes, passes);
    print_table(two, kTwoRankSizes);
    fmt::print("bars\n");
    print_bar(two, "torch", Memory::Shared, 0, 6.0, kTwoRankSizes);
    print_bar(two, "torch", Memory::Private, 1 << 20, 5.0, kTwoRankSizes);
    for (const Memory memory : {Memory::Shared, Memory::Private}) {
        print_bar(two, "gloo", memory, 4 << 20, 7.0, kTwoRankSizes);
        print_bar(two, "mpi", memory, 0, 1 / 1.1, kTwoRankSizes);
    }
    print_copy_bar(2 * passes + 1);

    fmt::print("4 ranks on {} CPUs: more ranks than cores must not collapse\n",
               ::sysconf(_SC_NPROCESSORS_ONLN));
    print_table(measure(contestants("all_reduce", 4), kFourRankSizes, std::min(passes, 3)), kFourRankSizes);
    return 0;
}
