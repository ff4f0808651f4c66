#include "env/describe.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace ddprun {
namespace {

enum class Colour : std::uint8_t { Red, Green };
constexpr std::string_view kColours[] = {"red", "green"};

struct Inner {
    int number = 0;
    std::string text;
    bool operator==(const Inner&) const = default;
};
void describe(Visitor& v, Inner& inner) {
    v("number", inner.number);
    v("text", inner.text);
}

struct Outer {
    bool truth = false;
    double real = 0;
    unsigned natural = 0;
    std::uint64_t large = 0;
    Duration span{};
    Colour colour = Colour::Red;
    std::optional<std::int64_t> whole;
    std::string usual = "usual";
    int later = 7;
    Inner inner;
    std::vector<Inner> list, rows;
    std::vector<std::string> texts;
    bool operator==(const Outer&) const = default;
};
void describe(Visitor& v, Outer& outer) {
    v("truth", outer.truth);
    v("real", outer.real);
    v("natural", outer.natural);
    v("large", outer.large);
    v("span_ns", outer.span);
    v.choice("colour", outer.colour, kColours);
    v("whole", outer.whole);
    v.usually("usual", outer.usual, "usual");
    v.defaulted("later", outer.later);
    v("inner", outer.inner);
    v("list", outer.list);
    v.rows("rows", outer.rows);
    v("texts", outer.texts);
}

Outer full() {
    return {true,
            0.1,
            4'000'000'000,
            std::numeric_limits<std::uint64_t>::max(),
            Duration(5),
            Colour::Green,
            -3,
            "rare",
            8,
            {1, "a"},
            {{2, "b"}, {3, "\"\n"}},
            {{4, "d"}, {5, "e"}},
            {"x", "\xc3\xa4"}};
}

TEST(Describe, WritesMembersInTheirOrder) {
    EXPECT_EQ(
        to_json(full()),
        R"({"truth":true,"real":0.1,"natural":4000000000,"large":18446744073709551615,"span_ns":5,"colour":"green",)"
        R"("whole":-3,"usual":"rare","later":8,"inner":{"number":1,"text":"a"},)"
        R"("list":[{"number":2,"text":"b"},{"number":3,"text":"\"\n"}],"rows":[[4,"d"],[5,"e"]],"texts":["x","ä"]})");
    EXPECT_EQ(to_json(Outer{}),
              R"({"truth":false,"real":0.0,"natural":0,"large":0,"span_ns":0,"colour":"red","later":7,)"
              R"("inner":{"number":0,"text":""},"list":[],"rows":[],"texts":[]})");
}

TEST(Describe, ReadsWhatItHasWritten) {
    for (const Outer& one : {full(), Outer{}}) {
        const Result<Outer> back = from_json<Outer>(to_json(one));
        ASSERT_TRUE(back) << back.error().what;
        EXPECT_EQ(*back, one);
        EXPECT_EQ(*from_json<Outer>(to_json(one, 2)), one) << "the indented text";
    }
}

TEST(Describe, IndentsAsTheLibraryDoes) {
    JsonWriter json(2);
    json("number", 1);
    json.object("empty", [] {});
    json.objects("list", std::vector{7}, [&](int number) { json("n", number); });
    json.or_null("none", std::optional<int>());
    EXPECT_EQ(std::move(json).text(),
              "{\n  \"number\": 1,\n  \"empty\": {},\n  \"list\": [\n    {\n      \"n\": 7\n    }\n  ],\n"
              "  \"none\": null\n}");
}

struct Malformed {
    const char* json;
    const char* says;
};

TEST(Describe, NamesTheFirstMemberThatIsWrong) {
    for (const auto& [json, says] : std::initializer_list<Malformed>{
             {R"({"text":"a"})", "'number' is missing"},
             {R"({"number":null,"text":"a"})", "'number' is null, expected a whole number"},
             {R"({"number":2147483648,"text":"a"})", "'number' is out of range"},
             {R"({"number":1,"text":["a"]})", "'text' is array, expected text"},
             {"[]", "not a JSON object"},
         }) {
        EXPECT_EQ(from_json<Inner>(json).error().what, says);
        EXPECT_EQ(from_json<Inner>(json).error().code, Errc::Protocol);
    }
    const std::string good = to_json(full());
    for (const auto& [part, says] : std::initializer_list<Malformed>{
             {R"("green")", "'colour' is 'blue'"},
             {"[[4,", "'rows' is number, expected a list"},
             {R"({"number":1,"text":"a"})", "'inner' is number, expected an object"},
             {R"("span_ns":5)", "'span_ns' is negative"},
         }) {
        std::string bad = good;
        const std::string_view instead = says[1] == 'c'   ? R"("blue")"
                                         : says[1] == 'r' ? "[4,["
                                         : says[1] == 'i' ? "1"
                                                          : R"("span_ns":-5)";
        bad.replace(bad.find(part), std::string_view(part).size(), instead);
        const Result<Outer> read = from_json<Outer>(bad);
        ASSERT_FALSE(read) << bad;
        EXPECT_EQ(read.error().what, says);
    }
}

TEST(Describe, KeepsDefaultsInTheValueOfAnotherVersion) {
    const Result<Outer> read =
        from_json<Outer>(R"({"truth":1,"later":"x","list":[3,{"number":2}],"texts":["a",1,"b"],"new":{}})",
                         Strictness::Tolerant);
    ASSERT_TRUE(read);
    Outer expected;
    expected.list = {{2, ""}};
    expected.texts = {"a", "b"};
    EXPECT_EQ(*read, expected);
    EXPECT_FALSE(from_json<Outer>("[]", Strictness::Tolerant));
}

TEST(Describe, EscapesTextThatIsNotUtf8) {
    EXPECT_EQ(to_json(Inner{1, "\xff"}), "{\"number\":1,\"text\":\"\xef\xbf\xbd\"}");
}

}  // namespace
}  // namespace ddprun
