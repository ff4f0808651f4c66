#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/result.h"

/// One description of a value serves to write and to read it, on the wire, in files and on sockets:
///
///     void describe(Visitor& v, Point& point) {
///         v("x", point.x);
///         v.usually("name", point.name);
///     }
///     std::string text = to_json(Point{1, ""});             // {"x":1}
///     Result<Point> point = from_json<Point>(R"({"x":1})");
namespace ddprun {

/// Shared, immutable bytes, so that a stored value is not copied for each of its readers.
class Blob {
  public:
    Blob() = default;
    explicit Blob(std::string bytes) {
        if (!bytes.empty()) bytes_ = std::make_shared<const std::string>(std::move(bytes));
    }
    [[nodiscard]] std::string_view view() const {
        return bytes_ ? std::string_view(*bytes_) : std::string_view();
    }
    [[nodiscard]] std::size_t size() const { return bytes_ ? bytes_->size() : 0; }
    bool operator==(const Blob& other) const { return view() == other.view(); }

  private:
    std::shared_ptr<const std::string> bytes_;
};

/// Visits the members of a value in the order in which they are written. Released names never change.
/// A value is a scalar, an enum, a Duration (in nanoseconds), a struct with a describe(), or a vector of
/// values.
class Visitor {
  public:
    virtual ~Visitor() = default;

    template <class T>
    void operator()(std::string_view name, T& value) {
        if (enter(name, Presence::Required)) visit(value);
    }
    /// A member that may be absent (nullopt).
    template <class T>
    void operator()(std::string_view name, std::optional<T>& value) {
        if (!enter(name, value ? Presence::Defaulted : Presence::LeftOut)) return;
        if (!value) value.emplace();
        if (!visit(*value)) value.reset();
    }
    /// A member that earlier versions did not have: when absent it keeps its value.
    template <class T>
    void defaulted(std::string_view name, T& value) {
        if (enter(name, Presence::Defaulted)) visit(value);
    }
    /// A member that is there only where `is_there`, which reading sets.
    template <class T>
    void only_if(bool& is_there, std::string_view name, T& value) {
        is_there = enter(name, is_there ? Presence::Defaulted : Presence::LeftOut);
        if (is_there) visit(value);
    }
    /// A member that is left out when it has its usual value, which keeps frequent messages short.
    template <class T>
    void usually(std::string_view name, T& value, const std::type_identity_t<T>& usual = {}) {
        if (enter(name, value == usual ? Presence::LeftOut : Presence::Defaulted)) visit(value);
    }
    /// An enum, written as one of the names, which stand in the order of its numbers from 0 on.
    template <class E>
    void choice(std::string_view name, E& value, std::span<const std::string_view> names) {
        auto number = static_cast<std::size_t>(value);
        if (enter(name, Presence::Required) && visit_choice(number, names)) value = static_cast<E>(number);
    }
    /// A list of structs, each written as the list of its members' values: names would be most of the text.
    template <class T>
    void rows(std::string_view name, std::vector<T>& values) {
        if (!enter(name, Presence::Required)) return;
        visit_list(values, [&](T& row) { return visit_members(row, Shape::Row); });
    }
    /// The bytes that follow the JSON. A value whose description does not ask for them has none.
    virtual void blob(Blob& value) = 0;
    /// Reports an error that the description itself found in a member. Ignored when writing.
    virtual void fail(std::string_view what) = 0;

  protected:
    enum class Presence : std::uint8_t { Required, Defaulted, LeftOut };
    enum class Shape : std::uint8_t { Object, Row, List };
    using Scalar = std::variant<std::string*, bool*, int*, unsigned*, std::int64_t*, std::uint64_t*, double*>;

    /// Goes to a member. True when it is to be written, or is there to be read.
    virtual bool enter(std::string_view name, Presence presence) = 0;
    // These write or read the value at hand. False: it is of another kind or out of range, and stays as it
    // was.
    virtual bool scalar(Scalar value) = 0;
    virtual bool visit_choice(std::size_t& number, std::span<const std::string_view> names) = 0;
    bool duration(Duration& value);
    /// Reports an error of the member at hand; always false.
    virtual bool fail_here(std::string_view what) = 0;
    /// Steps into the value at hand, and out of it. A reader sets `size`, the number of elements of a List.
    virtual bool open(Shape shape, std::size_t& size) = 0;
    virtual void close() = 0;
    /// Goes to an element of a List.
    virtual void element(std::size_t index) = 0;

  private:
    template <class T>
    bool visit(T& value) {
        if constexpr (std::is_constructible_v<Scalar, T*>) return scalar(&value);
        else if constexpr (std::is_same_v<T, Duration>) return duration(value);
        else if constexpr (requires { value.emplace_back(); })
            return visit_list(value, [this](auto& one) { return visit(one); });
        else return visit_members(value, Shape::Object);
    }
    template <class T>
    bool visit_members(T& value, Shape shape) {
        std::size_t size = 0;
        if (!open(shape, size)) return false;
        describe(*this, value);
        close();
        return true;
    }
    /// Leaves out elements that cannot be read.
    template <class T, class VisitOne>
    bool visit_list(std::vector<T>& values, const VisitOne& visit_one) {
        std::size_t size = values.size(), kept = 0;
        if (!open(Shape::List, size)) return false;
        for (std::size_t index = 0; index < size; ++index) {
            element(index);
            if (kept == values.size()) values.emplace_back();
            if (visit_one(values[kept])) ++kept;
        }
        values.resize(kept);
        close();
        return true;
    }
};

/// Writes members as the text of one JSON object, with `indent` spaces for each level, or without white
/// space. Bytes that are not UTF-8 become U+FFFD; a number that is not finite becomes null.
class JsonWriter final : public Visitor {
  public:
    explicit JsonWriter(std::size_t indent = 0) : indent_(indent) { begin('{'); }

    // What is only written may be const, or a temporary.
    template <class T>
    void operator()(std::string_view name, const T& value) {
        Visitor::operator()(name, const_cast<T&>(value));
    }
    void operator()(std::string_view name, std::string_view text) {
        std::string copy(text);
        Visitor::operator()(name, copy);
    }
    void operator()(std::string_view name, const char* text) { (*this)(name, std::string_view(text)); }
    /// The value, or null.
    template <class T>
    void or_null(std::string_view name, const std::optional<T>& value) {
        value ? (*this)(name, *value) : null(name);
    }
    void null(std::string_view name);
    /// An object whose members `write` writes.
    template <class Write>
    void object(std::string_view name, const Write& write) {
        enter(name, Presence::Required);
        begin('{');
        write();
        close();
    }
    /// A list of objects; `write` writes the members of one.
    template <class Values, class Write>
    void objects(std::string_view name, const Values& values, const Write& write) {
        enter(name, Presence::Required);
        begin('[');
        for (const auto& one : values) {
            element(0);
            begin('{');
            write(one);
            close();
        }
        close();
    }

    void blob(Blob& value) override { blob_ = std::move(value); }
    void fail(std::string_view) override {}
    [[nodiscard]] std::string text() &&;
    [[nodiscard]] Blob take_blob() { return std::move(blob_); }

  private:
    bool enter(std::string_view name, Presence presence) override;
    bool scalar(Scalar value) override;
    bool visit_choice(std::size_t& number, std::span<const std::string_view> names) override;
    bool open(Shape shape, std::size_t& size) override;
    void close() override;
    void element(std::size_t index) override;
    bool fail_here(std::string_view) override { return false; }
    void begin(char bracket);
    void new_line();

    std::size_t indent_;
    std::string out_;
    std::string open_;  ///< the closing brackets to come, the outermost first; a blank for that of a Row
    Blob blob_;
};

/// Exact: a member that is missing or wrong is an error. Tolerant, for what another version may have written:
/// it keeps its value.
enum class Strictness : std::uint8_t { Exact, Tolerant };

/// Reads members from the text of a JSON object, and remembers the first error. Members that nobody asks for
/// are ignored.
class JsonReader final : public Visitor {
  public:
    explicit JsonReader(std::string_view text, Strictness strictness = Strictness::Exact,
                        std::string blob = "");
    JsonReader(const JsonReader&) = delete;
    JsonReader& operator=(const JsonReader&) = delete;
    ~JsonReader() override;

    void blob(Blob& value) override { value = Blob(std::exchange(blob_, {})); }
    void fail(std::string_view what) override;
    /// Call it after the last member. Error: Protocol, the first one found.
    [[nodiscard]] Status end();

  private:
    /// A value whose elements or members are read.
    struct Open {
        const nlohmann::ordered_json* json;
        Shape shape;
        std::size_t next = 0;  ///< of a Row
    };

    bool enter(std::string_view name, Presence presence) override;
    bool scalar(Scalar value) override;
    bool visit_choice(std::size_t& number, std::span<const std::string_view> names) override;
    bool open(Shape shape, std::size_t& size) override;
    void close() override { open_.pop_back(); }
    void element(std::size_t index) override;
    template <class T>
    bool take(T& into);
    bool fail_here(std::string_view what) override;

    Strictness strictness_;
    std::unique_ptr<const nlohmann::ordered_json> root_;
    std::vector<Open> open_;
    const nlohmann::ordered_json* here_ = nullptr;
    std::string_view name_;  ///< of the member at hand, for errors
    std::string blob_;
    std::optional<Error> error_;
};

/// The JSON text of a described value.
template <class T>
std::string to_json(const T& value, std::size_t indent = 0) {
    JsonWriter writer(indent);
    describe(writer, const_cast<T&>(value));
    return std::move(writer).text();
}
/// Error: Protocol, "'x' is null, expected text" or what else is wrong first; no JSON object.
template <class T>
Result<T> from_json(std::string_view text, Strictness strictness = Strictness::Exact) {
    JsonReader reader(text, strictness);
    T value{};
    describe(reader, value);
    if (const Status read = reader.end(); !read) return read.error();
    return value;
}

}  // namespace ddprun
