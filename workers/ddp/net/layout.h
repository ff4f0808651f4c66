#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// Who of a group is on which node, and who sends what to whom. Pure.
namespace ddp::net {

/// The ranks of a group by node, as one of them sees it. Nodes count in the order of their first rank.
struct Layout {
    std::vector<std::vector<std::uint32_t>> nodes;  ///< the group's ranks, ascending
    std::vector<std::uint32_t> node_of;             ///< by rank
    std::vector<std::uint32_t> place_of;            ///< by rank, among those of its node
    std::uint32_t rank = 0;

    /// `hosts`: by rank, equal numbers for those of one node.
    static Layout of(const std::vector<std::uint32_t>& hosts, std::uint32_t rank);

    [[nodiscard]] std::size_t size() const { return node_of.size(); }
    [[nodiscard]] std::uint32_t node() const { return node_of[rank]; }
    [[nodiscard]] std::uint32_t place() const { return place_of[rank]; }
    [[nodiscard]] const std::vector<std::uint32_t>& locals() const { return nodes[node()]; }
    [[nodiscard]] bool is_local(std::uint32_t other) const { return node_of[other] == node(); }
    /// Ranks of a node that exchange slices with their likes: as many as the smallest node has, so that all
    /// cut alike.
    [[nodiscard]] std::uint32_t lanes() const;
    /// Who on a node takes in what comes from `other`: itself on its own.
    [[nodiscard]] std::uint32_t holder(std::uint32_t other, std::uint32_t on_node) const {
        return place_of[other] % static_cast<std::uint32_t>(nodes[on_node].size());
    }
};

/// A tree over n nodes, for what goes from one to all: the parent of a node and its children, the farthest
/// first.
std::uint32_t parent_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n);
std::vector<std::uint32_t> children_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n);

/// How a slice is summed between n nodes. AllToAll: everyone sends all of it to everyone and sums it, one
/// round. Scattered: everyone sums its part and sends that on, two rounds; the fewest bytes, of two nodes too
/// the same.
enum class Rounds : std::uint8_t { AllToAll, Scattered };
Rounds choose_rounds(std::size_t bytes, std::size_t nodes);

/// Up to here the first words of a call, or of a message, carry all of it.
inline constexpr std::size_t kInlineBytes = 8 * 1024;
/// Up to here one rank of a node sums for it, and all of an all-reduce goes with the words that it says to
/// the others: one message to each is faster than several lanes, unless there are many nodes to send the same
/// to.
std::size_t spoken_bytes(std::size_t nodes);
/// What a lane sums and sends at a time: the next is summed while this one is on its way.
inline constexpr std::size_t kLanePieceBytes = 512 * 1024;

}  // namespace ddp::net
