#pragma once

#include <string>
#include <vector>

#include "env/result.h"

namespace ddprun::rdzv {

/// The host, slots and role of one node of the world.
struct NodeSlots {
    std::string host;
    int slots = 0;
    std::string role = "default";
    bool operator==(const NodeSlots&) const = default;
};

/// The ranks of a node's workers.
struct NodeRanks {
    int group_rank = 0;
    int first_rank = 0;
    int local_world_size = 0;
    int role_first_rank = 0;  ///< rank of local rank 0 among the workers of the same role
    int role_world_size = 0;
    bool operator==(const NodeRanks&) const = default;
};

/// The ranks of one worker.
struct WorkerRanks {
    int rank = 0;
    int local_rank = 0;
    int group_rank = 0;
    int role_rank = 0;
    bool operator==(const WorkerRanks&) const = default;
};

/// The ranks of all workers, as prefix sums over the nodes in group-rank order: one row per node.
class RankTable {
  public:
    /// Error: InvalidArgument, for a node without workers (named), or for too many workers in all.
    static Result<RankTable> from(std::vector<NodeSlots> nodes);

    [[nodiscard]] int world_size() const { return world_size_; }
    [[nodiscard]] int nodes() const { return static_cast<int>(rows_.size()); }
    /// 0 <= group_rank < nodes().
    [[nodiscard]] const NodeRanks& node(int group_rank) const {
        return rows_[static_cast<std::size_t>(group_rank)];
    }
    [[nodiscard]] const std::string& host(int group_rank) const {
        return hosts_[static_cast<std::size_t>(group_rank)];
    }
    /// 0 <= rank < world_size().
    [[nodiscard]] WorkerRanks worker(int rank) const;

  private:
    std::vector<NodeRanks> rows_;
    std::vector<std::string> hosts_;
    int world_size_ = 0;
};

}  // namespace ddprun::rdzv
