// All-reduce of float32 sums between two hosts with two ranks each (network namespaces of this machine, TCP):
// libddp (buffers in shared memory, as DDP's buckets), PyTorch's gloo and Open MPI, in turns, each started by
// its own launcher or ddprun. Prints medians over the passes of each program's median; 0 for a program that
// is missing (PYTHON_EXEC names a Python with PyTorch) or takes more than three minutes. Then libddp's
// reduce_scatter and all_gather of as many bytes in all. usage: bench_nodes DDPRUN HOST_INIT ON_HOST
// TORCH_SCRIPT [--mpi PROGRAM]
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "allreduce_loop.h"
#include "ddp/process_group.h"
#include "tests/support/hosts.h"
#include "tests/support/run_program.h"
#include "tests/system/mpi_launchers.h"
#include "torch_python.h"

namespace ddprun::test {
namespace {

constexpr int kPasses = 3;
const std::vector<std::string> kSizes{"4096", "65536", "1048576", "2097152", "4194304", "26214400"};

using Times = std::map<std::string, std::vector<double>>;  ///< microseconds of each pass, by size

/// One rank of libddp: OPERATION SIZE...
int be_rank(int argc, char** argv) {
    const std::string operation = argv[1];
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env());
    const std::vector<std::size_t> sizes = bench::sizes_from(argc - 1, argv + 1);
    const auto memory = group->allocate_shared(*std::max_element(sizes.begin(), sizes.end()));
    auto* const values = reinterpret_cast<float*>(memory.data());
    bench::print_all(group->rank(), values, sizes, [&](std::size_t count) {
        const std::size_t each = count / static_cast<std::size_t>(group->size());
        const ddp::Buffer all = ddp::buffer_of(std::span<float>(values, count));
        const ddp::Buffer own =
            ddp::buffer_of(std::span<float>(values + each * static_cast<std::size_t>(group->rank()), each));
        if (operation == "reduce_scatter") return group->reduce_scatter(own, all).wait();
        if (operation == "all_gather") return group->all_gather(all, own).wait();
        group->all_reduce(all).wait();
    });
    return 0;
}

/// A ddprun on each host.
std::string under_ddprun(const Hosts& hosts, const std::string& ddprun,
                         const std::vector<std::string>& worker) {
    std::vector<std::unique_ptr<Program>> nodes;
    for (int host = 0; host < hosts.count(); ++host) {
        std::vector<std::string> words{"env",
                                       "DDPRUN_TOKEN=secret of the job",
                                       "OMP_NUM_THREADS=1",
                                       "GLOO_SOCKET_IFNAME=eth0",
                                       ddprun,
                                       "--prefix=none",
                                       "--nnodes=" + std::to_string(hosts.count()),
                                       "--nproc-per-node=2",
                                       "--node-rank=" + std::to_string(host),
                                       "--master-addr=node00",
                                       "--master-port=29400"};
        nodes.push_back(std::make_unique<Program>(hosts.command(host, join_words(words, worker))));
    }
    std::string out;
    for (const auto& node : nodes) {
        const Outcome outcome = node->wait();
        if (outcome.status != 0) fmt::print(stderr, "{}", outcome.err);
        out += outcome.out;
    }
    return out;
}

void take(const char* whose, const std::string& out, Times& times) {
    fmt::print(stderr, "{}:\n{}", whose, out);
    std::istringstream lines(out);
    std::string size;
    for (double microseconds = 0; lines >> size >> microseconds;) times[size].push_back(microseconds);
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

int run_all(int argc, char** argv) {
    ::setenv("HOST_INIT", argv[2], 1);
    ::setenv("ON_HOST", argv[3], 1);
    if (const auto reason = Hosts::why_not()) {
        fmt::print("no hosts on this machine: {}\n", *reason);
        return 0;
    }
    const std::string ddprun = argv[1];
    // It believes that each host has all cores for itself, and would spin on them.
    const std::vector<std::string> yielding{"env", "OMPI_MCA_mpi_yield_when_idle=1"};
    const Hosts hosts(2);
    const std::string python = bench::torch_python();
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    Times ours, gloo, mpi, scattered, gathered;
    for (int pass = 0; pass < kPasses; ++pass) {
        const auto take_ours = [&](const char* operation, Times& times) {
            take(operation, under_ddprun(hosts, ddprun, join_words({self, "--rank", operation}, kSizes)),
                 times);
        };
        take_ours("all_reduce", ours);
        take_ours("reduce_scatter", scattered);
        take_ours("all_gather", gathered);
        if (!python.empty())
            take("gloo", under_ddprun(hosts, ddprun, join_words({python, argv[4]}, kSizes)), gloo);
        if (argc > 6)
            take("Open MPI",
                 run(open_mpi_on(hosts, 2, join_words(yielding, join_words({argv[6]}, kSizes)))).out, mpi);
    }
    fmt::print(
        "2 hosts x 2 ranks, {} passes in turns, microseconds\n{:>10} {:>10} {:>10} {:>10} {:>12} {:>12}\n",
        kPasses, "bytes", "libddp", "gloo", "Open MPI", "gloo/ours", "MPI/ours");
    for (const std::string& size : kSizes) {
        const double own = median(ours[size]), theirs = median(gloo[size]), others = median(mpi[size]);
        fmt::print("{:>10} {:>10.1f} {:>10.1f} {:>10.1f} {:>12.2f} {:>12.2f}\n", size, own, theirs, others,
                   theirs / own, others / own);
    }
    fmt::print("libddp\n{:>10} {:>14} {:>14}\n", "bytes", "reduce_scatter", "all_gather");
    for (const std::string& size : kSizes)
        fmt::print("{:>10} {:>14.1f} {:>14.1f}\n", size, median(scattered[size]), median(gathered[size]));
    return 0;
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    if (argc > 3 && std::strcmp(argv[1], "--rank") == 0) return ddprun::test::be_rank(argc - 1, argv + 1);
    if (argc >= 5) return ddprun::test::run_all(argc, argv);
    fmt::print(stderr, "usage: bench_nodes DDPRUN HOST_INIT ON_HOST TORCH_SCRIPT [--mpi PROGRAM]\n");
    return 64;
}
