#include <algorithm>
#include <cassert>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "ddp/ddp.h"

namespace ddp {
namespace {

using Key = std::tuple<DType, Device::Kind, int>;

struct OpenBucket {
    std::vector<std::size_t> gradients;
    std::size_t bytes = 0;
    bool is_first = true;  ///< no bucket of this key has been closed yet
};

BucketPlan fill(std::span<const GradientSpec> gradients, std::span<const std::size_t> order,
                const BucketLimits& limits) {
    BucketPlan plan;
    std::map<Key, OpenBucket> open;
    for (const std::size_t index : order) {
        const GradientSpec& gradient = gradients[index];
        OpenBucket& bucket = open[{gradient.dtype, gradient.device.kind, gradient.device.index}];
        bucket.gradients.push_back(index);
        bucket.bytes += gradient.bytes;
        if (bucket.bytes < (bucket.is_first ? limits.first_bytes : limits.cap_bytes)) continue;
        plan.push_back(std::exchange(bucket.gradients, {}));
        bucket.bytes = 0;
        bucket.is_first = false;
    }
    for (auto& [key, bucket] : open) {
        if (!bucket.gradients.empty()) plan.push_back(std::move(bucket.gradients));
    }
    return plan;
}

}  // namespace

BucketPlan plan_buckets(std::span<const GradientSpec> gradients, const BucketLimits& limits) {
    std::vector<std::size_t> order(gradients.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    BucketPlan plan = fill(gradients, order, limits);
    // Indices ascend inside a bucket, so its first is its lowest.
    std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a.front() > b.front(); });
    return plan;
}

BucketPlan plan_buckets(std::span<const GradientSpec> gradients, std::span<const std::size_t> arrival,
                        const BucketLimits& limits) {
    assert(arrival.size() == gradients.size());
    BucketPlan plan = fill(gradients, arrival, limits);
    // A bucket can start when its last gradient is ready: sort by that, so that the leftovers of one type do
    // not wait behind buckets of another type that complete later.
    std::vector<std::size_t> arrived_at(gradients.size());
    for (std::size_t position = 0; position < arrival.size(); ++position)
        arrived_at[arrival[position]] = position;
    std::sort(plan.begin(), plan.end(),
              [&](const auto& a, const auto& b) { return arrived_at[a.back()] < arrived_at[b.back()]; });
    return plan;
}

}  // namespace ddp
