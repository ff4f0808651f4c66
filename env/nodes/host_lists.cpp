#include "env/nodes/host_lists.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <limits>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxNodes = 65536;

Error not_a_list(std::string_view text, std::string_view why) {
    return {Errc::InvalidArgument, fmt::format("'{}' is not a Slurm list: {}", excerpt(text), why), 0};
}

Error too_long(std::string_view text) {
    return {Errc::Limit, fmt::format("'{}' names more than {} nodes", excerpt(text), kMaxNodes), 0};
}

/// The pieces between commas outside brackets.
Result<std::vector<std::string_view>> split_outside_brackets(std::string_view text) {
    std::vector<std::string_view> pieces;
    std::size_t begin = 0;
    bool inside = false;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const char c = text[at];
        if ((c == '[' && inside) || (c == ']' && !inside))
            return not_a_list(text, "the brackets do not match");
        if (c == '[' || c == ']') inside = c == '[';
        if (c != ',' || inside) continue;
        pieces.push_back(text.substr(begin, at - begin));
        begin = at + 1;
    }
    if (inside) return not_a_list(text, "a bracket is not closed");
    pieces.push_back(text.substr(begin));
    return pieces;
}

/// Expands "01-03" to 01 02 03, with the width of the first number.
Status append_range(std::string_view range, std::vector<std::string>& numbers) {
    const std::size_t dash = range.find('-');
    const std::string_view low = range.substr(0, dash);
    const std::string_view high = dash == range.npos ? low : range.substr(dash + 1);
    const Result<std::uint64_t> first = parse_uint(low);
    const Result<std::uint64_t> last = parse_uint(high);
    if (!first || !last) return not_a_list(range, "a range is two numbers");
    if (*last < *first) return not_a_list(range, "a range goes upwards");
    if (*last - *first >= kMaxNodes - numbers.size()) return too_long(range);
    for (std::uint64_t n = *first; n <= *last; ++n) numbers.push_back(fmt::format("{:0{}}", n, low.size()));
    return {};
}

/// Expands one piece: the text before its first bracket with each number in it, and recursively the rest.
Status append_hosts(const std::string& before, std::string_view rest, std::vector<std::string>& hosts) {
    const std::size_t open = rest.find('[');
    if (open == rest.npos) {
        if (hosts.size() == kMaxNodes) return too_long(before);
        hosts.push_back(before + std::string(rest));
        return {};
    }
    const std::size_t close = rest.find(']', open);
    std::vector<std::string> numbers;
    for (const std::string_view range : split(rest.substr(open + 1, close - open - 1), ',')) {
        if (const Status read = append_range(range, numbers); !read) return read;
    }
    for (const std::string& number : numbers) {
        const std::string name = before + std::string(rest.substr(0, open)) + number;
        if (const Status done = append_hosts(name, rest.substr(close + 1), hosts); !done) return done;
    }
    return {};
}

/// "2(x3)" is three nodes of two tasks.
Status append_counts(std::string_view piece, std::vector<int>& counts) {
    constexpr std::int64_t kMaxTasks = std::numeric_limits<int>::max();
    std::int64_t times = 1;
    const std::size_t open = piece.find("(x");
    if (open != piece.npos) {
        if (!piece.ends_with(')')) return not_a_list(piece, "a bracket is not closed");
        const auto number =
            parse_int_between(piece.substr(open + 2, piece.size() - open - 3), 1, std::int64_t{kMaxNodes});
        if (!number) return not_a_list(piece, "'(xN)' repeats a count N times");
        times = *number;
    }
    const Result<std::int64_t> tasks = parse_int_between(piece.substr(0, open), 0, kMaxTasks);
    if (!tasks) return not_a_list(piece, "expected counts like 2(x3)");
    if (static_cast<std::size_t>(times) > kMaxNodes - counts.size()) return too_long(piece);
    counts.insert(counts.end(), static_cast<std::size_t>(times), static_cast<int>(*tasks));
    return {};
}

}  // namespace

Result<std::vector<std::string>> expand_hostlist(std::string_view text) {
    const Result<std::vector<std::string_view>> pieces = split_outside_brackets(text);
    if (!pieces) return pieces.error();
    std::vector<std::string> hosts;
    for (const std::string_view piece : *pieces) {
        if (piece.empty()) return not_a_list(text, "a name is empty");
        if (const Status done = append_hosts("", piece, hosts); !done) return done.error();
    }
    return hosts;
}

Result<std::vector<int>> parse_tasks_per_node(std::string_view text) {
    std::vector<int> counts;
    for (const std::string_view piece : split(text, ',')) {
        if (const Status read = append_counts(piece, counts); !read) return read.error();
    }
    return counts;
}

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
