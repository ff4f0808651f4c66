#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// A JSON value: null, true or false, a number, text, a list, or an object whose members keep their order.
///
/// Reading never throws and never changes the value: what is asked of the wrong kind is empty, a whole number
/// that does not fit is absent. What reads and writes the text is known to json.cpp alone.
class Json {
  public:
    struct Member;

    Json();                                          ///< null
    Json(std::nullptr_t);                            // NOLINT: implicit on purpose, as all that follow
    Json(bool value);                                // NOLINT
    Json(int value);                                 // NOLINT
    Json(unsigned value);                            // NOLINT
    Json(long value);                                // NOLINT
    Json(unsigned long value);                       // NOLINT
    Json(long long value);                           // NOLINT
    Json(unsigned long long value);                  // NOLINT
    Json(double value);                              // NOLINT: written as null when it is not finite
    Json(const char* text);                          // NOLINT
    Json(std::string_view text);                     // NOLINT
    Json(std::string text);                          // NOLINT
    Json(const std::vector<std::string>& texts);     // NOLINT
    Json(const std::vector<int>& numbers);           // NOLINT
    Json(const std::vector<unsigned>& numbers);      // NOLINT
    Json(const std::vector<std::int64_t>& numbers);  // NOLINT
    Json(std::initializer_list<Member>
             members);           ///< {{"rank", 3}, {"host", "node02"}}; names are not repeated
    Json(const void*) = delete;  ///< would be a bool
    static Json object();
    static Json list(std::initializer_list<Json> elements = {});
    static Json object(std::vector<Member> members);  ///< names are not repeated
    static Json list(std::vector<Json> elements);

    Json(const Json& other);
    Json(Json&& other) noexcept;
    Json& operator=(const Json& other);
    Json& operator=(Json&& other) noexcept;
    ~Json();

    [[nodiscard]] bool is_null() const;
    [[nodiscard]] bool is_bool() const;
    [[nodiscard]] bool is_number() const;
    [[nodiscard]] bool is_whole() const;  ///< a number without point and exponent, within 64 bits
    [[nodiscard]] bool is_text() const;
    [[nodiscard]] bool is_list() const;
    [[nodiscard]] bool is_object() const;
    [[nodiscard]] std::string_view kind()
        const;  ///< "null", "boolean", "number", "string", "array", "object"

    [[nodiscard]] std::optional<bool> as_bool() const;
    [[nodiscard]] std::optional<int> as_int() const;
    [[nodiscard]] std::optional<std::int64_t> as_int64() const;
    [[nodiscard]] std::optional<std::uint64_t> as_uint64() const;
    [[nodiscard]] std::optional<double> as_double() const;  ///< of any number
    [[nodiscard]] const std::string& text() const;
    [[nodiscard]] const std::vector<Json>& elements() const;
    [[nodiscard]] const std::vector<Member>& members() const;
    [[nodiscard]] std::size_t size() const;  ///< of elements or members

    /// The member of that name; nullptr where there is none. Looks at one member after the other.
    [[nodiscard]] const Json* find(std::string_view name) const;
    [[nodiscard]] bool contains(std::string_view name) const { return find(name) != nullptr; }
    /// As find, null where there is none.
    const Json& operator[](std::string_view name) const;
    const Json& operator[](const char* name) const { return (*this)[std::string_view(name)]; }
    const Json& operator[](std::size_t element) const;
    const Json& operator[](int element) const { return (*this)[static_cast<std::size_t>(element)]; }

    /// Replaces the member of that name, or appends it; null becomes an object.
    Json& set(std::string_view name, Json value);
    /// Appends an element; null becomes a list.
    Json& add(Json element);

    /// Numbers are equal when their values are, in whichever form; objects when their members are, in any
    /// order.
    bool operator==(const Json& other) const;

  private:
    using List = std::vector<Json>;
    using Object = std::vector<Member>;
    /// A whole number is unsigned unless it is negative.
    std::variant<std::monostate, bool, std::uint64_t, std::int64_t, double, std::string, List, Object> value_;
};

struct Json::Member {
    std::string name;
    Json value;
};

struct JsonRules {
    bool comments = false;      ///< // and /* */ are skipped
    bool unique_names = false;  ///< an object with a repeated name is an error; else its last value counts
};

/// Lists and objects in each other, at most.
inline constexpr std::size_t kMostJsonDepth = 100;

/// The value that the whole text is. Takes time in proportion to the text, whatever it says.
/// Error: InvalidArgument, one short line with line and column where they are known.
Result<Json> parse_json(std::string_view text, const JsonRules& rules = {});

/// The object that the text is, nullopt for anything else: where nobody wants to hear what is wrong with it.
std::optional<Json> parse_json_object(std::string_view text);

/// Without any white space, or with `indent` spaces for each level. Bytes that are not UTF-8 become U+FFFD.
std::string to_text(const Json& json, int indent = -1);
std::ostream& operator<<(std::ostream& out, const Json& json);
/// Appends a text as JSON: in quotes, escaped.
void append_json_text(std::string& out, std::string_view text);

/// Reading what another version of a program said: where the member is missing, of another kind or out of
/// range, the default stays.
void take(const Json& object, std::string_view name, std::string& into);
void take(const Json& object, std::string_view name, bool& into);
void take(const Json& object, std::string_view name, int& into);
void take(const Json& object, std::string_view name, unsigned& into);
void take(const Json& object, std::string_view name, std::int64_t& into);
void take(const Json& object, std::string_view name, std::uint64_t& into);
void take(const Json& object, std::string_view name, double& into);

/// For a function that names the members of a struct once, for both directions: each_member(struct, field)
/// calls field("rank", struct.rank) and so on, and is given one of these.
inline auto member_writer(Json& json) {
    return [&json](std::string_view name, const auto& value) { json.set(name, value); };
}
inline auto member_reader(const Json& json) {
    return [&json](std::string_view name, auto& value) { take(json, name, value); };
}

/// The list of what `to_json` makes of each.
template <class Range, class ToJson>
Json json_list(const Range& range, ToJson to_json) {
    std::vector<Json> elements;
    elements.reserve(range.size());
    for (const auto& one : range) elements.push_back(to_json(one));
    return Json::list(std::move(elements));
}

}  // namespace ddprun
