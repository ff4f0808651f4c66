#include "env/describe.h"

#include <fmt/format.h>

#include <algorithm>

#include "env/json.h"
#include "env/text.h"

namespace ddprun {

bool Visitor::duration(Duration& value) {
    std::int64_t nanoseconds = value.count();
    if (!scalar(&nanoseconds)) return false;
    if (nanoseconds < 0) return fail_here("is negative");
    value = Duration(nanoseconds);
    return true;
}

// ---- writing

void JsonWriter::begin(char bracket) {
    out_ += bracket;
    open_ += bracket == '{' ? '}' : ']';
}

void JsonWriter::new_line() {
    if (indent_ > 0) out_.append(1, '\n').append(indent_ * open_.size(), ' ');
}

void JsonWriter::element(std::size_t) {
    if (out_.back() != '{' && out_.back() != '[') out_ += ',';
    new_line();
}

bool JsonWriter::enter(std::string_view name, Presence presence) {
    if (presence == Presence::LeftOut) return false;
    element(0);
    if (open_.back() == ' ') return true;
    append_json_text(out_, name);
    out_ += indent_ > 0 ? ": " : ":";
    return true;
}

bool JsonWriter::scalar(Scalar value) {
    std::visit(
        [this]<class T>(const T* one) {
            if constexpr (std::is_same_v<T, std::string>) append_json_text(out_, *one);
            else if constexpr (std::is_same_v<T, bool>) out_ += *one ? "true" : "false";
            else if constexpr (std::is_same_v<T, double>) out_ += to_text(Json(*one));
            else out_ += std::string_view(fmt::format_int(*one).c_str());
        },
        value);
    return true;
}

bool JsonWriter::visit_choice(std::size_t& number, std::span<const std::string_view> names) {
    append_json_text(out_, names[number]);
    return true;
}

void JsonWriter::null(std::string_view name) {
    enter(name, Presence::Required);
    out_ += "null";
}

bool JsonWriter::open(Shape shape, std::size_t&) {
    begin(shape == Shape::Object ? '{' : '[');
    if (shape == Shape::Row) open_.back() = ' ';
    return true;
}

void JsonWriter::close() {
    const char bracket = open_.back() == ' ' ? ']' : open_.back();
    open_.pop_back();
    if (out_.back() != '{' && out_.back() != '[') new_line();
    out_ += bracket;
}

std::string JsonWriter::text() && {
    close();
    return std::move(out_);
}

// ---- reading

JsonReader::JsonReader(std::string_view text, Strictness strictness, std::string blob)
    : strictness_(strictness), blob_(std::move(blob)) {
    Result<Json> json = parse_json(text);
    if (!json) error_ = Error::protocol("not valid JSON: " + json.error().what);
    else if (!json->is_object()) error_ = Error::protocol("not a JSON object");
    root_ = std::make_unique<const Json>(json ? *std::move(json) : Json());
    open_.push_back({root_.get(), Shape::Object});
}

JsonReader::~JsonReader() = default;

void JsonReader::fail(std::string_view what) {
    if (!error_ && strictness_ == Strictness::Exact) error_ = Error::protocol(std::string(what));
}

bool JsonReader::fail_here(std::string_view what) {
    fail(fmt::format("'{}' {}", name_, what));
    return false;
}

Status JsonReader::end() {
    if (!blob_.empty()) fail("carries a blob, but has none");
    return error_ ? Status(*error_) : Status();
}

bool JsonReader::enter(std::string_view name, Presence presence) {
    Open& open = open_.back();
    name_ = name;
    here_ = nullptr;
    if (open.shape == Shape::Row) {
        if (open.next < open.json->size()) here_ = &(*open.json)[open.next++];
    } else if (const auto found = open.json->find(name); found != open.json->end()) {
        here_ = &*found;
    }
    return here_ != nullptr || (presence == Presence::Required && fail_here("is missing"));
}

template <class T>
bool JsonReader::take(T& into) {
    Result<T> value = as<T>(*here_);
    if (!value) return fail_here(value.error().what);
    into = *std::move(value);
    return true;
}

bool JsonReader::scalar(Scalar value) {
    return std::visit([this](auto* into) { return take(*into); }, value);
}

bool JsonReader::visit_choice(std::size_t& number, std::span<const std::string_view> names) {
    std::string text;
    if (!take(text)) return false;
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) return fail_here(fmt::format("is '{}'", excerpt(text)));
    number = static_cast<std::size_t>(found - names.begin());
    return true;
}

bool JsonReader::open(Shape shape, std::size_t& size) {
    const bool is_right = shape == Shape::Object ? here_->is_object() : here_->is_array();
    if (!is_right)
        return fail_here(fmt::format("is {}, expected {}", here_->type_name(),
                                     shape == Shape::Object ? "an object" : "a list"));
    open_.push_back({here_, shape});
    size = here_->size();
    return true;
}

void JsonReader::element(std::size_t index) { here_ = &(*open_.back().json)[index]; }

}  // namespace ddprun
