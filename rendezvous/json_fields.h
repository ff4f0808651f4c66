#pragma once

#include <fmt/core.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "env/result.h"

/// Private to message.cpp: one description of a struct's fields serves for writing and for reading it.
namespace ddprun::rdzv {

using Json = nlohmann::json;

/// Collects fields into a JSON object. An empty optional is left out.
class FieldWriter {
  public:
    template <class T>
    void operator()(const char* key, const T& value) {
        object_[key] = value;
    }
    void operator()(const char* key, const std::optional<int>& value) {
        if (value) object_[key] = *value;
    }
    void operator()(const char* key, const std::optional<Duration>& value) {
        if (value) object_[key] = value->count();
    }
    template <class T>
    void defaulted(const char* key, const T& value) {
        object_[key] = value;
    }

    /// Left out when it is what it mostly is: a thousand workers that end well say so in few words.
    template <class T>
    void usually(const char* key, const T& value, const T& usual) {
        if (value != usual) object_[key] = value;
    }

    /// Texts of workers and of users are not always UTF-8; JSON is.
    [[nodiscard]] std::string text() const {
        return object_.dump(-1, ' ', false, Json::error_handler_t::replace);
    }

  private:
    Json object_ = Json::object();
};

/// Takes fields out of a JSON object and remembers the first that is missing or wrong.
class FieldReader {
  public:
    FieldReader(std::string_view message, const std::string& text) : message_(message) {
        if (text.empty()) return;  // no fields
        object_ = Json::parse(text, nullptr, false);
        if (object_.is_object()) return;
        fail(object_.is_discarded() ? "not valid JSON" : "not a JSON object");
        object_ = Json::object();
    }

    template <class T>
    void operator()(const char* key, T& value) {
        const Json* const found = find(key);
        if (found != nullptr) take(key, *found, value);
        else fail(fmt::format("'{}' is missing", key));
    }
    template <class T>
    void operator()(const char* key, std::optional<T>& value) {
        const Json* const found = find(key);
        if (found == nullptr) return;
        T present{};
        take(key, *found, present);
        value = present;
    }
    template <class T>
    void usually(const char* key, T& value, const T& usual) {
        value = usual;
        defaulted(key, value);
    }
    /// A field that earlier minor versions did not have: absent keeps the default.
    template <class T>
    void defaulted(const char* key, T& value) {
        if (const Json* const found = find(key)) take(key, *found, value);
    }

    void fail(std::string_view what) {
        if (!error_) error_ = Error{Errc::Protocol, fmt::format("{}: {}", message_, what), 0};
    }
    [[nodiscard]] const std::optional<Error>& error() const { return error_; }

  private:
    const Json* find(const char* key) const {
        const auto found = object_.find(key);
        return found == object_.end() ? nullptr : &*found;
    }
    void wrong(const char* key, std::string_view expected, const Json& found) {
        fail(fmt::format("'{}' is {}, expected {}", key, found.type_name(), expected));
    }
    void take(const char* key, const Json& from, std::string& into) {
        if (!from.is_string()) return wrong(key, "text", from);
        into = from.get_ref<const std::string&>();
    }
    void take(const char* key, const Json& from, bool& into) {
        if (!from.is_boolean()) return wrong(key, "true or false", from);
        into = from.get<bool>();
    }
    template <std::integral T>
    void take(const char* key, const Json& from, T& into) {
        if (!from.is_number_integer()) return wrong(key, "a whole number", from);
        const bool fits = from.is_number_unsigned() ? std::in_range<T>(from.get<std::uint64_t>())
                                                    : std::in_range<T>(from.get<std::int64_t>());
        if (fits) into = from.get<T>();
        else fail(fmt::format("'{}' is out of range", key));
    }
    void take(const char* key, const Json& from, Duration& into) {
        std::int64_t nanoseconds = 0;
        take(key, from, nanoseconds);
        if (nanoseconds < 0) return fail(fmt::format("'{}' is negative", key));
        into = Duration(nanoseconds);
    }
    template <class T>
    void take(const char* key, const Json& from, std::vector<T>& into) {
        if (!from.is_array()) return wrong(key, "a list", from);
        into.clear();
        for (const Json& element : from) {
            take(key, element, into.emplace_back());
            if (error_) return;
        }
    }

    std::string_view message_;
    Json object_ = Json::object();
    std::optional<Error> error_;
};

}  // namespace ddprun::rdzv
