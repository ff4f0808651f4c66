// One command on several hosts against its starter alone: `ddprun --hosts` with a worker per host, and the
// same number of parallel `ssh HOST true`, in turns. The hosts are this machine's (tests/support/hosts.h),
// each with a real sshd, so all share its cores. The same in jobs of a real Slurm against `srun true` on the
// other hosts, both with salloc around them. Prints medians and ratios; asserts nothing. usage:
// bench_start_hosts DDPRUN STAMP HOST_INIT ON_HOST
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/slurm_hosts.h"
#include "tests/support/ssh_hosts.h"

namespace ddprun::test {
namespace {

double now_ms() {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// The file in which each worker notes its first moment (stamp.cpp).
class Stamps {
  public:
    explicit Stamps(std::string path) : path_(std::move(path)) {
        const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT, 0600);
        if (fd < 0 || ::ftruncate(fd, kBytes) != 0) std::abort();
        words_ =
            static_cast<std::uint64_t*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        ::close(fd);
    }
    ~Stamps() { ::munmap(words_, kBytes); }
    Stamps(const Stamps&) = delete;
    Stamps& operator=(const Stamps&) = delete;
    [[nodiscard]] const std::string& path() const { return path_; }
    void clear() { std::memset(words_, 0, kBytes); }
    [[nodiscard]] double last_ms() const {
        return static_cast<double>(*std::max_element(words_ + 1, words_ + 1 + words_[0])) / 1e6;
    }

  private:
    static constexpr std::size_t kBytes = 65536 * 8;  // as stamp.cpp maps
    std::string path_;
    std::uint64_t* words_ = nullptr;
};

template <class Run>
double timed(const Run& run_it) {
    const double begun = now_ms();
    const Outcome outcome = run_it();
    if (outcome.status != 0) fmt::print(stderr, "{}\n", outcome.err);
    return now_ms() - begun;
}
double timed(const std::vector<std::string>& command) {
    return timed([&] { return run(command); });
}

void compare(int others, const char* ddprun, const char* stamp, int rounds) {
    Hosts hosts(others + 1);
    const SshHosts ssh(hosts);
    Stamps stamps(hosts.shared() + "/stamps");
    std::string names, bare;
    for (int host = 0; host <= others; ++host) names += (host == 0 ? "" : ",") + Hosts::name(host);
    for (int host = 1; host <= others; ++host) bare += "ssh " + Hosts::name(host) + " true & ";
    bare += "wait";
    std::vector<double> ssh_alone, to_instruction, to_end;
    for (int round = 0; round < rounds; ++round) {
        ssh_alone.push_back(timed(hosts.command(0, {"sh", "-c", bare})));
        stamps.clear();
        const double begun = now_ms();
        to_end.push_back(timed(hosts.command(
            0, {ddprun, "-q", "--hosts=" + names, "--nproc-per-node=1", stamp, stamps.path()})));
        to_instruction.push_back(stamps.last_ms() - begun);
    }
    const double alone = median(ssh_alone), first = median(to_instruction), end = median(to_end);
    fmt::print(
        "{:>3} hosts: {} x ssh true {:7.1f} ms   ddprun: all workers' first instruction {:7.1f} ms (+{:.1f} ms, {:.2f}x), end {:7.1f} ms ({:.2f}x)\n",
        others + 1, others, alone, first, first - alone, first / alone, end, end / alone);
    std::fflush(stdout);
}

void compare_in_slurm(int others, const char* ddprun, const char* stamp, int rounds) {
    Hosts hosts(others + 1);
    const SlurmHosts slurm(hosts);
    Stamps stamps(hosts.shared() + "/stamps");
    const std::string all = "-N" + std::to_string(others + 1), count = std::to_string(others);
    std::vector<double> srun_alone, to_instruction, to_end;
    for (int round = 0; round < rounds; ++round) {
        srun_alone.push_back(timed([&] {
            return slurm.run({"salloc", "-Q", all, "srun", "--overlap", "-N" + count, "-n" + count,
                              "--mpi=none", "-x", Hosts::name(0), "true"});
        }));
        stamps.clear();
        const double begun = now_ms();
        to_end.push_back(timed([&] {
            return slurm.run({"salloc", "-Q", all, ddprun, "-q", "--nproc-per-node=1", stamp, stamps.path()});
        }));
        to_instruction.push_back(stamps.last_ms() - begun);
    }
    const double alone = median(srun_alone), first = median(to_instruction), end = median(to_end);
    fmt::print(
        "{:>3} hosts of Slurm: srun true on {} {:7.1f} ms   ddprun: all workers' first instruction {:7.1f} ms, end {:7.1f} ms (+{:.1f} ms, {:.2f}x)\n",
        others + 1, others, alone, first, end, end - alone, end / alone);
    std::fflush(stdout);
}

}  // namespace
}  // namespace ddprun::test

int main(int argc, char** argv) {
    using namespace ddprun::test;
    if (argc != 5) return 64;
    ::setenv("HOST_INIT", argv[3], 1);
    ::setenv("ON_HOST", argv[4], 1);
    if (const auto reason = SshHosts::why_not()) {
        fmt::print("left out: {}\n", *reason);
        return 0;
    }
    if (!SlurmHosts::why_not()) compare_in_slurm(2, argv[1], argv[2], 9);
    compare(2, argv[1], argv[2], 7);
    compare(16, argv[1], argv[2], 3);
    compare(64, argv[1], argv[2], 3);
    return 0;
}
