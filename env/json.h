#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Forbid implicit conversions of Json to text or number, which throw.
#define JSON_USE_IMPLICIT_CONVERSIONS 0
#include <nlohmann/json.hpp>

#include "env/result.h"

namespace ddprun {

/// A JSON value of no fixed shape, whose objects keep the order of their members; describe.h is for values of
/// ours. Read foreign values with as() and the
/// functions beside it: unlike the library's own, they do not throw and change nothing.
using Json = nlohmann::ordered_json;

struct JsonRules {
    bool comments = false;      ///< // and /* */ are skipped
    bool unique_names = false;  ///< an object with a repeated name is an error; else its last value counts
};

/// The deepest nesting of lists and objects.
inline constexpr std::size_t kMostJsonDepth = 100;

/// Parses the whole text. The time is proportional to the text's length.
/// Error: InvalidArgument, one short line with line and column where they are known.
Result<Json> parse_json(std::string_view text, const JsonRules& rules = {});
/// Parses a text that has to be an object. Error: as above; or another value.
Result<Json> parse_json_object(std::string_view text);

/// The JSON text, without white space, or with `indent` spaces for each level. Bytes that are not UTF-8
/// become U+FFFD; a number that is not finite becomes null.
std::string to_text(const Json& json, int indent = -1);
/// Appends a text as JSON: in quotes, escaped.
void append_json_text(std::string& out, std::string_view text);

/// Makes an object, in time proportional to the number of members. Names must not repeat.
Json json_object(std::vector<std::pair<std::string, Json>> members);

/// The member of that name; a null where there is none, or where `json` is no object.
const Json& member(const Json& json, std::string_view name);
/// The elements or members; none where `json` is no list, or no object.
const Json::array_t& elements(const Json& json);
const Json::object_t& members(const Json& json);

/// The value as a bool, int, unsigned, std::int64_t, std::uint64_t, double or std::string.
/// Error: InvalidArgument, "is null, expected text" or "is out of range", ready to follow a name.
template <class T>
Result<T> as(const Json& json);
template <class T>
Result<T> as(const Json& object, std::string_view name) {
    return as<T>(member(object, name));
}
/// The text of a member; "" where there is none.
inline std::string text_of(const Json& object, std::string_view name) {
    return as<std::string>(object, name).value_or("");
}
/// Reads a member that another version of a program wrote: `into` keeps its value where the member is
/// missing, of another kind or out of range.
template <class T>
void take(const Json& object, std::string_view name, T& into) {
    if (Result<T> value = as<T>(object, name)) into = *std::move(value);
}

/// A list of to_json(element) for each element.
template <class Range, class ToJson>
Json json_list(const Range& range, ToJson to_json) {
    Json list = Json::array();
    for (const auto& one : range) list.push_back(to_json(one));
    return list;
}

}  // namespace ddprun
