#include "env/nodes/pals_apinfo.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>

#include "env/io/file.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostFileBytes = 64 << 20;
constexpr std::size_t kHostNameBytes = 64;

/// A table's place. The file begins with a version and its length, followed by some of these structs in this
/// order, in C's layout.
struct Table {
    std::uint64_t entry_bytes;
    std::uint64_t offset;
    std::int32_t count;
};
enum TableOf { Profiles, Commands, Ranks, Nodes };
constexpr std::size_t kFirstTable = 16;

struct RankEntry {
    std::int32_t local_rank, command, node;
};
struct NodeEntry {
    std::int32_t id;
    char host[kHostNameBytes];
};

Error not_apinfo(std::string_view why) { return {Errc::Protocol, fmt::format("PALS_APINFO: {}", why), 0}; }

template <class T>
T value_at(std::string_view bytes, std::size_t offset) {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
}

/// Reads the entries of a table, which in a newer version may be longer than ours.
template <class Entry>
Result<std::vector<Entry>> entries_of(std::string_view bytes, TableOf which) {
    const auto table = value_at<Table>(bytes, kFirstTable + which * sizeof(Table));
    const bool is_fit =
        table.count > 0 && table.entry_bytes >= sizeof(Entry) && table.offset <= bytes.size() &&
        table.entry_bytes <= (bytes.size() - table.offset) / static_cast<std::uint64_t>(table.count);
    if (!is_fit) return not_apinfo("a table is not within the file");
    std::vector<Entry> entries;
    for (std::int32_t i = 0; i < table.count; ++i) {
        entries.push_back(
            value_at<Entry>(bytes, table.offset + table.entry_bytes * static_cast<std::uint64_t>(i)));
    }
    return entries;
}

Result<std::string> host_of(const NodeEntry& node) {
    const std::string name(node.host, ::strnlen(node.host, kHostNameBytes));
    const auto is_plain = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '.' || c == '_';
    };
    if (name.empty() || name.front() == '-' || !std::all_of(name.begin(), name.end(), is_plain))
        return not_apinfo("a host without a name");
    return name;
}

}  // namespace

Result<PalsApplication> parse_apinfo(std::string_view bytes) {
    if (bytes.size() < kFirstTable + (Nodes + 1) * sizeof(Table)) return not_apinfo("the file is too short");
    const auto version = value_at<std::int32_t>(bytes, 0);
    if (version != 1 && version != 5) return not_apinfo(fmt::format("version {} is not known", version));
    const Result<std::vector<RankEntry>> ranks = entries_of<RankEntry>(bytes, Ranks);
    if (!ranks) return ranks.error();
    const Result<std::vector<NodeEntry>> nodes = entries_of<NodeEntry>(bytes, Nodes);
    if (!nodes) return nodes.error();
    PalsApplication application;
    for (const NodeEntry& node : *nodes) {
        Result<std::string> host = host_of(node);
        if (!host) return host.error();
        application.hosts.push_back(*std::move(host));
    }
    const auto count = [](const auto& list) { return static_cast<std::int32_t>(list.size()); };
    for (const RankEntry& rank : *ranks) {
        if (rank.node < 0 || rank.node >= count(*nodes) || rank.local_rank < 0 ||
            rank.local_rank >= count(*ranks))
            return not_apinfo("a rank without a place");
        application.ranks.push_back({rank.local_rank, rank.node});
    }
    return application;
}

Result<PalsApplication> read_apinfo(const EnvironmentLookup& lookup) {
    const std::string path = lookup("PALS_APINFO").value_or("");
    if (path.empty()) return Error{Errc::NotFound, "PALS_APINFO is not set", 0};
    const Result<std::string> bytes = read_regular_file(path, kMostFileBytes);
    return bytes ? parse_apinfo(*bytes) : Result<PalsApplication>(bytes.error());
}

void fill_from_apinfo(Placement& placement, const PalsApplication& application) {
    const auto size = static_cast<int>(application.ranks.size());
    if (placement.family != LauncherFamily::Pals || !placement.rank || *placement.rank >= size ||
        placement.size.value_or(size) != size)
        return;
    const PalsApplication::Rank& mine = application.ranks[static_cast<std::size_t>(*placement.rank)];
    if (placement.node_rank.value_or(mine.node) != mine.node ||
        placement.local_rank.value_or(mine.local_rank) != mine.local_rank)
        return;
    placement.size = size;
    placement.local_rank = mine.local_rank;
    placement.local_size =
        static_cast<int>(std::count_if(application.ranks.begin(), application.ranks.end(),
                                       [&](const auto& rank) { return rank.node == mine.node; }));
    placement.node_rank = mine.node;
    placement.nodes = static_cast<int>(application.hosts.size());
}

void fill_from_apinfo(Placement& placement, const EnvironmentLookup& lookup) {
    if (placement.family != LauncherFamily::Pals) return;
    if (const Result<PalsApplication> application = read_apinfo(lookup))
        fill_from_apinfo(placement, *application);
}

}  // namespace ddprun
