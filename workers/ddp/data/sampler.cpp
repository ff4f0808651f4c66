#include "ddp/sampler.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "ddp/types.h"
#include "env/print.h"

namespace ddp {

namespace {

/// Fisher-Yates from the front.
void shuffle_with_32_bits(std::span<std::size_t> order, std::mt19937& generator) {
    const std::size_t n = order.size();
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = 0; i + 1 < n; ++i) std::swap(order[i], order[i + generator() % (n - i)]);
}

/// Fisher-Yates inside out, with the upper half of a number drawn first.
void shuffle_with_64_bits(std::span<std::size_t> order, std::mt19937& generator) {
    for (std::size_t i = 0; i < order.size(); ++i) {
        const std::uint64_t upper = generator(), lower = generator();
        const std::size_t place = (upper << 32 | lower) % (i + 1);
        order[i] = order[place];
        order[place] = i;
    }
}

}  // namespace

ShuffleRule shuffle_rule(std::size_t n) {
    return n < std::numeric_limits<std::uint32_t>::max() / 20 ? ShuffleRule::With32Bits
                                                              : ShuffleRule::With64Bits;
}

std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed, ShuffleRule rule) {
    std::vector<std::size_t> order(n);
    std::mt19937 generator(static_cast<std::uint32_t>(seed));
    switch (rule) {
        case ShuffleRule::With32Bits: shuffle_with_32_bits(order, generator); break;
        case ShuffleRule::With64Bits: shuffle_with_64_bits(order, generator); break;
    }
    return order;
}

std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed) {
    return random_permutation(n, seed, shuffle_rule(n));
}

namespace {

std::uint64_t divided(std::uint64_t samples, std::uint64_t by, bool whole_only) {
    return (samples + (whole_only ? 0 : by - 1)) / by;
}

/// "1618 samples shuffled by seed 7".
std::string describe(const SamplerState::Order& order) {
    return fmt::format("{} samples {}", order.samples,
                       order.shuffle ? fmt::format("shuffled by seed {}", order.seed) : "in their own order");
}

}  // namespace

DistributedSampler::DistributedSampler(std::size_t dataset_size, int world_size, int rank,
                                       SamplerOptions options)
    : dataset_size_(dataset_size), options_(options) {
    set_world(world_size, rank);
}

void DistributedSampler::set_world(int world_size, int rank) {
    if (world_size < 1 || rank < 0 || rank >= world_size)
        throw InvalidInput(fmt::format("sampler: rank {} is not in a world of {}", rank, world_size));
    world_size_ = static_cast<std::size_t>(world_size);
    rank_ = static_cast<std::size_t>(rank);
    move_to(state_);
}

std::size_t DistributedSampler::remaining() const {
    return dataset_size_ - std::min<std::size_t>(dataset_size_, state_.consumed);
}

/// The samples of one rank.
std::size_t DistributedSampler::share_of(std::size_t samples) const {
    return divided(samples, world_size_, options_.drop_last);
}

std::size_t DistributedSampler::size() const { return share_of(remaining()); }

std::uint64_t DistributedSampler::batches_per_epoch(std::size_t batch, bool whole_only) const {
    return divided(share_of(dataset_size_), batch, whole_only);
}

std::uint64_t DistributedSampler::batches_done(std::size_t batch, bool whole_only) const {
    return state_.epoch * batches_per_epoch(batch, whole_only) +
           divided(state_.consumed, batch * world_size_, whole_only);
}

std::vector<std::size_t> DistributedSampler::indices() const {
    std::vector<std::size_t> rest = rest_of_epoch();
    if (rest.empty()) note_nothing_left();
    if (state_.consumed == 0 && std::exchange(listed_, true) && options_.shuffle && dataset_size_ > 1)
        print_once("begins again, in the same order");
    return rest;
}

void DistributedSampler::note_nothing_left() const {
    if (advanced_) print_once("has no samples left for another pass");
}

void DistributedSampler::print_once(const char* what) const {
    if (rank_ != 0 || std::exchange(printed_, true)) return;
    ddprun::print(stderr,
                  "ddp: sampler: epoch {} {}: call set_epoch(epoch) or next_epoch() before each epoch\n",
                  state_.epoch, what);
}

std::vector<std::size_t> DistributedSampler::rest_of_epoch() const {
    std::vector<std::size_t> order;
    if (options_.shuffle) {
        order = random_permutation(dataset_size_, options_.seed + state_.epoch);
    } else {
        order.resize(dataset_size_);
        std::iota(order.begin(), order.end(), std::size_t{0});
    }
    std::vector<std::size_t> mine(size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
        // The list starts again behind its end: that is the padding.
        mine[i] = order[(state_.consumed + rank_ + i * world_size_) % dataset_size_];
    }
    return mine;
}

void DistributedSampler::advance(std::size_t samples) {
    state_.consumed += std::min<std::uint64_t>(samples * world_size_, remaining());
    advanced_ = advanced_ || samples > 0;
}

// A position between epochs fits any order; in the middle of one, samples would be lost or seen twice.
void DistributedSampler::restore(const SamplerState& state) {
    const bool is_inside = state.order && state.consumed > 0 && state.consumed < state.order->samples;
    if (is_inside && *state.order != order())
        throw InvalidInput(fmt::format(
            "sampler: the position is sample {} of an epoch over {}, this sampler's epoch is over {}: resume with the "
            "same, or from the end of an epoch",
            state.consumed, describe(*state.order), describe(order())));
    // Older positions count the padding: less than one sample per rank, in a world of unknown size.
    if (state.consumed > 2 * std::max<std::uint64_t>(dataset_size_, 1) + world_size_)
        throw InvalidInput(fmt::format("sampler: position {} lies behind the end of a data set of {} samples",
                                       state.consumed, dataset_size_));
    move_to({state.epoch, std::min<std::uint64_t>(state.consumed, dataset_size_)});
}

}  // namespace ddp
