#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "ddp/ddp.h"

namespace ddp {
namespace {

using Key = std::tuple<std::size_t, DType, Device::Kind, int>;

struct OpenBucket {
    std::vector<std::size_t> gradients;
    std::size_t bytes = 0;
    bool is_first = true;  ///< no bucket of this key has been closed yet
};

}  // namespace

BucketPlan plan_buckets(std::span<const GradientSpec> gradients, const BucketLimits& limits) {
    BucketPlan plan;
    std::map<Key, OpenBucket> open;
    for (std::size_t index = gradients.size(); index-- > 0;) {
        const GradientSpec& gradient = gradients[index];
        OpenBucket& bucket =
            open[{gradient.unit, gradient.dtype, gradient.device.kind, gradient.device.index}];
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
    // A bucket can start when its last gradient is ready: sort by that, so that the leftovers of one type do
    // not wait behind buckets of another type that complete later.
    std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); });
    return plan;
}

}  // namespace ddp
