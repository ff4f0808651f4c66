#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ddp {

struct SamplerOptions {
    bool shuffle = true;
    std::uint64_t seed = 0;
    /// False: the list is padded from its beginning until every rank gets the same number of samples.
    /// True: its tail is dropped instead.
    bool drop_last = false;
};

/// A position in the training data. Counts samples of all ranks together, without those that only pad, so
/// that it can be taken up by a world of another size.
struct SamplerState {
    std::uint64_t epoch = 0;
    std::uint64_t consumed = 0;
    /// The list that it is a position in.
    struct Order {
        std::uint64_t samples = 0;
        bool shuffle = true;
        std::uint64_t seed = 0;
        bool operator==(const Order&) const = default;
    };
    std::optional<Order> order = std::nullopt;  ///< none: nobody noted it
    /// The same place, of whichever list.
    bool operator==(const SamplerState& other) const {
        return epoch == other.epoch && consumed == other.consumed;
    }
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

    /// This rank (and every other) has used `samples` more of its indices; more than size() are all of them.
    /// A Loader made of a sampler does it.
    void advance(std::size_t samples);
    [[nodiscard]] SamplerState state() const { return {state_.epoch, state_.consumed, order()}; }
    /// Continues where `state` was taken, whatever the size of the world was there: what is left of the epoch
    /// is shared out anew, so that no sample is lost or seen twice but those that pad. size() and indices()
    /// speak of what is left. Throws InvalidInput in the middle of an epoch in another order, and for a
    /// position of more than two data sets and a sample for each rank: older positions count padding, and
    /// anything up to there is the end of the epoch.
    void restore(const SamplerState& state);

  private:
    [[nodiscard]] std::size_t remaining() const;
    [[nodiscard]] SamplerState::Order order() const {
        return {dataset_size_, options_.shuffle, options_.seed};
    }

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
