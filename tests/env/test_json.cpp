#include "env/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

namespace ddprun {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string error_of(std::string_view text, const JsonRules& rules = {}) {
    const Result<Json> json = parse_json(text, rules);
    return json ? "accepted: " + to_text(*json) : json.error().what;
}

std::string again(std::string_view text) { return to_text(parse_json(text).value_or(Json("refused"))); }

/// The same value, which a blank makes the library read.
void expect_read_alike(const std::string& text) {
    const Result<Json> plain = parse_json(text), by_library = parse_json(" " + text);
    ASSERT_EQ(plain.has_value(), by_library.has_value()) << text;
    if (!plain) return;
    EXPECT_EQ(*plain, *by_library) << text;
    EXPECT_EQ(to_text(*plain), to_text(*by_library)) << text;
}

TEST(Json, APlainObjectIsReadAsAnyOther) {
    for (const char* text : {R"({"key":"a/b","generation":1})",
                             R"({})",
                             R"({"n":0})",
                             R"({"n":-5})",
                             R"({"n":-0})",
                             R"({"n":01})",
                             R"({"n":-01})",
                             R"({"n":--1})",
                             R"({"n":1-1})",
                             R"({"n":-})",
                             R"({"n":9223372036854775807})",
                             R"({"n":-9223372036854775808})",
                             R"({"n":9223372036854775808})",
                             R"({"n":18446744073709551616})",
                             R"({"n":1.5})",
                             R"({"n":1e3})",
                             R"({"a":true,"b":false,"c":null})",
                             R"({"a":truely})",
                             R"({"a":"\u0041"})",
                             R"({"a":"\""})",
                             R"({"a":"\\"})",
                             "{\"a\":\"\xc3\xa4\"}",
                             "{\"a\":\"\xff\"}",
                             "{\"a\":\"\n\"}",
                             R"({"a":1,"a":2})",
                             R"({"a":"x"}})",
                             R"({"a":"x")",
                             R"({"a":"x})",
                             R"({"a":1,})",
                             R"({"a"})",
                             R"({"a":})",
                             R"({:1})",
                             R"({"":1})",
                             R"({"a":[1]})",
                             R"({"a":{}})"}) {
        expect_read_alike(text);
    }
}

TEST(Json, IsWrittenAsItWasRead) {
    for (const char* text :
         {"null", "true", "false", "0", "-1", "18446744073709551615", "-9223372036854775808", "1.5", "0.1",
          "1e+300", "-0.0", R"("")", R"("a\"\\\b\f\n\r\t/")", "[]", "{}", R"([1,[2,{}],"x"])",
          R"({"z":1,"a":{"b":[null]}})", "\"\xc3\xa4 \xf0\x9f\x98\x80\""}) {
        EXPECT_EQ(again(text), text);
    }
    EXPECT_EQ(again(" [ 1 , 2 ] "), "[1,2]");
    EXPECT_EQ(again("1E2"), "100.0");
    EXPECT_EQ(again(R"("\u00e4\u0001")"), "\"\xc3\xa4\\u0001\"");
}

TEST(Json, IsIndentedOnDemand) {
    const Json json{{"a", 1}, {"b", Json::array({true, Json::object()})}, {"c", Json::array()}};
    EXPECT_EQ(to_text(json, 2), "{\n  \"a\": 1,\n  \"b\": [\n    true,\n    {}\n  ],\n  \"c\": []\n}");
}

TEST(Json, WritesWhatIsNotUtf8WithReplacements) {
    EXPECT_EQ(to_text(Json("caf\xe9")), "\"caf\xef\xbf\xbd\"");
    EXPECT_EQ(to_text(Json{{"\xff", 1}}), "{\"\xef\xbf\xbd\":1}");
}

TEST(Json, EscapesEveryControlCharacterThatATerminalObeys) {
    const std::string text =
        "a\x1b b\x7f c\xc2\x9b"
        "d \xc3\xa9\xc2\xa0";
    EXPECT_EQ(to_text(Json(text)), R"("a\u001b b\u007f c\u009bd )"
                                   "\xc3\xa9\xc2\xa0\"");
    EXPECT_EQ(*parse_json(to_text(Json(text))), text);
}

TEST(Json, WritesWhatIsNoNumberAsNull) {
    EXPECT_EQ(to_text(std::nan("")), "null");
    EXPECT_EQ(to_text(-std::numeric_limits<double>::infinity()), "null");
}

TEST(Json, KeepsTheOrderOfMembers) {
    Json json{{"z", 1}, {"a", 2}};
    json["m"] = 3;
    json["z"] = 4;
    EXPECT_EQ(to_text(json), R"({"z":4,"a":2,"m":3})");
    EXPECT_EQ(to_text(json_object({{"z", 1}, {"a", Json::array()}})), R"({"z":1,"a":[]})");
}

TEST(Json, HasNothingWhereItIsOfAnotherKind) {
    const Json json{{"text", "x"}, {"number", 7}};
    EXPECT_EQ(text_of(member(json, "absent"), "deeper"), "");
    EXPECT_EQ(text_of(json, "number"), "");
    EXPECT_EQ(text_of(json, "text"), "x");
    EXPECT_TRUE(elements(member(json, "text")).empty());
    EXPECT_TRUE(members(member(json, "text")).empty());
    EXPECT_TRUE(member(json, "absent").is_null());
    EXPECT_EQ(as<std::int64_t>(json, "text").error().what, "is string, expected a whole number");
    EXPECT_EQ(as<bool>(json, "number").error().what, "is number, expected true or false");
}

TEST(Json, GivesNoNumberThatDoesNotFit) {
    const Json json = *parse_json("[2147483648,-1,9223372036854775808,18446744073709551616,1.0]");
    EXPECT_EQ(as<int>(json[0]).error().what, "is out of range");
    EXPECT_EQ(*as<std::int64_t>(json[0]), 2147483648);
    EXPECT_FALSE(as<std::uint64_t>(json[1]));
    EXPECT_EQ(*as<int>(json[1]), -1);
    EXPECT_EQ(*as<unsigned>(Json(7)), 7U);
    EXPECT_FALSE(as<std::int64_t>(json[2]));
    EXPECT_EQ(*as<std::uint64_t>(json[2]), 9223372036854775808U);
    EXPECT_FALSE(as<std::uint64_t>(json[3]));
    EXPECT_FALSE(as<std::uint64_t>(json[4]));
    EXPECT_EQ(*as<double>(json[4]), 1.0);
}

TEST(Json, TakesIntoADefaultOnlyWhatFits) {
    const Json json = *parse_json(R"({"text":"x","big":4294967296,"negative":-1,"yes":true})");
    std::string text = "default";
    int number = 5;
    unsigned natural = 6;
    bool yes = false;
    double real = 0;
    take(json, "text", text);
    take(json, "big", number);
    take(json, "negative", natural);
    take(json, "yes", yes);
    take(json, "big", real);
    EXPECT_EQ(text, "x");
    EXPECT_EQ(number, 5);
    EXPECT_EQ(natural, 6U);
    EXPECT_TRUE(yes);
    EXPECT_EQ(real, 4294967296.0);
    take(json, "absent", text);
    take(json, "yes", text);
    EXPECT_EQ(text, "x");
}

TEST(ParseJson, NamesThePlaceOfWhatIsWrong) {
    EXPECT_THAT(error_of("{\"a\": 1,\n \"b\" 2}"), StartsWith("parse error at line 2, column 6: "));
    EXPECT_THAT(error_of(""), StartsWith("parse error at line 1, column 1: "));
    EXPECT_THAT(error_of("1 2"), Not(HasSubstr("accepted")));
    EXPECT_THAT(error_of("\"\xff\""), Not(HasSubstr("accepted")));
}

TEST(ParseJson, RefusesANumberThatNoDoubleHolds) {
    EXPECT_EQ(error_of("{\n\"a\":1e400}"),
              "parse error at line 2, column 9: the number 1e400 is out of range");
    EXPECT_THAT(error_of("-1e999999999"), HasSubstr("out of range"));
}

TEST(ParseJson, SaysInOneShortLineWhateverTheTextIs) {
    const std::string many(100'000, 'x');
    for (const std::string& text :
         {many, "\"" + many, "1e4" + std::string(100'000, '0'), "{\"" + many + "\":1,\"" + many + "\":2}",
          "\"\n" + many, std::string(100'000, '['), std::string("{\"a\\n\":1,\"a\\n\":2}")}) {
        const std::string error = error_of(text, {.unique_names = true});
        EXPECT_THAT(error, Not(HasSubstr("accepted")));
        EXPECT_LT(error.size(), 300U);
        EXPECT_THAT(error, Not(HasSubstr("\n")));
    }
}

TEST(ParseJson, RefusesListsAndObjectsTooDeepInEachOther) {
    const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
    EXPECT_TRUE(parse_json(nested(kMostJsonDepth)));
    EXPECT_THAT(error_of(nested(kMostJsonDepth + 1)),
                HasSubstr("more than 100 lists and objects in each other"));
    EXPECT_FALSE(parse_json(std::string(10'000'000, '[')));
}

TEST(ParseJson, SkipsCommentsOnlyWhereTheyAreAllowed) {
    const char* text = "// a job\n{\"a\": /* one */ 1}";
    EXPECT_EQ(to_text(parse_json(text, {.comments = true}).value_or(Json("refused"))), R"({"a":1})");
    EXPECT_FALSE(parse_json(text));
}

TEST(ParseJson, RefusesARepeatedNameWhereNamesAreUnique) {
    EXPECT_EQ(error_of(R"({"x":{"b":1,"a":2,"b":3}})", {.unique_names = true}),
              "the name 'b' stands twice in one object");
    EXPECT_EQ(error_of(R"({"a":1,"\u0061":2})", {.unique_names = true}),
              "the name 'a' stands twice in one object");
    EXPECT_TRUE(parse_json(R"([{"a":1},{"a":2}])", {.unique_names = true}));
}

TEST(ParseJson, KeepsTheLastValueOfARepeatedNameElsewhere) {
    EXPECT_EQ(again(R"({"b":1,"a":2,"b":3,"c":4,"b":5,"a":6})"), R"({"b":5,"a":6,"c":4})");
}

TEST(ParseJson, TakesABigObjectInTimeProportionalToItsSize) {
    const auto seconds_for = [](int members) {
        std::string text = "{";
        for (int i = 0; i < members; ++i) text += "\"name-" + std::to_string(i) + "\":0,";
        text += "\"last\":0}";
        const auto begin = std::chrono::steady_clock::now();
        EXPECT_TRUE(parse_json(text, {.unique_names = true}));
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const double few = seconds_for(10'000), many = seconds_for(320'000);
    EXPECT_LT(many, 32 * 8 * few);  // a search for every name would take a thousand times as long
}

}  // namespace
}  // namespace ddprun
