#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun {

/// Strict parsers: the whole text must be the value, no spaces, no sign where none makes sense.
/// Error: InvalidArgument, "'<text>' is not a number", ready to follow the name of an option.
Result<std::int64_t> parse_int(std::string_view text);
Result<std::uint64_t> parse_uint(std::string_view text);
/// parse_int with min <= value <= max ("'70000' is not between 1 and 65535").
Result<std::int64_t> parse_int_between(std::string_view text, std::int64_t min, std::int64_t max);
Result<double> parse_double(std::string_view text);
/// "1" "true" "yes" "on", "0" "false" "no" "off", any case.
Result<bool> parse_bool(std::string_view text);
/// "90" and "90s" are seconds; "250ms", "15m", "2h", "1d", "1.5s"; "0" is zero.
Result<Duration> parse_duration(std::string_view text);
/// "4096", "64K", "64KiB", "25MiB", "25MB" (powers of 1024 for K and KiB, of 1000 for KB).
Result<std::uint64_t> parse_bytes(std::string_view text);

/// A duration for people: "20 ms", "41 s", "2 min 5 s", "3 h 4 min".
std::string format_duration(Duration span);
/// A size for people: "512 B", "64 KiB", "25 MiB", "1.5 GiB".
std::string format_bytes(std::uint64_t bytes);

/// The pieces between separators, with empty ones; "" gives one empty piece.
std::vector<std::string_view> split(std::string_view text, char separator);
/// Deleted, because the pieces would outlive a temporary text.
template <std::same_as<std::string> Temporary>
std::vector<std::string_view> split(Temporary&& text, char separator) = delete;
std::string_view trim(std::string_view text);
std::string lower(std::string_view text);
/// Joins the pieces with a separator.
std::string join(const std::vector<std::string>& pieces, std::string_view separator);
/// Joins the results of `name` for each thing.
template <class Things, class Name>
std::string join(const Things& things, std::string_view separator, const Name& name) {
    std::vector<std::string> names;
    for (const auto& one : things) names.emplace_back(name(one));
    return join(names, separator);
}
/// The first `most` pieces, and how many were left out: "node00, node01 and 14 more".
std::string join_first(std::vector<std::string> pieces, std::size_t most, std::string_view separator = ", ");
/// A word quoted for a shell: 'a b'. No shell expands anything in it.
std::string shell_quoted(std::string_view word);
/// Ranks for people: {0,1,2,5} gives "0-2, 5".
std::string format_ranges(const std::vector<int>& sorted);
/// Text from outside (a peer, a file, a variable, a worker) for one line of a message: characters that a
/// terminal obeys or hides are escaped ("\n", "\x1b", "\u{202e}"), and bytes that are no UTF-8. Tabs and
/// backslashes stay.
std::string printable(std::string_view text);
/// printable() for text of several lines, whose newlines stay.
std::string printable_lines(std::string_view text);
/// A stranger's text for a message: printable, and cut after `max_bytes` (then "...").
std::string excerpt(std::string_view text, std::size_t max_bytes = 60);
/// Breaks `text` at spaces into lines of at most `width` columns; every line after the first starts with
/// `indent` spaces, which count. A word longer than a line stays whole. No newline at the end.
std::string wrap(std::string_view text, std::size_t width, std::size_t indent);
/// The candidate nearest to `word` by edits (at most two), or "" when none is near: for "did you mean".
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace ddprun
