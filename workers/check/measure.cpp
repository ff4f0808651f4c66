#include "measure.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "env/text.h"

namespace check {
namespace {

using Clock = std::chrono::steady_clock;

/// Rounds in flight: enough to keep a GPU busy while the host waits for the last of them.
constexpr std::uint64_t kRoundsAtOnce = 16;
constexpr int kWarmUps = 3;
constexpr std::size_t kPeriod = 251;  // a prime, so that a value in a wrong place is detected

/// Small whole numbers: sums are exact in any order, up to 2^24.
float value_of(int rank, std::size_t at) {
    return static_cast<float>((rank % 32 + 1) * static_cast<int>(at % kPeriod));
}

float sum_at(int ranks, std::size_t at) {
    float sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += value_of(rank, at);
    return sum;
}

double seconds_of(ddp::ProcessGroup& group, Values& values, std::uint64_t rounds) {
    group.barrier().synchronize();
    const Clock::time_point start = Clock::now();
    for (std::uint64_t done = 0; done < rounds;) {
        ddp::Work last;
        for (std::uint64_t i = 0; i < kRoundsAtOnce && done < rounds; ++i, ++done) {
            last = group.all_reduce(values.buffer());
            last.wait();
        }
        last.synchronize();
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Rank 0's number, so that all ranks use the same.
std::uint64_t rank_zeros_number(ddp::ProcessGroup& group, std::uint64_t mine) {
    const std::vector<std::string> all = group.all_gather_bytes(std::to_string(mine));
    return ddprun::parse_uint(all.front()).value_or(1);
}

}  // namespace

Values::Values(ddp::ProcessGroup& group, std::size_t bytes) {
    if (group.device().kind == ddp::Device::Kind::Cuda)
        ddp::cuda::check(cudaSetDevice(group.device().index), "choosing the device");
    const std::span<std::byte> memory = group.allocate_shared(bytes);
    buffer_ = {memory.data(), bytes / sizeof(float), ddp::DType::F32, group.device()};
}

void Values::fill(const std::vector<float>& values) {
    copy(buffer_.data, values.data(), cudaMemcpyHostToDevice);
}

std::vector<float> Values::read() const {
    std::vector<float> values(buffer_.count);
    copy(values.data(), buffer_.data, cudaMemcpyDeviceToHost);
    return values;
}

void Values::copy(void* to, const void* from, cudaMemcpyKind kind) const {
    if (buffer_.device.kind == ddp::Device::Kind::Cpu) {
        std::memcpy(to, from, buffer_.bytes());
        return;
    }
    ddp::cuda::check(cudaMemcpyAsync(to, from, buffer_.bytes(), kind, nullptr), "copying");
    const ddp::cuda::Event done;
    done.record(nullptr);
    for (cudaError_t code; (code = done.query()) != cudaSuccess; std::this_thread::yield()) {
        if (code != cudaErrorNotReady) ddp::cuda::check(code, "copying");
    }
}

double Measurement::gigabytes_per_second(std::size_t bytes) const {
    return seconds > 0 ? static_cast<double>(bytes) * static_cast<double>(rounds) / seconds * 1e-9 : 0;
}

double Measurement::bus_gigabytes_per_second(std::size_t bytes, int ranks) const {
    return gigabytes_per_second(bytes) * 2 * (ranks - 1) / ranks;
}

void verify_sums(ddp::ProcessGroup& group, Values& values) {
    std::vector<float> mine(values.buffer().count);
    for (std::size_t at = 0; at < mine.size(); ++at) mine[at] = value_of(group.rank(), at);
    values.fill(mine);
    group.all_reduce(values.buffer()).synchronize();
    std::vector<float> expected(std::min(kPeriod, mine.size()));
    for (std::size_t at = 0; at < expected.size(); ++at) expected[at] = sum_at(group.size(), at);
    const std::vector<float> sums = values.read();
    for (std::size_t at = 0; at < sums.size(); ++at) {
        if (sums[at] == expected[at % kPeriod]) continue;
        throw ddp::Error(fmt::format("rank {}: all-reduce gave {} in place of {} at element {} of {} ({})",
                                     group.rank(), sums[at], expected[at % kPeriod], at, sums.size(),
                                     group.describe()));
    }
}

Measurement measure(ddp::ProcessGroup& group, Values& values, std::chrono::nanoseconds span) {
    // Sums of zeros stay zeros after any number of rounds.
    values.fill(std::vector<float>(values.buffer().count, 0.0F));
    const double one_round = seconds_of(group, values, kWarmUps) / kWarmUps;
    const double wanted = std::chrono::duration<double>(span).count() / std::max(one_round, 1e-9);
    Measurement result;
    result.rounds =
        rank_zeros_number(group, static_cast<std::uint64_t>(std::clamp(std::round(wanted), 1.0, 1e7)));
    result.seconds = seconds_of(group, values, result.rounds);
    return result;
}

}  // namespace check
