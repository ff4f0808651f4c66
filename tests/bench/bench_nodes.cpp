// Collectives of float32 between two hosts with two ranks each, and small all-reduces between 16 hosts with
// one (network namespaces of this machine, TCP): libddp (buffers in shared memory, as DDP's buckets),
// PyTorch's gloo and Open MPI, in turns, each started by its own launcher or ddprun. Prints medians over the
// passes of each program's median; 0 for a program that is missing (PYTHON_EXEC names a Python with PyTorch)
// or takes more than three minutes. usage: bench_nodes [--passes N] [--sizes BYTES,...]
// [--only COLLECTIVE|hosts] DDPRUN HOST_INIT ON_HOST TORCH_SCRIPT [--mpi PROGRAM]
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

#include "libddp_collective.h"
#include "tests/support/hosts.h"
#include "tests/support/run_program.h"
#include "tests/system/mpi_launchers.h"
#include "torch_python.h"

namespace ddprun::test {
namespace {

using Words = std::vector<std::string>;
const char* const kSizes = "4096,65536,262144,1048576,2097152,4194304,16777216,67108864";
const char* const kSmallSizes = "4,1024,4096,16384";

using Times = std::map<std::string, std::vector<double>>;  ///< microseconds of each pass, by size

/// One rank of libddp: COLLECTIVE SIZE...
int be_rank(int argc, char** argv) {
    // A host's only rank believes that it has a core to spare for a progress thread.
    const auto group = ddp::ProcessGroup::create(ddp::Context::from_env(),
                                                 {.progress = ddp::ProcessGroupOptions::Progress::Inline});
    const bench::Job job(argc, argv);
    auto* const from = reinterpret_cast<float*>(group->allocate_shared(2 * job.most()).data());
    bench::print_all(group->rank(), group->size(), from, job.sizes, [&](std::size_t count) {
        bench::call_libddp(*group, job.collective, from, from + job.most() / sizeof(float), count);
    });
    return 0;
}

/// A ddprun on each host.
std::string under_ddprun(const Hosts& hosts, int per_host, const std::string& ddprun, const Words& worker) {
    std::vector<std::unique_ptr<Program>> nodes;
    for (int host = 0; host < hosts.count(); ++host) {
        const Words words{"env",
                          "DDPRUN_TOKEN=secret of the job",
                          "OMP_NUM_THREADS=1",
                          "GLOO_SOCKET_IFNAME=eth0",
                          ddprun,
                          "--prefix=none",
                          "--nnodes=" + std::to_string(hosts.count()),
                          "--nproc-per-node=" + std::to_string(per_host),
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

/// The programs, as the command line names them.
struct Contestants {
    std::string ddprun, torch_script, mpi_program;
    std::string python = bench::torch_python();
    std::string self = std::filesystem::read_symlink("/proc/self/exe");
    int passes = 3;
    std::string sizes;  ///< "4096,65536"; "" for all

    [[nodiscard]] Words sizes_or(const char* all) const {
        Words words;
        std::istringstream list(sizes.empty() ? all : sizes);
        for (std::string size; std::getline(list, size, ',');) words.push_back(size);
        return words;
    }
};

void compare(const Contestants& with, const Hosts& hosts, int per_host, const std::string& collective,
             const Words& sizes) {
    // It believes that each host has all cores for itself, and would spin on them.
    const Words yielding{"env", "OMPI_MCA_mpi_yield_when_idle=1"};
    const Words job = join_words({collective}, sizes);
    Times ours, gloo, mpi;
    for (int pass = 0; pass < with.passes; ++pass) {
        take("libddp", under_ddprun(hosts, per_host, with.ddprun, join_words({with.self, "--rank"}, job)),
             ours);
        if (!with.python.empty() && per_host > 1)
            take(
                "gloo",
                under_ddprun(hosts, per_host, with.ddprun, join_words({with.python, with.torch_script}, job)),
                gloo);
        if (!with.mpi_program.empty())
            take("Open MPI",
                 run(open_mpi_on(hosts, per_host, join_words(yielding, join_words({with.mpi_program}, job))))
                     .out,
                 mpi);
    }
    fmt::print(
        "{}, {} hosts x {} ranks, {} passes in turns, microseconds\n{:>10} {:>10} {:>10} {:>10} {:>12} {:>12}\n",
        collective, hosts.count(), per_host, with.passes, "bytes", "libddp", "gloo", "Open MPI", "gloo/ours",
        "MPI/ours");
    for (const std::string& size : sizes) {
        const double own = median(ours[size]), theirs = median(gloo[size]), others = median(mpi[size]);
        fmt::print("{:>10} {:>10.1f} {:>10.1f} {:>10.1f} {:>12.2f} {:>12.2f}\n", size, own, theirs, others,
                   theirs / own, others / own);
    }
    std::fflush(stdout);
}

int run_all(int argc, char** argv) {
    Contestants with;
    std::string only;
    for (; argc > 2 && std::strncmp(argv[1], "--", 2) == 0; argc -= 2, argv += 2) {
        if (std::strcmp(argv[1], "--passes") == 0) with.passes = std::max(1, std::atoi(argv[2]));
        else if (std::strcmp(argv[1], "--sizes") == 0) with.sizes = argv[2];
        else only = argv[2];
    }
    if (argc < 5) {
        fmt::print(
            stderr,
            "usage: bench_nodes [--passes N] [--sizes BYTES,...] [--only COLLECTIVE|hosts] DDPRUN HOST_INIT ON_HOST "
            "TORCH_SCRIPT [--mpi PROGRAM]\n");
        return 64;
    }
    with.ddprun = argv[1], with.torch_script = argv[4];
    if (argc > 6) with.mpi_program = argv[6];
    ::setenv("HOST_INIT", argv[2], 1);
    ::setenv("ON_HOST", argv[3], 1);
    if (const auto reason = Hosts::why_not()) {
        fmt::print("no hosts on this machine: {}\n", *reason);
        return 0;
    }
    if (only != "hosts") {
        const Hosts hosts(2);
        for (const char* const collective : bench::kCollectives)
            if (only.empty() || only == collective)
                compare(with, hosts, 2, collective, with.sizes_or(kSizes));
    }
    if (only.empty() || only == "hosts")
        compare(with, Hosts(16), 1, "all_reduce", with.sizes_or(kSmallSizes));
    return 0;
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    if (argc > 3 && std::strcmp(argv[1], "--rank") == 0) return ddprun::test::be_rank(argc - 1, argv + 1);
    return ddprun::test::run_all(argc, argv);
}
