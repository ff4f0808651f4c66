#include "ddp/worker/slices.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <span>

namespace ddp {

Slices::Slices(const Counts& counts, DType type) {
    std::size_t end = 0;
    for (const std::size_t count : counts) {
        end += count * size_of(type);
        ends_.push_back(end);
        each_ = std::max(each_, count * size_of(type));
    }
}

Buffer Slices::of(const Buffer& whole, int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return {static_cast<std::byte*>(whole.data) + offset(index), length(index) / size_of(whole.dtype),
            whole.dtype, whole.device};
}

namespace {

std::string unequal_counts(const std::vector<Counts>& all_counts) {
    const auto counts_of = [](const Counts& one) { return std::span(one).subspan(1); };
    for (const Counts& other : all_counts) {
        if (std::ranges::equal(counts_of(all_counts[0]), counts_of(other))) continue;
        return fmt::format("rank {} counts {}, rank {} counts {}", all_counts[0][0],
                           fmt::join(counts_of(all_counts[0]), ", "), other[0],
                           fmt::join(counts_of(other), ", "));
    }
    return "";
}

std::string unmatched_counts(const std::vector<Counts>& all_counts) {
    const std::size_t ranks = all_counts.size();
    for (std::size_t from = 0; from < ranks; ++from) {
        for (std::size_t to = 0; to < ranks; ++to) {
            const std::size_t sent = all_counts[from][1 + to], received = all_counts[to][1 + ranks + from];
            if (sent == received) continue;
            return fmt::format("rank {} sends {} elements to rank {}, which receives {}", all_counts[from][0],
                               sent, all_counts[to][0], received);
        }
    }
    return "";
}

}  // namespace

std::string compare_counts(ddprun::SegmentOp operation, const std::vector<Counts>& all_counts) {
    return operation == ddprun::SegmentOp::AllToAll ? unmatched_counts(all_counts)
                                                    : unequal_counts(all_counts);
}

std::size_t longest_of(const std::vector<Counts>& all_counts) {
    std::size_t longest = 0;
    for (const Counts& one : all_counts)
        longest = std::max(longest, *std::max_element(one.begin() + 1, one.end()));
    return longest;
}

}  // namespace ddp
