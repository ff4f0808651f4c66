#pragma once

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

/// The loop that measures a collective of every library, so that only the call differs. Plain C++ without
/// libddp, because the programs of the other libraries include it.
///
/// The size of a call is that of its whole buffer: the sum's in all_reduce, the input's in reduce_scatter and
/// all_to_all, the output's in all_gather. all_reduce and broadcast work in place, the others have two
/// buffers. The last rank broadcasts, because rank 0, whose time counts, must receive.
namespace bench {

enum class Collective { AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast };
inline const char* const kCollectives[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                           "broadcast"};

/// Ends the program when there is no such collective.
inline Collective collective_named(const std::string& name) {
    for (int i = 0; i < 5; ++i) {
        if (name == kCollectives[i]) return static_cast<Collective>(i);
    }
    ::fprintf(stderr, "no collective '%s'\n", name.c_str());
    ::exit(64);
}

inline double now_us() {
    timespec ts{};
    ::clock_gettime(CLOCK_MONOTONIC, &ts);
    return static_cast<double>(ts.tv_sec) * 1e6 + static_cast<double>(ts.tv_nsec) * 1e-3;
}

inline void bind_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(cpu) % static_cast<unsigned>(::sysconf(_SC_NPROCESSORS_ONLN)), &set);
    ::sched_setaffinity(0, sizeof set, &set);
}

/// The words of a command line: a collective, and sizes in bytes.
struct Job {
    Collective collective;
    std::vector<std::size_t> sizes;
    /// The buffers of float32 have room for each size.
    std::vector<float> from, to;

    Job(int argc, char** argv) : collective(collective_named(argc > 1 ? argv[1] : "")) {
        for (int i = 2; i < argc; ++i) sizes.push_back(::strtoull(argv[i], nullptr, 10));
        from.resize(most() / sizeof(float)), to.resize(from.size());
    }
    [[nodiscard]] std::size_t most() const { return *std::max_element(sizes.begin(), sizes.end()); }
};

/// Small messages are timed in batches, because reading the clock takes as long as they do.
/// Many ranks share cores, and take long.
inline int batch_of(std::size_t bytes, int ranks) { return ranks > 8 ? 8 : bytes <= 4096 ? 64 : 1; }

/// The median microseconds of `call(count)`. As in a backward pass, the buffer (of two, the input) is written
/// before every timed call. Every rank makes the same number of calls.
template <class Call>
double microseconds_per_call(int ranks, float* buffer, std::size_t bytes, Call&& call) {
    const std::size_t count = bytes / sizeof(float);
    const int batch = batch_of(bytes, ranks);
    const int rounds = static_cast<int>(
        std::clamp<std::size_t>((std::size_t{128} << 20) / (bytes + 1), 11, ranks > 8 ? 21 : 301));
    std::vector<double> times;
    for (int round = 0; round < rounds + 3; ++round) {
        std::fill_n(buffer, count, 1.0F + static_cast<float>(round % 3));
        const double before = now_us();
        for (int i = 0; i < batch; ++i) call(count);
        const double after = now_us();
        if (round >= 3) times.push_back((after - before) / batch);
    }
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    return times[static_cast<std::size_t>(rounds / 2)];
}

/// Rank 0 prints "bytes microseconds" per size.
template <class Call>
void print_all(int rank, int ranks, float* buffer, const std::vector<std::size_t>& sizes, Call&& call) {
    for (const std::size_t bytes : sizes) {
        const double us = microseconds_per_call(ranks, buffer, bytes, call);
        if (rank == 0) ::printf("%zu %.4f\n", bytes, us), ::fflush(stdout);
    }
}

}  // namespace bench
