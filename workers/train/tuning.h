#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

/// What is made of measured times: which of several ways to one result is gone. No clock here: see tuner.h.
namespace train {

/// The time of a way that does not exist.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

/// What was measured, for whoever wants to know why a training is as fast as it is.
struct Timing {
    std::string what;                  ///< "product 4096 x 8192 x 784, epilogue 134"
    std::vector<double> milliseconds;  ///< of each way, in the order of preference; kNever: does not exist
    std::size_t taken = 0;
};

/// The first one that is as good as the fastest: measured times are never quite the same, and what comes
/// first was expected to be best. 0 when none exists.
std::size_t fastest(std::span<const double> milliseconds);

/// Those close enough to the fastest to be timed again, a few at most; in their order.
std::vector<std::size_t> finalists(std::span<const double> milliseconds);

/// How often something is run so that it takes about `wanted` in all: at least once, at most ten times.
int runs_for(double wanted_milliseconds, double milliseconds_each);

/// The forward pass of a ReLU layer, with and without a note of where it let something through.
struct ForwardTimes {
    double with_mask, without_mask;
};
/// The way back through it, by that note or by the layer's output.
struct BackwardTimes {
    double by_mask, by_output;
};
/// Whether both together are faster with the mask.
bool mask_pays(const ForwardTimes& forward, const BackwardTimes& backward);

}  // namespace train
