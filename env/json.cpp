#include "env/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <utility>

#include "env/text.h"

namespace ddprun {
namespace {

using Library = nlohmann::json;

constexpr std::size_t kMessageBytes = 200;

/// Whether a short object, as nearly all are, repeats no name.
bool is_short_and_unique(const std::vector<Json::Member>& members) {
    constexpr std::size_t kShort = 16;
    if (members.size() > kShort) return false;
    for (auto one = members.begin(); one != members.end(); ++one) {
        if (std::any_of(members.begin(), one,
                        [&](const Json::Member& before) { return before.name == one->name; }))
            return false;
    }
    return true;
}

/// Merges repeated names: the last value counts, at the place of the first. Returns a name that was repeated.
std::optional<std::string> merge_repeated(std::vector<Json::Member>& members) {
    if (is_short_and_unique(members)) return std::nullopt;
    std::vector<std::size_t> order(members.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        const int names = members[a].name.compare(members[b].name);
        return names != 0 ? names < 0 : a < b;
    });
    std::optional<std::string> repeated;
    std::vector<bool> superseded(members.size(), false);
    for (std::size_t at = 1, first = 0; at < order.size(); ++at) {
        if (members[order[at]].name != members[order[first]].name) {
            first = at;
            continue;
        }
        repeated = members[order[first]].name;
        members[order[first]].value = std::move(members[order[at]].value);
        superseded[order[at]] = true;
    }
    if (!repeated) return repeated;
    std::size_t kept = 0;
    for (std::size_t at = 0; at < members.size(); ++at) {
        if (superseded[at]) continue;
        if (kept != at) members[kept] = std::move(members[at]);
        ++kept;
    }
    members.erase(members.begin() + static_cast<std::ptrdiff_t>(kept), members.end());
    return repeated;
}

/// Takes the library's events and builds the value: its own way throws, and merges names behind our back.
class JsonBuilder {
  public:
    JsonBuilder(std::string_view text, const JsonRules& rules) : text_(text), rules_(rules) {}

    Result<Json> result() && {
        if (error_) return *std::move(error_);
        return std::move(root_);
    }

    bool null() { return put(Json()); }
    bool boolean(bool value) { return put(value); }
    bool number_integer(std::int64_t value) { return put(value); }
    bool number_unsigned(std::uint64_t value) { return put(value); }
    bool number_float(double value, const std::string&) { return put(value); }
    bool string(std::string& value) { return put(std::move(value)); }
    bool binary(Library::binary_t&) { return fail("binary values are not JSON"); }
    bool key(std::string& name) {
        open_.back().members.push_back({std::move(name), Json()});
        return true;
    }
    bool start_object(std::size_t) { return open(true); }
    bool start_array(std::size_t) { return open(false); }
    bool end_array() { return close(Json::list(std::move(open_.back().elements))); }
    bool end_object() {
        std::vector<Json::Member>& members = open_.back().members;
        const std::optional<std::string> repeated = merge_repeated(members);
        if (repeated && rules_.unique_names)
            return fail(fmt::format("the name '{}' stands twice in one object", excerpt(*repeated)));
        return close(Json::object(std::move(members)));
    }
    bool parse_error(std::size_t position, const std::string& token, const Library::exception& error) {
        if (error.id == 406)
            return fail(fmt::format("{}: the number {} is out of range", place(position), excerpt(token)));
        const std::string what =
            error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
        const std::size_t begin = what.find("] ");
        return fail(excerpt(std::string_view(what).substr(begin == std::string::npos ? 0 : begin + 2),
                            kMessageBytes));
    }

  private:
    struct Open {
        bool is_object = false;
        std::vector<Json> elements;
        std::vector<Json::Member> members;
    };

    bool put(Json value) {
        if (open_.empty()) root_ = std::move(value);
        else if (open_.back().is_object) open_.back().members.back().value = std::move(value);
        else open_.back().elements.push_back(std::move(value));
        return true;
    }
    bool open(bool is_object) {
        if (open_.size() == kMostJsonDepth)
            return fail(fmt::format("more than {} lists and objects in each other", kMostJsonDepth));
        open_.push_back({is_object, {}, {}});
        return true;
    }
    bool close(Json value) {
        open_.pop_back();
        return put(std::move(value));
    }
    bool fail(std::string what) {
        error_ = Error{Errc::InvalidArgument, std::move(what), 0};
        return false;
    }
    [[nodiscard]] std::string place(std::size_t position) const {
        const std::string_view before = text_.substr(0, position);
        const auto line = 1 + std::count(before.begin(), before.end(), '\n');
        const std::size_t newline = before.rfind('\n');
        return fmt::format("parse error at line {}, column {}", line,
                           newline == std::string_view::npos ? position : position - newline - 1);
    }

    std::string_view text_;
    JsonRules rules_;
    std::vector<Open> open_;
    Json root_;
    std::optional<Error> error_;
};

bool needs_no_escape(std::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
}

/// The library escapes control characters below a blank; a terminal that is shown the text obeys DEL and
/// U+0080 to U+009F, too.
void append_without_controls(std::string& out, std::string_view json) {
    for (std::size_t at = 0; at < json.size(); ++at) {
        const unsigned char c = static_cast<unsigned char>(json[at]);
        const unsigned char next = at + 1 < json.size() ? static_cast<unsigned char>(json[at + 1]) : 0;
        const bool is_c1 = c == 0xc2 && next >= 0x80 && next < 0xa0;
        if (is_c1 || c == 0x7f) out += fmt::format("\\u{:04x}", is_c1 ? next : c);
        else out += json[at];
        if (is_c1) ++at;
    }
}

/// Reads what nearly all messages are, at a tenth of the library's cost: one object of plain texts, whole
/// numbers and true or false, without a blank. Whatever else it meets, and what is wrong, is the library's.
class PlainObject {
  public:
    explicit PlainObject(std::string_view text) : text_(text) {}

    std::optional<Json> read() {
        std::vector<Json::Member> members;
        if (!take('{')) return std::nullopt;
        do {
            std::optional<std::string_view> name = plain_text();
            if (!name || !take(':')) return std::nullopt;
            std::optional<Json> value = scalar();
            if (!value) return std::nullopt;
            members.push_back({std::string(*name), *std::move(value)});
        } while (take(','));
        const bool is_whole = take('}') && text_.empty() && is_short_and_unique(members);
        return is_whole ? std::optional(Json::object(std::move(members))) : std::nullopt;
    }

  private:
    bool take(char c) { return take(std::string_view(&c, 1)); }
    bool take(std::string_view word) {
        if (!text_.starts_with(word)) return false;
        text_.remove_prefix(word.size());
        return true;
    }
    std::optional<std::string_view> plain_text() {
        if (!take('"')) return std::nullopt;
        const std::size_t end = text_.find('"');
        if (end == std::string_view::npos || !needs_no_escape(text_.substr(0, end))) return std::nullopt;
        const std::string_view text = text_.substr(0, end);
        text_.remove_prefix(end + 1);
        return text;
    }
    std::optional<Json> scalar() {
        if (text_.starts_with('"')) {
            const std::optional<std::string_view> text = plain_text();
            return text ? std::optional(Json(*text)) : std::nullopt;
        }
        if (take("true")) return Json(true);
        if (take("false")) return Json(false);
        const std::size_t digits = text_.find_first_not_of("0123456789-");
        const std::string_view number = text_.substr(0, digits);
        const bool is_plain = number == "0" || (!number.empty() && number.find_first_of("123456789") ==
                                                                       (number[0] == '-' ? 1U : 0U));
        std::int64_t value = 0;
        const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
        if (!is_plain || error != std::errc() || end != number.data() + number.size()) return std::nullopt;
        text_.remove_prefix(number.size());
        return Json(value);
    }

    std::string_view text_;
};

class JsonWriter {
  public:
    explicit JsonWriter(int indent) : indent_(indent) {}

    void write(const Json& json) {
        if (json.is_object()) {
            write_all('{', '}', json.members(), [this](const Json::Member& member) {
                append_json_text(out, member.name);
                out += indent_ < 0 ? ":" : ": ";
                write(member.value);
            });
        } else if (json.is_list()) {
            write_all('[', ']', json.elements(), [this](const Json& element) { write(element); });
        } else if (json.is_text()) {
            append_json_text(out, json.text());
        } else if (json.is_number()) {
            write_number(json);
        } else {
            out += json.is_null() ? "null" : *json.as_bool() ? "true" : "false";
        }
    }

    std::string out;

  private:
    void write_number(const Json& json) {
        if (const auto natural = json.as_uint64()) out += fmt::format("{}", *natural);
        else if (const auto negative = json.as_int64()) out += fmt::format("{}", *negative);
        else out += Library(*json.as_double()).dump();
    }
    template <class All, class One>
    void write_all(char begin, char end, const All& all, One write_one) {
        out += begin;
        ++depth_;
        for (std::size_t at = 0; at < all.size(); ++at) {
            if (at != 0) out += ',';
            break_line();
            write_one(all[at]);
        }
        --depth_;
        if (!all.empty()) break_line();
        out += end;
    }
    void break_line() {
        if (indent_ < 0) return;
        out += '\n';
        out.append(depth_ * static_cast<std::size_t>(indent_), ' ');
    }

    int indent_;
    std::size_t depth_ = 0;
};

template <class Into>
void take_number(const std::optional<Into>& value, Into& into) {
    if (value) into = *value;
}

}  // namespace

Json::Json() = default;
Json::Json(std::nullptr_t) {}
Json::Json(bool value) : value_(value) {}
Json::Json(int value) : Json(static_cast<long long>(value)) {}
Json::Json(unsigned value) : Json(static_cast<unsigned long long>(value)) {}
Json::Json(long value) : Json(static_cast<long long>(value)) {}
Json::Json(unsigned long value) : Json(static_cast<unsigned long long>(value)) {}
Json::Json(long long value) {
    if (value < 0) value_ = std::int64_t{value};
    else value_ = static_cast<std::uint64_t>(value);
}
Json::Json(unsigned long long value) : value_(std::uint64_t{value}) {}
Json::Json(double value) : value_(value) {}
Json::Json(const char* text) : value_(std::string(text)) {}
Json::Json(std::string_view text) : value_(std::string(text)) {}
Json::Json(std::string text) : value_(std::move(text)) {}
Json::Json(const std::vector<std::string>& texts) : value_(List(texts.begin(), texts.end())) {}
Json::Json(const std::vector<int>& numbers) : value_(List(numbers.begin(), numbers.end())) {}
Json::Json(const std::vector<unsigned>& numbers) : value_(List(numbers.begin(), numbers.end())) {}
Json::Json(const std::vector<std::int64_t>& numbers) : value_(List(numbers.begin(), numbers.end())) {}
Json::Json(std::initializer_list<Member> members) : value_(Object(members)) {}
Json::Json(const Json& other) = default;
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(const Json& other) = default;
Json& Json::operator=(Json&& other) noexcept = default;
Json::~Json() = default;

Json Json::object() { return object(Object()); }
Json Json::list(std::initializer_list<Json> elements) { return list(List(elements)); }
Json Json::object(std::vector<Member> members) {
    Json json;
    json.value_ = std::move(members);
    return json;
}
Json Json::list(std::vector<Json> elements) {
    Json json;
    json.value_ = std::move(elements);
    return json;
}

bool Json::is_null() const { return std::holds_alternative<std::monostate>(value_); }
bool Json::is_bool() const { return std::holds_alternative<bool>(value_); }
bool Json::is_number() const { return is_whole() || std::holds_alternative<double>(value_); }
bool Json::is_whole() const {
    return std::holds_alternative<std::uint64_t>(value_) || std::holds_alternative<std::int64_t>(value_);
}
bool Json::is_text() const { return std::holds_alternative<std::string>(value_); }
bool Json::is_list() const { return std::holds_alternative<List>(value_); }
bool Json::is_object() const { return std::holds_alternative<Object>(value_); }

std::string_view Json::kind() const {
    constexpr std::string_view kKinds[] = {"null",   "boolean", "number", "number",
                                           "number", "string",  "array",  "object"};
    return kKinds[value_.index()];
}

std::optional<bool> Json::as_bool() const {
    const bool* const value = std::get_if<bool>(&value_);
    return value == nullptr ? std::nullopt : std::optional(*value);
}
std::optional<int> Json::as_int() const {
    const std::optional<std::int64_t> value = as_int64();
    return value && std::in_range<int>(*value) ? std::optional(static_cast<int>(*value)) : std::nullopt;
}
std::optional<std::int64_t> Json::as_int64() const {
    if (const auto* const negative = std::get_if<std::int64_t>(&value_)) return *negative;
    const auto* const natural = std::get_if<std::uint64_t>(&value_);
    if (natural == nullptr || !std::in_range<std::int64_t>(*natural)) return std::nullopt;
    return static_cast<std::int64_t>(*natural);
}
std::optional<std::uint64_t> Json::as_uint64() const {
    const auto* const natural = std::get_if<std::uint64_t>(&value_);
    return natural == nullptr ? std::nullopt : std::optional(*natural);
}
std::optional<double> Json::as_double() const {
    if (const auto* const value = std::get_if<double>(&value_)) return *value;
    if (const auto* const natural = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*natural);
    if (const auto* const negative = std::get_if<std::int64_t>(&value_))
        return static_cast<double>(*negative);
    return std::nullopt;
}
const std::string& Json::text() const {
    static const std::string none;
    const auto* const value = std::get_if<std::string>(&value_);
    return value == nullptr ? none : *value;
}
const std::vector<Json>& Json::elements() const {
    static const List none;
    const auto* const value = std::get_if<List>(&value_);
    return value == nullptr ? none : *value;
}
const std::vector<Json::Member>& Json::members() const {
    static const Object none;
    const auto* const value = std::get_if<Object>(&value_);
    return value == nullptr ? none : *value;
}
std::size_t Json::size() const { return is_list() ? elements().size() : members().size(); }

const Json* Json::find(std::string_view name) const {
    for (const Member& member : members()) {
        if (member.name == name) return &member.value;
    }
    return nullptr;
}
const Json& Json::operator[](std::string_view name) const {
    static const Json none;
    const Json* const found = find(name);
    return found == nullptr ? none : *found;
}
const Json& Json::operator[](std::size_t element) const {
    static const Json none;
    return element < elements().size() ? elements()[element] : none;
}

Json& Json::set(std::string_view name, Json value) {
    if (!is_object()) value_ = Object();
    auto& members = std::get<Object>(value_);
    const auto found =
        std::find_if(members.begin(), members.end(), [&](const Member& one) { return one.name == name; });
    if (found == members.end()) members.push_back({std::string(name), std::move(value)});
    else found->value = std::move(value);
    return *this;
}
Json& Json::add(Json element) {
    if (!is_list()) value_ = List();
    std::get<List>(value_).push_back(std::move(element));
    return *this;
}

bool Json::operator==(const Json& other) const {
    if (is_object() && other.is_object()) {
        const auto is_there = [&](const Member& member) {
            const Json* const found = other.find(member.name);
            return found != nullptr && *found == member.value;
        };
        return size() == other.size() && std::all_of(members().begin(), members().end(), is_there);
    }
    if (is_number() && other.is_number() && !(is_whole() && other.is_whole()))
        return as_double() == other.as_double();
    if (is_object() || other.is_object() || value_.index() != other.value_.index()) return false;
    if (is_list()) return elements() == other.elements();
    if (is_text()) return text() == other.text();
    return as_bool() == other.as_bool() && as_uint64() == other.as_uint64() && as_int64() == other.as_int64();
}

Result<Json> parse_json(std::string_view text, const JsonRules& rules) {
    if (std::optional<Json> plain = PlainObject(text).read()) return *std::move(plain);
    JsonBuilder builder(text, rules);
    // Its outcome is the builder's: it stops where the builder, or the text, fails.
    (void)Library::sax_parse(text.begin(), text.end(), &builder, Library::input_format_t::json, true,
                             rules.comments);
    return std::move(builder).result();
}

std::optional<Json> parse_json_object(std::string_view text) {
    Result<Json> json = parse_json(text);
    if (!json || !json->is_object()) return std::nullopt;
    return *std::move(json);
}

std::string to_text(const Json& json, int indent) {
    JsonWriter writer(indent);
    writer.write(json);
    return std::move(writer.out);
}

std::ostream& operator<<(std::ostream& out, const Json& json) { return out << to_text(json); }

void append_json_text(std::string& out, std::string_view text) {
    if (needs_no_escape(text)) out.append(1, '"').append(text).append(1, '"');
    else append_without_controls(out, Library(text).dump(-1, ' ', false, Library::error_handler_t::replace));
}

void take(const Json& object, std::string_view name, std::string& into) {
    if (const Json& value = object[name]; value.is_text()) into = value.text();
}
void take(const Json& object, std::string_view name, bool& into) {
    take_number(object[name].as_bool(), into);
}
void take(const Json& object, std::string_view name, int& into) { take_number(object[name].as_int(), into); }
void take(const Json& object, std::string_view name, unsigned& into) {
    const std::optional<std::uint64_t> value = object[name].as_uint64();
    if (value && std::in_range<unsigned>(*value)) into = static_cast<unsigned>(*value);
}
void take(const Json& object, std::string_view name, std::int64_t& into) {
    take_number(object[name].as_int64(), into);
}
void take(const Json& object, std::string_view name, std::uint64_t& into) {
    take_number(object[name].as_uint64(), into);
}
void take(const Json& object, std::string_view name, double& into) {
    take_number(object[name].as_double(), into);
}

}  // namespace ddprun
