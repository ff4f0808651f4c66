#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp {

struct SamplerOptions {
    bool shuffle = true;
    std::uint64_t seed = 0;
    /// False: the list is padded from its beginning until every rank gets the same number of samples.
    /// True: its tail is dropped instead.
    bool drop_last = false;
};

/// A position in the training data. Counts samples of all ranks together, without those that only pad, so that it can be
/// taken up by a world of another size.
struct SamplerState {
    std::uint64_t epoch = 0;
    std::uint64_t consumed = 0;
    bool operator==(const SamplerState&) const = default;
};

/// Which samples of a data set this rank sees in an epoch: the same indices as PyTorch's DistributedSampler
/// for the same seed, epoch, world size, rank, shuffle and drop_last. Pure: no clock, no global generator.
class DistributedSampler {
  public:
    /// Throws InvalidInput unless 0 <= rank < world_size.
    DistributedSampler(std::size_t dataset_size, int world_size, int rank, SamplerOptions options = {});

    /// Starts an epoch at its beginning. Without it every epoch has the same order.
    void set_epoch(std::uint64_t epoch) { state_ = {epoch, 0}; }
    /// The same for the one that follows.
    void next_epoch() { set_epoch(state_.epoch + 1); }
    [[nodiscard]] std::uint64_t epoch() const { return state_.epoch; }
    /// Samples per rank from here to the end of the epoch; equal on all ranks.
    [[nodiscard]] std::size_t size() const;
    /// The indices from here to the end of the epoch, in the order of use.
    [[nodiscard]] std::vector<std::size_t> indices() const;

    /// This rank (and every other) has used `samples` more of its indices. A Loader made of a sampler does it.
    void advance(std::size_t samples);
    [[nodiscard]] SamplerState state() const { return state_; }
    /// Continues where `state` was taken, whatever the size of the world was there: what is left of the epoch is shared out
    /// anew, so that no sample is lost or seen twice but those that pad. size() and indices() speak of what is left.
    /// Throws InvalidInput when it lies behind the end of the data set.
    void restore(const SamplerState& state);

  private:
    [[nodiscard]] std::size_t remaining() const;

    std::size_t dataset_size_;
    std::size_t world_size_;
    std::size_t rank_;
    SamplerOptions options_;
    SamplerState state_;
};

/// torch.randperm(n, generator=torch.Generator().manual_seed(seed)) on a CPU.
std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed);

/// PyTorch has two ways to shuffle: the remainder of a 32-bit number is even enough for small n only.
enum class ShuffleRule : std::uint8_t { With32Bits, With64Bits };
/// With64Bits from 214,748,364 (a twentieth of 2^32) on.
[[nodiscard]] ShuffleRule shuffle_rule(std::size_t n);
/// By either rule; random_permutation takes shuffle_rule(n).
std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed, ShuffleRule rule);

}  // namespace ddp
