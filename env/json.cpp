#include "env/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <concepts>
#include <optional>
#include <unordered_map>

#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMessageBytes = 200;

/// The members in the order of the text. Not an object_t: that one copies all members when it grows.
using Members = std::vector<std::pair<std::string, Json>>;

/// Builds a value from the library's events. The library's own builder throws, follows any depth, and
/// compares each name of an object with all others.
class JsonBuilder {
  public:
    JsonBuilder(std::string_view text, const JsonRules& rules) : text_(text), rules_(rules) {}

    Result<Json> result() && {
        if (error_) return *std::move(error_);
        return std::move(root_);
    }

    bool null() { return put(nullptr); }
    bool boolean(bool value) { return put(value); }
    bool number_integer(std::int64_t value) { return put(value); }
    bool number_unsigned(std::uint64_t value) { return put(value); }
    bool number_float(double value, const std::string&) { return put(value); }
    bool string(std::string& value) { return put(std::move(value)); }
    bool binary(Json::binary_t&) { return fail("binary values are not JSON"); }
    bool key(std::string& name) {
        Open& open = open_.back();
        const auto [place, is_new] = open.places.try_emplace(name, open.members.size());
        if (!is_new && rules_.unique_names)
            return fail(fmt::format("the name '{}' stands twice in one object", excerpt(name)));
        open.at = place->second;
        if (is_new) open.members.emplace_back(std::move(name), nullptr);
        return true;
    }
    bool start_object(std::size_t) { return open(true); }
    bool start_array(std::size_t) { return open(false); }
    bool end_array() { return close(std::move(open_.back().elements)); }
    bool end_object() { return close(json_object(std::move(open_.back().members))); }
    bool parse_error(std::size_t position, const std::string& token, const Json::exception& error) {
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
        Json::array_t elements;
        Members members;
        std::unordered_map<std::string, std::size_t> places;  ///< of members, by name
        std::size_t at = 0;                                   ///< the member whose value comes next
    };

    bool put(Json value) {
        if (open_.empty()) root_ = std::move(value);
        else if (open_.back().is_object) open_.back().members[open_.back().at].second = std::move(value);
        else open_.back().elements.push_back(std::move(value));
        return true;
    }
    bool open(bool is_object) {
        if (open_.size() == kMostJsonDepth)
            return fail(fmt::format("more than {} lists and objects in each other", kMostJsonDepth));
        open_.emplace_back().is_object = is_object;
        return true;
    }
    bool close(Json value) {
        open_.pop_back();
        return put(std::move(value));
    }
    bool fail(std::string what) {
        error_ = Error::invalid(std::move(what));
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

/// Parses nearly all messages, at a tenth of the library's cost: one object of plain texts, whole numbers and
/// true or false, without a blank. Everything else, and every error, is left to the library.
class PlainObject {
  public:
    explicit PlainObject(std::string_view text) : text_(text) {}

    std::optional<Json> read() {
        constexpr std::size_t kMostMembers = 16;  // each name is compared with all others
        if (text_ == "{}") return Json::object();
        Members members;
        if (!take('{')) return std::nullopt;
        do {
            const std::optional<std::string_view> name = plain_text();
            const auto is_it = [&](const auto& member) { return member.first == *name; };
            if (!name || !take(':') || members.size() == kMostMembers ||
                std::any_of(members.begin(), members.end(), is_it))
                return std::nullopt;
            std::optional<Json> value = scalar();
            if (!value) return std::nullopt;
            members.emplace_back(*name, *std::move(value));
        } while (take(','));
        return take('}') && text_.empty() ? std::optional(json_object(std::move(members))) : std::nullopt;
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
            return text ? std::optional<Json>(*text) : std::nullopt;
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
        return value < 0 ? Json(value) : Json(static_cast<std::uint64_t>(value));
    }

    std::string_view text_;
};

template <class T>
std::string_view expected_of() {
    if constexpr (std::same_as<T, bool>) return "true or false";
    else if constexpr (std::same_as<T, double>) return "a number";
    else if constexpr (std::same_as<T, std::string>) return "text";
    else return "a whole number";
}

/// The whole number, where it fits into a T.
template <class T>
Result<T> fitting(const Json& json) {
    if (const auto* natural = json.get_ptr<const std::uint64_t*>()) {
        if (std::in_range<T>(*natural)) return static_cast<T>(*natural);
    } else if (const auto whole = *json.get_ptr<const std::int64_t*>(); std::in_range<T>(whole)) {
        return static_cast<T>(whole);
    }
    return Error::invalid("is out of range");
}

}  // namespace

Result<Json> parse_json(std::string_view text, const JsonRules& rules) {
    if (std::optional<Json> plain = PlainObject(text).read()) return *std::move(plain);
    JsonBuilder builder(text, rules);
    // The returned value is not needed: the builder knows the outcome.
    (void)Json::sax_parse(text.begin(), text.end(), &builder, Json::input_format_t::json, true,
                          rules.comments);
    return std::move(builder).result();
}

Result<Json> parse_json_object(std::string_view text) {
    Result<Json> json = parse_json(text);
    if (json && !json->is_object()) return Error::invalid("not a JSON object");
    return json;
}

/// Also escapes DEL and U+0080 to U+009F, which a terminal obeys; the library escapes only control characters
/// below a blank.
std::string to_text(const Json& json, int indent) {
    const std::string text = json.dump(indent, ' ', false, Json::error_handler_t::replace);
    std::string out;
    out.reserve(text.size());
    for (std::size_t at = 0; at < text.size(); ++at) {
        const unsigned char c = static_cast<unsigned char>(text[at]);
        const unsigned char next = at + 1 < text.size() ? static_cast<unsigned char>(text[at + 1]) : 0;
        const bool is_c1 = c == 0xc2 && next >= 0x80 && next < 0xa0;
        if (is_c1 || c == 0x7f) out += fmt::format("\\u{:04x}", is_c1 ? next : c);
        else out += text[at];
        if (is_c1) ++at;
    }
    return out;
}

void append_json_text(std::string& out, std::string_view text) {
    if (needs_no_escape(text)) out.append(1, '"').append(text).append(1, '"');
    else out += to_text(Json(text));
}

Json json_object(std::vector<std::pair<std::string, Json>> members) {
    Json object = Json::object();
    auto& place = object.get_ref<Json::object_t&>();
    place.reserve(members.size());
    for (auto& [name, value] : members)
        place.Json::object_t::Container::emplace_back(std::move(name), std::move(value));
    return object;
}

const Json& member(const Json& json, std::string_view name) {
    static const Json none;
    const auto found = json.find(name);
    return found == json.end() ? none : *found;
}

const Json::array_t& elements(const Json& json) {
    static const Json::array_t none;
    const auto* const list = json.get_ptr<const Json::array_t*>();
    return list == nullptr ? none : *list;
}

const Json::object_t& members(const Json& json) {
    static const Json::object_t none;
    const auto* const object = json.get_ptr<const Json::object_t*>();
    return object == nullptr ? none : *object;
}

template <class T>
Result<T> as(const Json& json) {
    if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
        if (const auto* const value = json.get_ptr<const T*>()) return *value;
    } else if constexpr (std::same_as<T, double>) {
        if (json.is_number()) return json.get<double>();
    } else if (json.is_number_integer()) {
        return fitting<T>(json);
    }
    return Error::invalid(fmt::format("is {}, expected {}", json.type_name(), expected_of<T>()));
}
template Result<bool> as(const Json& json);
template Result<int> as(const Json& json);
template Result<unsigned> as(const Json& json);
template Result<std::int64_t> as(const Json& json);
template Result<std::uint64_t> as(const Json& json);
template Result<double> as(const Json& json);
template Result<std::string> as(const Json& json);

}  // namespace ddprun
