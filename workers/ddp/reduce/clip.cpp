#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "ddp/cuda/numbers.h"
#include "ddp/optimizer.h"
#include "ddp/reduce/loops.h"

namespace ddp {
namespace {

double value_of(float value) { return value; }
double value_of(double value) { return value; }
template <class Half>
double value_of(Half value) {
    return device::to_float(value);
}

/// Uses a fixed set of partial sums: the compiler may not reorder a single sum, and would not vectorise it.
template <class T>
double sum_of_squares(const T* values, std::size_t count) {
    constexpr std::size_t kLanes = 16;
    std::array<double, kLanes> sums = {};
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const double value = value_of(values[i + lane]);
            sums[lane] += value * value;
        }
    }
    for (; i < count; ++i) sums[i % kLanes] += value_of(values[i]) * value_of(values[i]);
    double sum = 0;
    for (const double partial : sums) sum += partial;
    return sum;
}

void scale_all(float* values, std::size_t count, double factor) {
    const auto by = static_cast<float>(factor);
    for (std::size_t i = 0; i < count; ++i) values[i] *= by;
}
void scale_all(double* values, std::size_t count, double factor) {
    for (std::size_t i = 0; i < count; ++i) values[i] *= factor;
}
template <class Half>
void scale_all(Half* values, std::size_t count, double factor) {
    const auto by = static_cast<float>(factor);
    for (std::size_t i = 0; i < count; ++i) device::round_to(device::to_float(values[i]) * by, values[i]);
}

/// Calls `loop` with the gradient's memory as its own type. Throws InvalidInput for device memory and
/// integers.
template <class Loop>
auto over(const Buffer& gradient, Loop loop) {
    if (gradient.device != Device{})
        throw InvalidInput(fmt::format(
            "clip_grad_norm: a gradient is on CUDA device {}; there a GradClipper clips, with the optimizer",
            gradient.device.index));
    switch (gradient.dtype) {
        case DType::F32: return loop(static_cast<float*>(gradient.data));
        case DType::F64: return loop(static_cast<double*>(gradient.data));
        case DType::BF16: return loop(static_cast<device::Bf16*>(gradient.data));
        case DType::F16: return loop(static_cast<device::F16*>(gradient.data));
        default:
            throw InvalidInput(fmt::format("clip_grad_norm: a gradient is {}, not of a floating type",
                                           name_of(gradient.dtype)));
    }
}

[[noreturn]] void throw_non_finite(std::span<const Buffer> gradients, double norm) {
    std::size_t first = 0;
    while (first + 1 < gradients.size() && std::isfinite(squares_of(gradients[first]))) ++first;
    throw Error(fmt::format(
        "clip_grad_norm: the norm of the gradients is {}, gradient {} is the first that is not finite; lower the "
        "learning rate, or skip such steps (NonFiniteNorm::Leave)",
        norm, first));
}

}  // namespace

std::uint64_t hash_of(std::string_view bytes, std::uint64_t seed) {
    // Four vectors of sums, and of the sums of these: they stay in registers, at the speed of memory.
    using Words = std::uint64_t __attribute__((vector_size(16)));
    constexpr std::size_t kVectors = 4, kBlock = kVectors * sizeof(Words);
    Words sums[kVectors] = {}, totals[kVectors] = {};
    const auto add = [&](const char* block) {
        for (std::size_t i = 0; i < kVectors; ++i) {
            Words words;
            std::memcpy(&words, block + i * sizeof words, sizeof words);
            totals[i] += sums[i] += words;
        }
    };
    for (; bytes.size() >= kBlock; bytes.remove_prefix(kBlock)) add(bytes.data());
    std::array<char, kBlock> rest = {};
    std::copy(bytes.begin(), bytes.end(), rest.begin());
    add(rest.data());
    const auto mix = [&seed](std::uint64_t word) {
        seed = std::rotl((seed ^ word) * 0x9e3779b97f4a7c15, 29);
    };
    for (std::size_t i = 0; i < kVectors; ++i)
        mix(sums[i][0]), mix(sums[i][1]), mix(totals[i][0]), mix(totals[i][1]);
    return seed;
}

double squares_of(const Buffer& gradient) {
    if (gradient.data == nullptr) return 0;
    return over(gradient, [&](const auto* values) { return sum_of_squares(values, gradient.count); });
}

void append_squares(const Buffer& buffer, std::size_t chunk, std::vector<double>& sums) {
    const std::size_t most = chunk / size_of(buffer.dtype);
    over(buffer, [&](const auto* values) {
        for (std::size_t at = 0; at < buffer.count; at += most)
            sums.push_back(sum_of_squares(values + at, std::min(most, buffer.count - at)));
    });
}

double clip_factor(double norm, double max_norm) {
    if (!(max_norm > 0))
        throw InvalidInput(
            fmt::format("clip_grad_norm: the largest norm is {}; it has to be positive", max_norm));
    return std::min(1.0, max_norm / (norm + 1e-6));
}

void scale_elements(const Buffer& buffer, double factor) {
    over(buffer, [&](auto* values) { scale_all(values, buffer.count, factor); });
}

double clip_grad_norm(std::span<const Buffer> gradients, double max_norm, NonFiniteNorm non_finite) {
    double squares = 0;
    for (const Buffer& gradient : gradients) squares += squares_of(gradient);
    const double norm = std::sqrt(squares);
    const double factor = clip_factor(norm, max_norm);
    if (!std::isfinite(norm)) {
        if (non_finite == NonFiniteNorm::Throw) throw_non_finite(gradients, norm);
        return norm;
    }
    if (factor == 1) return norm;
    for (const Buffer& gradient : gradients) {
        if (gradient.data != nullptr) scale_elements(gradient, factor);
    }
    return norm;
}

}  // namespace ddp
