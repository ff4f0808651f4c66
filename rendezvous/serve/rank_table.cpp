#include "rendezvous/serve/rank_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

namespace ddprun::rdzv {
namespace {

/// Larger than any machine; keeps every sum within an int.
constexpr int kMaxWorldSize = 1 << 24;

}  // namespace

Result<RankTable> RankTable::from(std::vector<NodeSlots> nodes) {
    RankTable table;
    std::map<std::string, int> role_sizes;
    for (NodeSlots& node : nodes) {
        if (node.slots < 1 || node.slots > kMaxWorldSize - table.world_size_) {
            return Error{Errc::InvalidArgument,
                         fmt::format("{} brings {} workers into a world of {}", node.host, node.slots,
                                     table.world_size_),
                         0};
        }
        int& role_size = role_sizes[node.role];
        table.rows_.push_back({table.nodes(), table.world_size_, node.slots, role_size, 0});
        table.hosts_.push_back(std::move(node.host));
        role_size += node.slots;
        table.world_size_ += node.slots;
    }
    for (std::size_t i = 0; i < nodes.size(); ++i) table.rows_[i].role_world_size = role_sizes[nodes[i].role];
    return table;
}

WorkerRanks RankTable::worker(int rank) const {
    const auto after =
        std::upper_bound(rows_.begin(), rows_.end(), rank,
                         [](int value, const NodeRanks& row) { return value < row.first_rank; });
    const NodeRanks& row = *std::prev(after);
    const int local_rank = rank - row.first_rank;
    return {rank, local_rank, row.group_rank, row.role_first_rank + local_rank};
}

}  // namespace ddprun::rdzv
