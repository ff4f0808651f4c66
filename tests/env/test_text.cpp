#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "env/text.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;

template <class T>
std::string message(const Result<T>& result) {
    return result ? "no error" : result.error().what;
}

TEST(ParseInt, TakesTheWholeTextOrNothing) {
    EXPECT_EQ(*parse_int("0"), 0);
    EXPECT_EQ(*parse_int("-17"), -17);
    EXPECT_EQ(*parse_int("9223372036854775807"), INT64_MAX);
    for (const char* const bad : {"", " 1", "1 ", "+1", "1x", "0x10", "1.0", "--1", "1,000"}) {
        EXPECT_EQ(message(parse_int(bad)), "'" + std::string(bad) + "' is not a number") << bad;
    }
}

TEST(ParseInt, DistinguishesTooLargeFromMalformed) {
    EXPECT_EQ(message(parse_int("9223372036854775808")), "'9223372036854775808' is too large a number");
    EXPECT_EQ(message(parse_uint("18446744073709551616")), "'18446744073709551616' is too large a number");
}

TEST(ParseUint, RefusesASign) {
    EXPECT_EQ(*parse_uint("18446744073709551615"), UINT64_MAX);
    EXPECT_FALSE(parse_uint("-1"));
}

TEST(ParseIntBetween, NamesTheBounds) {
    EXPECT_EQ(*parse_int_between("1", 1, 65535), 1);
    EXPECT_EQ(*parse_int_between("65535", 1, 65535), 65535);
    EXPECT_EQ(message(parse_int_between("70000", 1, 65535)), "'70000' is not between 1 and 65535");
    EXPECT_EQ(message(parse_int_between("0", 1, 65535)), "'0' is not between 1 and 65535");
    EXPECT_EQ(message(parse_int_between("x", 1, 65535)), "'x' is not a number");
}

TEST(ParseInt, ShowsHostileTextShortAndPrintable) {
    EXPECT_EQ(message(parse_int("\033[2J")), "'\\x1b[2J' is not a number");
    EXPECT_LT(message(parse_int(std::string(1 << 20, 'x'))).size(), 200U);
}

TEST(ParseDouble, TakesFiniteNumbersOnly) {
    EXPECT_DOUBLE_EQ(*parse_double("0.5"), 0.5);
    EXPECT_DOUBLE_EQ(*parse_double("-1e-3"), -0.001);
    for (const char* const bad : {"", "nan", "inf", "-inf", "1,5", "0.5 ", "1e999"})
        EXPECT_FALSE(parse_double(bad)) << bad;
}

TEST(ParseBool, KnowsTheUsualWordsInAnyCase) {
    for (const char* const yes : {"1", "true", "True", "YES", "on"}) EXPECT_TRUE(*parse_bool(yes)) << yes;
    for (const char* const no : {"0", "false", "False", "NO", "off"}) EXPECT_FALSE(*parse_bool(no)) << no;
    for (const char* const bad : {"", "2", "y", "truee"}) EXPECT_FALSE(parse_bool(bad).has_value()) << bad;
}

TEST(ParseDuration, TakesSecondsByDefaultAndUnits) {
    EXPECT_EQ(*parse_duration("90"), 90s);
    EXPECT_EQ(*parse_duration("90s"), 90s);
    EXPECT_EQ(*parse_duration("250ms"), 250ms);
    EXPECT_EQ(*parse_duration("1.5s"), 1500ms);
    EXPECT_EQ(*parse_duration("0.25"), 250ms);
    EXPECT_EQ(*parse_duration("15m"), 15min);
    EXPECT_EQ(*parse_duration("2h"), 2h);
    EXPECT_EQ(*parse_duration("1d"), 24h);
    EXPECT_EQ(*parse_duration("0"), 0s);
}

TEST(ParseDuration, RefusesSignsBlanksUnknownUnitsAndCenturies) {
    for (const char* const bad :
         {"", "s", "-1", "+1", "1 s", "1.", ".5", "1.5.5", "1e3", "1us", "5S", "nan", "inf"}) {
        EXPECT_FALSE(parse_duration(bad)) << bad;
    }
    EXPECT_EQ(message(parse_duration("99999999d")), "'99999999d' is too long a duration");
    EXPECT_FALSE(parse_duration(std::string(400, '9')));
}

TEST(ParseBytes, KnowsBinaryAndDecimalUnits) {
    EXPECT_EQ(*parse_bytes("4096"), 4096U);
    EXPECT_EQ(*parse_bytes("0"), 0U);
    EXPECT_EQ(*parse_bytes("64K"), 65536U);
    EXPECT_EQ(*parse_bytes("64KiB"), 65536U);
    EXPECT_EQ(*parse_bytes("64kb"), 64000U);
    EXPECT_EQ(*parse_bytes("25MiB"), 25U * 1024 * 1024);
    EXPECT_EQ(*parse_bytes("25MB"), 25'000'000U);
    EXPECT_EQ(*parse_bytes("2G"), 2ULL << 30);
    EXPECT_EQ(*parse_bytes("1TiB"), 1ULL << 40);
}

TEST(ParseBytes, RefusesSizesThatDoNotFit) {
    EXPECT_EQ(message(parse_bytes("99999999999T")), "'99999999999T' is too large a size");
    EXPECT_EQ(message(parse_bytes("99999999999999999999")), "'99999999999999999999' is too large a size");
    for (const char* const bad : {"", "K", "-1", "1.5G", "1 K", "1Q"}) EXPECT_FALSE(parse_bytes(bad)) << bad;
}

TEST(FormatDuration, UsesTheUnitsOfPeople) {
    EXPECT_EQ(format_duration(0s), "0 s");
    EXPECT_EQ(format_duration(20ms), "20 ms");
    EXPECT_EQ(format_duration(250us), "250 us");
    EXPECT_EQ(format_duration(12ns), "12 ns");
    EXPECT_EQ(format_duration(1500ms), "1.5 s");
    EXPECT_EQ(format_duration(2s), "2 s");
    EXPECT_EQ(format_duration(41s), "41 s");
    EXPECT_EQ(format_duration(125s), "2 min 5 s");
    EXPECT_EQ(format_duration(3h + 4min), "3 h 4 min");
    EXPECT_EQ(format_duration(50h), "2 d 2 h");
    EXPECT_EQ(format_duration(-2s), "-2 s");
    EXPECT_FALSE(format_duration(Duration::min()).empty());
}

TEST(FormatDuration, RoundsUpIntoTheNextUnit) {
    EXPECT_EQ(format_duration(999'900us), "1 s");
    EXPECT_EQ(format_duration(9'960ms), "10 s");
    EXPECT_EQ(format_duration(59'700ms), "1 min");
    EXPECT_EQ(format_duration(59min + 59'700ms), "1 h");
}

TEST(FormatBytes, UsesTheUnitsOfPeople) {
    EXPECT_EQ(format_bytes(0), "0 B");
    EXPECT_EQ(format_bytes(512), "512 B");
    EXPECT_EQ(format_bytes(64 * 1024), "64 KiB");
    EXPECT_EQ(format_bytes(25 * 1024 * 1024), "25 MiB");
    EXPECT_EQ(format_bytes(3ULL << 29), "1.5 GiB");
    EXPECT_EQ(format_bytes((1ULL << 20) - 1), "1 MiB");
    EXPECT_EQ(format_bytes(UINT64_MAX), "16 EiB");
}

TEST(Split, KeepsEmptyPieces) {
    EXPECT_THAT(split("a,,b,", ','), ElementsAre("a", "", "b", ""));
    EXPECT_THAT(split("", ','), ElementsAre(""));
    EXPECT_THAT(split("abc", ','), ElementsAre("abc"));
}

TEST(Trim, TakesBlanksFromBothEndsOnly) {
    EXPECT_EQ(trim(" \t a b \r\n"), "a b");
    EXPECT_EQ(trim(" \n"), "");
    EXPECT_EQ(trim(""), "");
}

TEST(Printable, EscapesCharactersThatATerminalObeys) {
    EXPECT_EQ(printable("a\033[2Jb\r\x07\x7f\n"), "a\\x1b[2Jb\\x0d\\x07\\x7f\\n");
    EXPECT_EQ(printable("C1: \xc2\x9b"
                        "2J \xc2\x80 \xc2\x9f"),
              "C1: \\u{9b}2J \\u{80} \\u{9f}");
    EXPECT_EQ(printable("eight bits: \x9b"
                        "2J"),
              "eight bits: \\x9b2J");
    EXPECT_EQ(printable(std::string_view("nul\0", 4)), "nul\\x00");
}

TEST(Printable, EscapesCharactersThatReorderOrHideText) {
    EXPECT_EQ(printable("a\xe2\x80\xae"
                        "b"),
              "a\\u{202e}b")
        << "right-to-left override";
    EXPECT_EQ(printable("\xe2\x81\xa6\xe2\x81\xa9\xd8\x9c"), "\\u{2066}\\u{2069}\\u{61c}");
    EXPECT_EQ(printable("\xe2\x80\xa8\xe2\x80\x8b\xef\xbb\xbf"), "\\u{2028}\\u{200b}\\u{feff}");
    EXPECT_EQ(printable("\xf3\xa0\x81\x81"), "\\u{e0041}") << "a tag";
}

TEST(Printable, LeavesEveryScriptTabsAndBackslashesAsTheyAre) {
    const std::string text =
        "plain\t\\x1b \xc3\xa4 \xd7\xa9 \xd8\xb9 \xe0\xa4\x95\xe2\x80\x8d \xe4\xb8\xad \xf0\x9f\x9a\x80 \xc2\xa0";
    EXPECT_EQ(printable(text), text);
    EXPECT_EQ(printable(""), "");
}

TEST(Printable, ShowsBytesThatAreNoUtf8OneByOne) {
    EXPECT_EQ(printable("\xff\xfe"), "\\xff\\xfe");
    EXPECT_EQ(printable("\xc3"), "\\xc3") << "cut off";
    EXPECT_EQ(printable("\xe2\x80"
                        "a"),
              "\\xe2\\x80a");
    EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b") << "longer than it needs to be";
    EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "half of a pair";
    EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "beyond the last";
}

TEST(Printable, HasNoControlBytesAndIsIdempotentForAnyInput) {
    std::string every;
    for (int a = 0; a < 256; ++a) {
        for (int b = 0; b < 256; ++b) every += {static_cast<char>(a), static_cast<char>(b)};
    }
    const std::string shown = printable(every);
    EXPECT_TRUE(std::none_of(shown.begin(), shown.end(),
                             [](unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; }));
    EXPECT_EQ(printable(shown), shown);
    EXPECT_EQ(printable_lines("a\n\x1b\n\n"), "a\n\\x1b\n\n");
}

TEST(Join, PutsTheSeparatorBetween) {
    EXPECT_EQ(join({"a", "b", "c"}, ", "), "a, b, c");
    EXPECT_EQ(join({"a"}, ", "), "a");
    EXPECT_EQ(join({}, ", "), "");
}

TEST(FormatRanges, FoldsNeighbours) {
    EXPECT_EQ(format_ranges({0, 1, 2, 5}), "0-2, 5");
    EXPECT_EQ(format_ranges({3}), "3");
    EXPECT_EQ(format_ranges({1, 2, 4, 5}), "1-2, 4-5");
    EXPECT_EQ(format_ranges({2, 2, 4, 5, 5}), "2, 4-5") << "a rank and its replacement";
    EXPECT_EQ(format_ranges({}), "");
}

TEST(Nearest, FindsTypingMistakesAndNothingElse) {
    const std::vector<std::string> words{"train", "nproc-per-node", "nnodes"};
    EXPECT_EQ(nearest("trian", words), "train");
    EXPECT_EQ(nearest("nproc-per-nod", words), "nproc-per-node");
    EXPECT_EQ(nearest("nnode", words), "nnodes");
    EXPECT_EQ(nearest("evaluate", words), "");
    EXPECT_EQ(nearest("x", {"ab"}), "");
    EXPECT_EQ(nearest("help", {"halt"}), "");
    EXPECT_EQ(nearest(std::string(1 << 20, 't'), words), "");
}

TEST(Excerpt, IsOneShortLineCutBetweenCharacters) {
    EXPECT_EQ(excerpt("plain"), "plain");
    EXPECT_EQ(excerpt("a\nb\x1b[2J\x7f"), "a\\nb\\x1b[2J\\x7f");
    EXPECT_EQ(excerpt("abcdef", 4), "abcd...");
    EXPECT_EQ(excerpt("abc\xc3\xa4\xc3\xa4", 4), "abc...");
    EXPECT_EQ(excerpt(std::string(10, '\x80'), 4), "...");
    EXPECT_EQ(excerpt(""), "");
}

}  // namespace
}  // namespace ddprun
