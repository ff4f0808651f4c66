#include "ddp/reduce/flat_layout.h"

#include <algorithm>
#include <utility>

#include "ddp/worker/slices.h"

namespace ddp {

Extent intersection(const Extent& inner, const Extent& outer) {
    const std::size_t begin = std::max(inner.begin, outer.begin), end = std::min(inner.end(), outer.end());
    return begin < end ? Extent{begin, end - begin} : Extent{inner.begin, 0};
}

FlatLayout lay_out(std::span<const GradientSpec> specs, BucketPlan plan, std::size_t multiple) {
    FlatLayout layout;
    layout.tensors.resize(specs.size());
    layout.bucket_of.resize(specs.size());
    for (std::size_t b = 0; b < plan.size(); ++b) {
        std::size_t at = layout.bytes;
        for (const std::size_t tensor : plan[b]) {
            layout.tensors[tensor] = {at, specs[tensor].bytes};
            layout.bucket_of[tensor] = b;
            const bool has_tail =
                multiple == FlatLayout::kAlignment && b + 1 == plan.size() && tensor == plan[b].back();
            at = round_up(layout.tensors[tensor].end() + (has_tail ? FlatLayout::kTail : 0),
                          FlatLayout::kAlignment);
        }
        layout.buckets.push_back({layout.bytes, round_up(at - layout.bytes, multiple)});
        layout.types.push_back(specs[plan[b].front()].dtype);
        layout.bytes = layout.buckets.back().end();
    }
    layout.plan = std::move(plan);
    return layout;
}

FlatLayout in_slots(FlatLayout layout, std::size_t slots) {
    if (slots >= layout.buckets.size()) return layout;
    std::size_t each = 0;
    for (const Extent& bucket : layout.buckets) each = std::max(each, bucket.bytes);
    for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
        Extent& bucket = layout.buckets[b];
        const std::size_t begin = b % slots * each;
        for (const std::size_t tensor : layout.plan[b])
            layout.tensors[tensor].begin = layout.tensors[tensor].begin - bucket.begin + begin;
        bucket.begin = begin;
    }
    layout.bytes = slots * each;
    return layout;
}

std::size_t most_open_buckets(const FlatLayout& layout) {
    std::vector<std::size_t> missing;
    for (const auto& tensors : layout.plan) missing.push_back(tensors.size());
    std::size_t complete = 0, most = 0;
    for (std::size_t tensor = layout.bucket_of.size(); tensor-- > 0;) {
        const std::size_t bucket = layout.bucket_of[tensor];
        most = std::max(most, bucket + 1 - complete);
        --missing[bucket];
        while (complete < missing.size() && missing[complete] == 0) ++complete;
    }
    return most;
}

}  // namespace ddp
