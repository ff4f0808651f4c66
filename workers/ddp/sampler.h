#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ddp {

struct SamplerOptions {
    bool shuffle = true;
    std::uint64_t seed = 0;
    /// False: the list is padded from its beginning until every rank gets the same number of samples. True:
    /// its tail is dropped instead.
    bool drop_last = false;
};

/// A position in the training data. It counts samples of all ranks together, without padding, so that a world
/// of another size can resume from it.
struct SamplerState {
    std::uint64_t epoch = 0;
    std::uint64_t consumed = 0;
    /// The order of samples that the position refers to.
    struct Order {
        std::uint64_t samples = 0;
        bool shuffle = true;
        std::uint64_t seed = 0;
        bool operator==(const Order&) const = default;
    };
    std::optional<Order> order = std::nullopt;  ///< none when unknown, as in older checkpoints
    /// Compares the positions, not the orders.
    bool operator==(const SamplerState& other) const {
        return epoch == other.epoch && consumed == other.consumed;
    }
};

/// Decides which samples of a data set this rank sees in an epoch: the same indices as PyTorch's
/// DistributedSampler for the same seed, epoch, world size, rank, shuffle and drop_last. No clock, no global
/// generator. One thread at a time.
///
/// A program that begins an epoch twice without set_epoch or next_epoch gets one line on standard error, once
/// for each sampler of rank 0: it trains every epoch in the same order, or on nothing. restore and set_world
/// begin anew, so a resumed or repeated epoch gets none.
class DistributedSampler {
  public:
    /// Throws InvalidInput unless 0 <= rank < world_size.
    DistributedSampler(std::size_t dataset_size, int world_size, int rank, SamplerOptions options = {});

    /// Deals the rest of the epoch out to the ranks of a world of another size, of which this is `rank`.
    /// Throws InvalidInput as the constructor.
    void set_world(int world_size, int rank);

    /// Starts an epoch at its beginning. Without this call every epoch has the same order.
    void set_epoch(std::uint64_t epoch) { move_to({epoch, 0}); }
    void next_epoch() { set_epoch(state_.epoch + 1); }
    [[nodiscard]] std::uint64_t epoch() const { return state_.epoch; }
    /// The number of samples per rank from here to the end of the epoch; equal on all ranks.
    [[nodiscard]] std::size_t size() const;
    /// The batches of a whole epoch: `batch` samples on each rank. The last one is smaller, or left out with
    /// `whole_only`.
    [[nodiscard]] std::uint64_t batches_per_epoch(std::size_t batch, bool whole_only = false) const;
    /// The batches from the first epoch to here, had this world made them all.
    [[nodiscard]] std::uint64_t batches_done(std::size_t batch, bool whole_only = false) const;
    /// The indices from here to the end of the epoch, in the order of use.
    [[nodiscard]] std::vector<std::size_t> indices() const;

    /// Advances this rank (and every other) by `samples` of its indices, at most to the end of the epoch. A
    /// Loader made with a sampler calls it.
    void advance(std::size_t samples);
    [[nodiscard]] SamplerState state() const { return {state_.epoch, state_.consumed, order()}; }
    /// Continues at the position `state`, which a world of any size may have saved: the rest of the epoch is
    /// dealt out again, so that except for padding no sample is lost or seen twice. size() and indices() then
    /// cover this rest. Throws InvalidInput in the middle of an epoch with another order, and for a position
    /// beyond two data sets and one sample per rank: older positions count padding, and any up to that limit
    /// mean the end of the epoch.
    void restore(const SamplerState& state);

  private:
    friend class Loader;
    friend class DeviceLoader;
    [[nodiscard]] std::vector<std::size_t> rest_of_epoch() const;
    /// Tells the user that a loader, or indices(), finds an epoch at its end, if this sampler has led it
    /// there.
    void note_nothing_left() const;
    void print_once(const char* what) const;
    void move_to(const SamplerState& place) {
        state_ = place;
        listed_ = advanced_ = false;
    }
    [[nodiscard]] std::size_t remaining() const;
    [[nodiscard]] std::size_t share_of(std::size_t samples) const;
    [[nodiscard]] SamplerState::Order order() const {
        return {dataset_size_, options_.shuffle, options_.seed};
    }

    std::size_t dataset_size_;
    std::size_t world_size_ = 1;
    std::size_t rank_ = 0;
    SamplerOptions options_;
    SamplerState state_;
    mutable bool listed_ = false;   ///< indices() has listed this epoch from its beginning
    bool advanced_ = false;         ///< advance() has moved the position in this epoch
    mutable bool printed_ = false;  ///< the line about an epoch that begins twice
};

/// torch.randperm(n, generator=torch.Generator().manual_seed(seed)) on a CPU.
std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed);

/// PyTorch shuffles in two ways: the remainder of a 32-bit number is uniform enough for small n only.
enum class ShuffleRule : std::uint8_t { With32Bits, With64Bits };
/// With64Bits for n of 214,748,364 (a twentieth of 2^32) or more.
[[nodiscard]] ShuffleRule shuffle_rule(std::size_t n);
/// The permutation by `rule`; the overload above uses shuffle_rule(n).
std::vector<std::size_t> random_permutation(std::size_t n, std::uint64_t seed, ShuffleRule rule);

}  // namespace ddp
