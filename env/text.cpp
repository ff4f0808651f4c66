#include "env/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <span>

namespace ddprun {
namespace {

/// A character in UTF-8: its number of bytes (0: no valid one) and its code.
struct Character {
    std::size_t bytes = 0;
    char32_t code = 0;
};

Character first_character(std::string_view text) {
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
    if (byte(0) < 0x80) return {1, byte(0)};
    const std::size_t bytes = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
    if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < bytes) return {};
    char32_t code = byte(0) & (0xffU >> (bytes + 1));
    for (std::size_t i = 1; i < bytes; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return {};
        code = (code << 6) | (byte(i) & 0x3fU);
    }
    constexpr std::array<char32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
    const bool is_surrogate = code >= 0xd800 && code < 0xe000;
    return code < kLeast[bytes] || code > 0x10ffff || is_surrogate ? Character{} : Character{bytes, code};
}

/// False for characters that a terminal obeys (C0, DEL, C1) or that reorder or hide their neighbours:
/// directions, other line ends, characters without width. Joiners (U+200C, U+200D) stay: scripts need them.
bool is_visible(char32_t code) {
    if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return false;
    const auto is_within = [code](char32_t first, char32_t last) { return code >= first && code <= last; };
    return !(code == 0x61c || code == 0x200b || is_within(0x200e, 0x200f) || is_within(0x2028, 0x202e) ||
             is_within(0x2060, 0x206f) || code == 0xfeff || is_within(0xfff9, 0xfffb) ||
             is_within(0xe0000, 0xe0fff));
}

bool is_plain(char c) { return (c >= 0x20 && c < 0x7f) || c == '\t'; }

std::string spelled_out(std::string_view text, bool keeps_newlines) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        const std::size_t plain =
            static_cast<std::size_t>(std::find_if_not(text.begin(), text.end(), is_plain) - text.begin());
        out += text.substr(0, plain);
        text.remove_prefix(plain);
        if (text.empty()) break;
        const Character next = first_character(text);
        if (next.code == '\n') out += keeps_newlines ? "\n" : "\\n";
        else if (next.bytes > 0 && is_visible(next.code)) out += text.substr(0, next.bytes);
        else if (next.bytes > 1) out += fmt::format("\\u{{{:x}}}", static_cast<std::uint32_t>(next.code));
        else out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
        text.remove_prefix(std::max<std::size_t>(next.bytes, 1));
    }
    return out;
}

/// The text in quotes, short and printable: it may come from a peer or a binary file.
std::string quoted(std::string_view text) { return fmt::format("'{}'", excerpt(text, 80)); }

Error malformed(std::string_view text, std::string_view expected) {
    return {Errc::InvalidArgument, fmt::format("{} {}", quoted(text), expected), 0};
}

template <class T>
Result<T> parse_whole(std::string_view text) {
    T value{};
    const char* const end = text.data() + text.size();
    const auto [stop, failure] = std::from_chars(text.data(), end, value);
    if (failure == std::errc::result_out_of_range) return malformed(text, "is too large a number");
    if (failure != std::errc{} || stop != end) return malformed(text, "is not a number");
    return value;
}

struct Unit {
    std::string_view name;
    std::uint64_t factor;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Length of the leading "12" or "12.5".
std::size_t decimal_prefix(std::string_view text) {
    const auto digits_from = [&](std::size_t at) {
        while (at < text.size() && is_digit(text[at])) ++at;
        return at;
    };
    const std::size_t whole = digits_from(0);
    if (whole == 0 || whole == text.size() || text[whole] != '.') return whole;
    const std::size_t fraction = digits_from(whole + 1);
    return fraction > whole + 1 ? fraction : whole;
}

const Unit* find_unit(std::span<const Unit> units, std::string_view name) {
    const auto found =
        std::find_if(units.begin(), units.end(), [&](const Unit& u) { return u.name == name; });
    return found == units.end() ? nullptr : &*found;
}

constexpr std::uint64_t kMilli = 1'000'000;
constexpr std::uint64_t kSecond = 1000 * kMilli;
constexpr std::array<Unit, 6> kDurationUnits{{{"", kSecond},
                                              {"ms", kMilli},
                                              {"s", kSecond},
                                              {"m", 60 * kSecond},
                                              {"h", 3600 * kSecond},
                                              {"d", 86400 * kSecond}}};

constexpr std::uint64_t kKibi = 1024;
constexpr std::array<Unit, 14> kByteUnits{{{"", 1},
                                           {"b", 1},
                                           {"k", kKibi},
                                           {"kib", kKibi},
                                           {"kb", 1000},
                                           {"m", kKibi* kKibi},
                                           {"mib", kKibi* kKibi},
                                           {"mb", 1000'000},
                                           {"g", kKibi* kKibi* kKibi},
                                           {"gib", kKibi* kKibi* kKibi},
                                           {"gb", 1000'000'000},
                                           {"t", kKibi* kKibi* kKibi* kKibi},
                                           {"tib", kKibi* kKibi* kKibi* kKibi},
                                           {"tb", 1000'000'000'000}}};

/// "1.5" with at most one decimal, none when it is zero.
std::string one_decimal(std::int64_t tenths) {
    return tenths % 10 == 0 ? fmt::format("{}", tenths / 10) : fmt::format("{}.{}", tenths / 10, tenths % 10);
}

/// The number of units, rounded. (std::chrono::round overflows near the end of time.)
std::int64_t rounded(Duration span, Duration unit) { return span / unit + (span % unit >= unit / 2 ? 1 : 0); }

std::string two_units(std::int64_t small, std::int64_t per_large, std::string_view large_name,
                      std::string_view small_name) {
    if (small % per_large == 0) return fmt::format("{} {}", small / per_large, large_name);
    return fmt::format("{} {} {} {}", small / per_large, large_name, small % per_large, small_name);
}

/// Edits (insert, delete, replace, swap of neighbours) from one word to the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
    for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
    for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t replace = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replace});
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[a.size()][b.size()];
}

}  // namespace

Result<std::int64_t> parse_int(std::string_view text) { return parse_whole<std::int64_t>(text); }

Result<std::uint64_t> parse_uint(std::string_view text) { return parse_whole<std::uint64_t>(text); }

Result<std::int64_t> parse_int_between(std::string_view text, std::int64_t min, std::int64_t max) {
    Result<std::int64_t> value = parse_int(text);
    if (!value) return value;
    if (*value < min || *value > max)
        return malformed(text, fmt::format("is not between {} and {}", min, max));
    return value;
}

Result<double> parse_double(std::string_view text) {
    Result<double> value = parse_whole<double>(text);
    // from_chars also accepts "inf" and "nan", which no option of ours takes.
    if (value && !std::isfinite(*value)) return malformed(text, "is not a number");
    return value;
}

Result<bool> parse_bool(std::string_view text) {
    const std::string word = lower(text);
    if (word == "1" || word == "true" || word == "yes" || word == "on") return true;
    if (word == "0" || word == "false" || word == "no" || word == "off") return false;
    return malformed(text, "is neither true nor false");
}

Result<Duration> parse_duration(std::string_view text) {
    constexpr std::string_view kExpected =
        "is not a duration (expected for example 30, 250ms, 1.5s, 15m, 2h, 1d)";
    const std::size_t digits = decimal_prefix(text);
    const Unit* const unit = find_unit(kDurationUnits, text.substr(digits));
    if (digits == 0 || unit == nullptr) return malformed(text, kExpected);
    const Result<double> number = parse_double(text.substr(0, digits));
    if (!number) return malformed(text, kExpected);
    const double nanoseconds = *number * static_cast<double>(unit->factor);
    // Twice the range of a deadline (292 years) would overflow; a century is enough.
    constexpr double kCentury = 100.0 * 365.0 * 86400e9;
    if (nanoseconds > kCentury) return Error{Errc::Limit, malformed(text, "is too long a duration").what, 0};
    return Duration(std::llround(nanoseconds));
}

Result<std::uint64_t> parse_bytes(std::string_view text) {
    const auto digits =
        static_cast<std::size_t>(std::find_if_not(text.begin(), text.end(), is_digit) - text.begin());
    const Unit* const unit = find_unit(kByteUnits, lower(text.substr(digits)));
    if (digits == 0 || unit == nullptr) {
        return malformed(text, "is not a size (expected for example 4096, 64KiB, 25MiB, 25MB)");
    }
    const Result<std::uint64_t> number = parse_uint(text.substr(0, digits));
    if (!number || *number > std::numeric_limits<std::uint64_t>::max() / unit->factor) {
        return malformed(text, "is too large a size");
    }
    return *number * unit->factor;
}

std::string format_duration(Duration span) {
    using namespace std::chrono;
    if (span < Duration::zero()) {
        return "-" + format_duration(span == Duration::min() ? Duration::max() : -span);
    }
    if (span == Duration::zero()) return "0 s";
    if (span < 1us) return fmt::format("{} ns", span.count());
    // Each step tests its own rounded number, so that 59.7 s becomes "1 min" and never "60 s".
    if (const auto us = rounded(span, 1us); us < 1000) return fmt::format("{} us", us);
    if (const auto ms = rounded(span, 1ms); ms < 1000) return fmt::format("{} ms", ms);
    if (const auto tenths = rounded(span, 100ms); tenths < 100) return one_decimal(tenths) + " s";
    if (const auto s = rounded(span, 1s); s < 60) return fmt::format("{} s", s);
    else if (s < 3600) return two_units(s, 60, "min", "s");
    if (const auto min = rounded(span, 1min); min < 1440) return two_units(min, 60, "h", "min");
    return two_units(rounded(span, 1h), 24, "d", "h");
}

std::string format_bytes(std::uint64_t bytes) {
    constexpr std::array<std::string_view, 7> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = static_cast<double>(bytes);
    std::size_t unit = 0;
    // 1023.95 would be shown as "1024.0".
    while (value >= 1023.95 && unit + 1 < kNames.size()) {
        value /= 1024;
        ++unit;
    }
    return fmt::format("{} {}", one_decimal(std::llround(value * 10)), kNames[unit]);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> pieces;
    for (std::size_t end = text.find(separator); end != std::string_view::npos; end = text.find(separator)) {
        pieces.push_back(text.substr(0, end));
        text.remove_prefix(end + 1);
    }
    pieces.push_back(text);
    return pieces;
}

std::string_view trim(std::string_view text) {
    constexpr std::string_view kBlanks = " \t\r\n\v\f";
    const std::size_t first = text.find_first_not_of(kBlanks);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::string lower(std::string_view text) {
    // Convert ASCII only: option words and units must not depend on the locale.
    std::string out(text);
    for (char& c : out) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return out;
}

std::string join(const std::vector<std::string>& pieces, std::string_view separator) {
    std::string out;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i > 0) out += separator;
        out += pieces[i];
    }
    return out;
}

std::string join_first(std::vector<std::string> pieces, std::size_t most, std::string_view separator) {
    if (pieces.size() <= most) return join(pieces, separator);
    const std::size_t more = pieces.size() - most;
    pieces.resize(most);
    return fmt::format("{} and {} more", join(pieces, separator), more);
}

std::string shell_quoted(std::string_view word) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) return std::string(word);
    std::string quoted = "'";
    for (const char c : word) {
        if (c == '\'') quoted += "'\\''";
        else quoted += c;
    }
    return quoted += "'";
}

std::string format_ranges(const std::vector<int>& sorted) {
    std::string out;
    for (std::size_t first = 0; first < sorted.size();) {
        std::size_t last = first;
        while (last + 1 < sorted.size() && sorted[last + 1] <= sorted[last] + 1) ++last;
        if (!out.empty()) out += ", ";
        if (sorted[last] == sorted[first]) out += fmt::format("{}", sorted[first]);
        else out += fmt::format("{}-{}", sorted[first], sorted[last]);
        first = last + 1;
    }
    return out;
}

std::string printable(std::string_view text) { return spelled_out(text, false); }

std::string printable_lines(std::string_view text) { return spelled_out(text, true); }

std::string excerpt(std::string_view text, std::size_t max_bytes) {
    std::size_t bytes = std::min(text.size(), max_bytes);
    const auto continues_character = [&] { return (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80; };
    while (bytes > 0 && bytes < text.size() && continues_character()) --bytes;
    const std::string shown = printable(text.substr(0, bytes));
    return bytes < text.size() ? shown + "..." : shown;
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
    // Words are short names: skip a peer's or a file's long text.
    constexpr std::size_t kMaxWord = 128;
    std::size_t best_distance = 3;
    std::string best;
    for (const std::string& candidate : candidates) {
        if (word.size() > kMaxWord || candidate.size() > kMaxWord) continue;
        const std::size_t distance = edit_distance(word, candidate);
        // A word with every second letter changed is another word: "halt" is not near "help".
        if (distance < best_distance && 2 * distance < std::max(word.size(), candidate.size())) {
            best_distance = distance;
            best = candidate;
        }
    }
    return best;
}

std::string wrap(std::string_view text, std::size_t width, std::size_t indent) {
    std::string out;
    std::size_t column = indent;  // the caller has already moved to the indent on the first line
    bool fresh = true;
    for (const std::string_view word : split(text, ' ')) {
        if (word.empty()) continue;
        if (!fresh && column + 1 + word.size() > width) {
            out += '\n';
            out.append(indent, ' ');
            column = indent;
            fresh = true;
        }
        if (!fresh) {
            out += ' ';
            ++column;
        }
        out += word;
        column += word.size();
        fresh = false;
    }
    return out;
}

}  // namespace ddprun
