// Loader with two reading threads against one, on a decode of 1 ms a sample: one that sleeps (a disk, a
// service) and one that computes (a codec), which needs two idle cores. Bar: 1.9x. Beside it samples that are
// only copied, for which another thread is no help: their time shows what sharing a batch costs.
#include <fmt/core.h>
#include <stdio.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "ddp/loader.h"

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr std::size_t kBytes = 3072;
constexpr microseconds kDecode{1000};
constexpr double kBar = 1.9;

struct Load {
    std::string name;
    std::size_t samples, batch_size, prefetch;
    std::function<void()> decode;
    bool has_bar;
};

void spin() {
    const auto end = steady_clock::now() + kDecode;
    while (steady_clock::now() < end) {
    }
}

/// Microseconds per sample.
double measure(const Load& load, std::size_t workers) {
    const std::vector<std::byte> source(kBytes);
    const ddp::FunctionDataset data(load.samples, {kBytes},
                                    [&](std::size_t, ddp::FunctionDataset::Fields fields) {
                                        load.decode();
                                        std::memcpy(fields[0].data(), source.data(), kBytes);
                                    });
    std::vector<std::size_t> order(load.samples);
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto begin = steady_clock::now();
    ddp::Loader loader(data, order,
                       {.batch_size = load.batch_size, .prefetch = load.prefetch, .num_workers = workers});
    while (loader.next() != nullptr) {
    }
    const std::chrono::duration<double, std::micro> took = steady_clock::now() - begin;
    return took.count() / static_cast<double>(load.samples);
}

double median(std::vector<double> values) {
    std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
    return values[values.size() / 2];
}

void print_row(const Load& load, int passes) {
    std::vector<double> one, two, ratios;
    for (int pass = 0; pass < passes; ++pass) {
        one.push_back(measure(load, 1));
        two.push_back(measure(load, 2));
        ratios.push_back(one.back() / two.back());
    }
    const double ratio = median(ratios);
    fmt::print("{:<44} {:>10.2f} {:>10.2f} {:>6.2f} {}\n", load.name, median(one), median(two), ratio,
               !load.has_bar   ? ""
               : ratio >= kBar ? "met (1.9)"
                               : "NOT MET (1.9)");
}

}  // namespace

int main() {
    ::setvbuf(stdout, nullptr, _IOLBF, 0);
    fmt::print("{:<44} {:>10} {:>10} {:>6} bar\n", "microseconds a sample with", "1 thread", "2 threads",
               "ratio");
    const auto sleep = [] { std::this_thread::sleep_for(kDecode); };
    for (const std::size_t ahead : {1, 2}) {
        for (const std::size_t batch : {1, 32}) {
            const std::string shape = fmt::format(", batches of {}, {} ahead", batch, ahead);
            print_row({"decode sleeps 1 ms" + shape, 320, batch, ahead, sleep, true}, 3);
            print_row({"decode computes 1 ms" + shape, 320, batch, ahead, spin, true}, 3);
        }
    }
    print_row({"copy of 3 KiB, batches of 32, 2 ahead", 320'000, 32, 2, [] {}, false}, 5);
    print_row({"copy of 3 KiB, batches of 256, 2 ahead", 320'000, 256, 2, [] {}, false}, 5);
    return 0;
}
