#include "env/nodes/slurm_hostlist.h"

#include <fmt/core.h>

#include <cstdint>
#include <limits>

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

}  // namespace ddprun
