// What recovery in place costs a step: prepare() and commit() with 2.5 KB of Own values and a sampler, as a
// share of a step of 0.5 ms and of one of 13.8 ms (bars: 3 % and 1 %), and with 1 MiB of Moving state. And
// the rate at which a new process gets its state from another rank (bar: 3 GB/s).
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "collective_loop.h"
#include "ddp/recovery.h"
#include "ddp/recovery/transfer.h"
#include "ddp/sampler.h"
#include "ddp/testing.h"
#include "env/worker_env.h"

namespace {

using Kind = ddp::Recovery::Kind;

constexpr int kUnits = 20000, kRounds = 5;

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                     values.end());
    return values[values.size() / 2];
}

/// Microseconds of prepare() and commit().
double measure_commit(std::size_t moving_bytes, bool has_own) {
    std::vector<std::uint8_t> moving(moving_bytes);
    std::mt19937_64 rng(1);
    ddp::DistributedSampler sampler(1 << 20, 1, 0);
    ddp::Recovery recovery(ddp::Context(ddp::testing::environment_of(0, 1)));
    recovery.keep("sampler", sampler);
    if (moving_bytes > 0)
        recovery.keep("moving", {ddp::tensor_of("m", moving, {static_cast<std::int64_t>(moving_bytes)})},
                      Kind::Moving);
    if (has_own) recovery.keep_value("rng", rng, Kind::Own);
    std::vector<double> rounds;
    recovery.run([&](ddp::ProcessGroup&, const ddp::Start&) {
        const int units = moving_bytes > 0 ? kUnits / 100 : kUnits;
        for (int round = 0; round < kRounds; ++round) {
            const double before = bench::now_us();
            for (int unit = 0; unit < units; ++unit) {
                recovery.prepare();
                recovery.commit([&] { sampler.advance(1); });
            }
            rounds.push_back((bench::now_us() - before) / units);
        }
    });
    return median(rounds);
}

/// GB/s of `send`, which brings `bytes` from rank 0 to rank 1.
double measure_transfer(std::size_t bytes,
                        const std::function<void(ddp::ProcessGroup&, std::span<const ddp::Tensor>)>& send) {
    constexpr std::size_t kTensors = 64;
    std::vector<double> rates;
    ddp::testing::run_ranks(2, [&](ddp::ProcessGroup& group) {
        std::vector<std::uint8_t> memory(bytes, static_cast<std::uint8_t>(1 + group.rank()));
        std::vector<ddp::Tensor> tensors;
        for (std::size_t i = 0; i < kTensors; ++i) {
            const std::size_t each = bytes / kTensors;
            tensors.push_back(ddp::tensor_of(std::to_string(i), std::span(memory).subspan(i * each, each),
                                             {static_cast<std::int64_t>(each)}));
        }
        for (int round = 0; round < kRounds; ++round) {
            group.barrier().wait();
            const double before = bench::now_us();
            send(group, tensors);
            group.barrier().wait();
            if (group.rank() == 0)
                rates.push_back(static_cast<double>(bytes) * 1e-3 / (bench::now_us() - before));
        }
    });
    return median(rates);
}

double measure_memcpy(std::size_t bytes) {
    std::vector<std::uint8_t> from(bytes, 1), to(bytes, 2);
    std::vector<double> rates;
    for (int round = 0; round < kRounds; ++round) {
        const double before = bench::now_us();
        std::memcpy(to.data(), from.data(), bytes);
        rates.push_back(static_cast<double>(bytes) * 1e-3 / (bench::now_us() - before));
    }
    return median(rates);
}

}  // namespace

int main() {
    const double plain = measure_commit(0, false), own = measure_commit(0, true);
    constexpr std::size_t kMoving = 1 << 20;
    const double moving = measure_commit(kMoving, false);
    fmt::print(
        "prepare() and commit(): {:.2f} us with a sampler; {:.2f} us with 2.5 KB of Own values: {:.2f} % of 0.5 ms, {:.3f} % of "
        "13.8 ms\n",
        plain, own, own / 500 * 100, own / 13800 * 100);
    fmt::print("1 MiB of Moving state: {:.1f} us more, {:.1f} GB/s\n", moving - plain,
               kMoving * 1e-3 / (moving - plain));
    constexpr std::size_t kState = 256 << 20;
    const double rate =
        measure_transfer(kState, [](ddp::ProcessGroup& group, std::span<const ddp::Tensor> state) {
            ddp::run_round(group, {{0, 1}}, state);
        });
    const double messages =
        measure_transfer(kState, [](ddp::ProcessGroup& group, std::span<const ddp::Tensor> state) {
            std::vector<ddp::Message> batch;
            for (const ddp::Tensor& one : state)
                batch.push_back(
                    {group.rank() == 0 ? ddp::Message::Direction::Send : ddp::Message::Direction::Recv,
                     one.memory, 1 - group.rank()});
            group.batch_send_recv(std::move(batch)).wait();
        });
    fmt::print("a state of 256 MiB to another rank: {:.1f} GB/s (by messages {:.1f}); memcpy {:.1f}\n", rate,
               messages, measure_memcpy(kState));
    return 0;
}
