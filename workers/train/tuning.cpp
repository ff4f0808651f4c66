#include "tuning.h"

#include <algorithm>
#include <cmath>

namespace train {
namespace {

constexpr double kAsGood = 1.02, kClose = 1.25;

double least(std::span<const double> milliseconds) {
    return milliseconds.empty() ? kNever : *std::min_element(milliseconds.begin(), milliseconds.end());
}

}  // namespace

std::size_t fastest(std::span<const double> milliseconds) {
    const double enough = least(milliseconds) * kAsGood;
    for (std::size_t i = 0; i < milliseconds.size(); ++i) {
        if (milliseconds[i] <= enough) return i;
    }
    return 0;
}

std::vector<std::size_t> finalists(std::span<const double> milliseconds) {
    const double limit = least(milliseconds) * kClose;
    std::vector<std::size_t> close;
    for (std::size_t i = 0; i < milliseconds.size(); ++i) {
        if (std::isfinite(milliseconds[i]) && milliseconds[i] <= limit) close.push_back(i);
    }
    return close;
}

bool mask_pays(const ForwardTimes& forward, const BackwardTimes& backward) {
    const double with = forward.with_mask + std::min(backward.by_mask, backward.by_output);
    const double without = forward.without_mask + backward.by_output;
    return std::isfinite(with) && with <= without;
}

}  // namespace train
