#include "ddp/net/layout.h"

#include <algorithm>
#include <map>

namespace ddp::net {

namespace {

constexpr std::size_t kLeaderBytesInAll = 64 * 1024;  // sent by one leader to all others together
constexpr std::size_t kScatterFrom =
    64 * 1024;  // below it, a second round costs more than the bytes that it saves

std::uint32_t from_root(std::uint32_t node, std::uint32_t root, std::uint32_t n) {
    return (node + n - root) % n;
}

}  // namespace

Layout Layout::of(const std::vector<std::uint32_t>& hosts, std::uint32_t rank) {
    Layout layout;
    layout.rank = rank;
    std::map<std::uint32_t, std::uint32_t> node_of_host;
    for (std::uint32_t one = 0; one < hosts.size(); ++one) {
        const auto [known, is_new] = node_of_host.emplace(hosts[one], layout.nodes.size());
        if (is_new) layout.nodes.emplace_back();
        layout.node_of.push_back(known->second);
        layout.place_of.push_back(static_cast<std::uint32_t>(layout.nodes[known->second].size()));
        layout.nodes[known->second].push_back(one);
    }
    return layout;
}

std::uint32_t Layout::lanes() const {
    return static_cast<std::uint32_t>(std::ranges::min(nodes, {}, &std::vector<std::uint32_t>::size).size());
}

std::size_t Layout::largest_node() const {
    return std::ranges::max(nodes, {}, &std::vector<std::uint32_t>::size).size();
}

std::uint32_t parent_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n) {
    const std::uint32_t at = from_root(node, root, n);
    return ((at & (at - 1)) + root) % n;
}

std::vector<std::uint32_t> children_in_tree(std::uint32_t node, std::uint32_t root, std::uint32_t n) {
    const std::uint32_t at = from_root(node, root, n);
    std::vector<std::uint32_t> children;
    for (std::uint32_t bit = 1; at + bit < n && (at & bit) == 0; bit *= 2)
        children.push_back((at + bit + root) % n);
    std::reverse(children.begin(), children.end());
    return children;
}

std::size_t header_payload_bytes(std::size_t nodes) {
    return std::max(kInlineBytes, kLeaderBytesInAll / std::max<std::size_t>(nodes - 1, 1));
}

Rounds choose_rounds(std::size_t bytes, std::size_t nodes) {
    return nodes <= 2 || bytes < kScatterFrom ? Rounds::AllToAll : Rounds::Scattered;
}

}  // namespace ddp::net
