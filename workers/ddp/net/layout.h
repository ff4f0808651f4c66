#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// The ranks of a group by node, and who sends what to whom. Pure.
namespace ddp::net {

/// The ranks of a group by node, as one of them sees it. Nodes are ordered by their first rank.
struct Layout {
    std::vector<std::vector<std::uint32_t>> nodes;  ///< the group's ranks, ascending
    std::vector<std::uint32_t> node_of;             ///< by rank
    std::vector<std::uint32_t> place_of;            ///< by rank: position among the ranks of its node
    std::uint32_t rank = 0;

    /// `hosts`: by rank, equal numbers for ranks of one node.
    static Layout of(const std::vector<std::uint32_t>& hosts, std::uint32_t rank);

    [[nodiscard]] std::size_t size() const { return node_of.size(); }
    [[nodiscard]] std::uint32_t node() const { return node_of[rank]; }
    [[nodiscard]] std::uint32_t place() const { return place_of[rank]; }
    [[nodiscard]] const std::vector<std::uint32_t>& locals() const { return nodes[node()]; }
    [[nodiscard]] bool is_local(std::uint32_t other) const { return node_of[other] == node(); }
    /// The number of ranks on each node that exchange pieces with the same ranks of other nodes: the size of
    /// the smallest node, so that all nodes divide a buffer equally.
    [[nodiscard]] std::uint32_t lanes() const;
    [[nodiscard]] std::size_t largest_node() const;
    /// The rank of a node that receives what `other` sends to that node; on its own node, `other` itself.
    [[nodiscard]] std::uint32_t holder(std::uint32_t other, std::uint32_t on_node) const {
        return place_of[other] % static_cast<std::uint32_t>(nodes[on_node].size());
    }
};

/// A binomial tree over n nodes for a broadcast: the parent of a node, and its children, the farthest first.
std::uint32_t parent_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n);
std::vector<std::uint32_t> children_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n);

/// The exchange of a slice between n nodes. AllToAll: each node sends the whole slice to all others and sums
/// it, in one round. Scattered: each node sums its part and sends the result on, in two rounds; it sends the
/// fewest bytes, except that two nodes send equally many.
enum class Rounds : std::uint8_t { AllToAll, Scattered };
Rounds choose_rounds(std::size_t bytes, std::size_t nodes);

/// Longest payload, in bytes, that travels with the header of a call or message.
inline constexpr std::size_t kInlineBytes = 8 * 1024;
/// Longest payload, in bytes, that a leader sends with its header for its node: one message to each node is
/// faster than several ranks' messages, unless many nodes get the same bytes.
std::size_t header_payload_bytes(std::size_t nodes);
/// Bytes that a lane sums and sends at a time: it sums the next piece while this one is in transit.
inline constexpr std::size_t kLanePieceBytes = 512 * 1024;

}  // namespace ddp::net
