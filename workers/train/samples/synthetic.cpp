#include <fmt/core.h>

#include "data.h"
#include "env/text.h"

namespace train {
namespace {

using ddprun::Errc;
using ddprun::Error;
using ddprun::Result;

constexpr std::string_view kPrefix = "synthetic:";
constexpr std::int64_t kMostSamples = 100'000'000, kMostFeatures = 1 << 20;
/// Limit of the number of float32 values in one process.
constexpr std::size_t kMostValues = std::size_t{1} << 34;

/// SplitMix64 at any position of the sequence, so that no sample depends on those before it.
std::uint64_t random_at(std::uint64_t seed, std::uint64_t position) {
    std::uint64_t z = seed + (position + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/// 24 random bits as a number in [-1, 1).
float in_unit(std::uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-23F - 1.0F; }

}  // namespace

Result<std::optional<SyntheticSize>> parse_synthetic(std::string_view data) {
    if (!data.starts_with(kPrefix)) return std::optional<SyntheticSize>();
    const std::vector<std::string_view> words = ddprun::split(data.substr(kPrefix.size()), ',');
    if (words.size() != 3)
        return Error{Errc::InvalidArgument,
                     fmt::format("'{}' is not synthetic:SAMPLES,FEATURES,CLASSES", data), 0};
    const Result<std::int64_t> samples = ddprun::parse_int_between(words[0], 20, kMostSamples);
    if (!samples) return samples.error().with("samples");
    const Result<std::int64_t> features = ddprun::parse_int_between(words[1], 1, kMostFeatures);
    if (!features) return features.error().with("features");
    const Result<std::int64_t> classes = ddprun::parse_int_between(words[2], 2, kMostClasses);
    if (!classes) return classes.error().with("classes");
    const SyntheticSize size{static_cast<std::size_t>(*samples), static_cast<std::size_t>(*features),
                             static_cast<std::size_t>(*classes)};
    if (size.samples > kMostValues / size.features)
        return Error{Errc::InvalidArgument, fmt::format("'{}' has too many values to hold in memory", data),
                     0};
    return std::optional(size);
}

Samples make_samples(const SyntheticSize& size, std::uint64_t seed) {
    constexpr float kCorner = 0.5F, kSpread = 0.5F;
    // Separate streams, so that more samples do not move the corners.
    const std::uint64_t corners = random_at(seed, 0), noise = random_at(seed, 1), choice = random_at(seed, 2);
    Samples samples{"synthetic", size.features, size.classes, {}, {}};
    samples.values.resize(size.samples * size.features);
    samples.labels.resize(size.samples);
    for (std::size_t s = 0; s < size.samples; ++s) {
        const std::size_t label = random_at(choice, s) % size.classes;
        samples.labels[s] = static_cast<std::int32_t>(label);
        float* const row = samples.values.data() + s * size.features;
        for (std::size_t f = 0; f < size.features; ++f) {
            const bool up = (random_at(corners, label * size.features + f) >> 63) != 0;
            row[f] = (up ? kCorner : -kCorner) + kSpread * in_unit(random_at(noise, s * size.features + f));
        }
    }
    return samples;
}

}  // namespace train
