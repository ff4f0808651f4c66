#include "tuning.h"

#include <algorithm>
#include <cmath>

namespace train {
namespace {

constexpr double kAsGood = 1.02, kClose = 1.25;
constexpr std::size_t kMostFinalists = 5;

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
    std::stable_sort(close.begin(), close.end(),
                     [&](std::size_t a, std::size_t b) { return milliseconds[a] < milliseconds[b]; });
    close.resize(std::min(close.size(), kMostFinalists));
    std::sort(close.begin(), close.end());
    return close;
}

int runs_for(double wanted_milliseconds, double milliseconds_each) {
    constexpr double kMost = 10;
    if (!(milliseconds_each > 0)) return static_cast<int>(kMost);
    return static_cast<int>(std::clamp(std::ceil(wanted_milliseconds / milliseconds_each), 1.0, kMost));
}

bool mask_pays(const ForwardTimes& forward, const BackwardTimes& backward) {
    const double with = forward.with_mask + std::min(backward.by_mask, backward.by_output);
    const double without = forward.without_mask + backward.by_output;
    return std::isfinite(with) && with <= without;
}

}  // namespace train
