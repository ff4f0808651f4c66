#include "launcher/config_file.h"

#include <fstream>
#include <sstream>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace ddprun {
namespace {

using Json = nlohmann::ordered_json;  // the order of the file

/// Files of this kind are some hundred bytes; a wrong path may name something endless.
constexpr std::streamsize kMaxConfigBytes = 1 << 20;

Error wrong(const std::string& path, const std::string& what) {
    return {Errc::InvalidArgument, fmt::format("{}: {}", path, what)};
}

/// A scalar as it would be typed; nullopt for objects, arrays and null.
std::optional<std::string> as_text(const Json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_boolean()) return value.get<bool>() ? "1" : "0";
    if (value.is_number()) return value.dump();
    return std::nullopt;
}

Result<std::vector<std::string>> as_texts(const Json& value, const std::string& where) {
    std::vector<std::string> texts;
    const Json list = value.is_array() ? value : Json::array({value});
    for (const Json& element : list) {
        std::optional<std::string> text = as_text(element);
        if (!text) return Error{Errc::InvalidArgument, where + ": expected text, a number, true, false, or a list of these"};
        texts.push_back(*std::move(text));
    }
    return texts;
}

}  // namespace

Result<ConfigFile> parse_config(const std::string& text, const std::string& path) {
    Json root;
    try {
        root = Json::parse(text, nullptr, true, true);
    } catch (const Json::parse_error& error) {  // the only way to learn the line
        const std::string what = error.what();
        const std::size_t at = what.find("parse error");
        return wrong(path, at == std::string::npos ? what : what.substr(at));
    }
    if (!root.is_object()) return wrong(path, "expected one JSON object");
    ConfigFile config;
    for (const auto& [key, value] : root.items()) {
        Result<std::vector<std::string>> texts = as_texts(value, fmt::format("{}: {}", path, key));
        if (!texts) return texts.error();
        if (key == "program") {
            if (texts->size() != 1 || texts->front().empty()) return wrong(path, "program: expected one name");
            config.program = texts->front();
        } else if (key == "args") {
            if (!value.is_array()) return wrong(path, "args: expected a list");
            config.arguments = *std::move(texts);
        } else {
            config.options.emplace_back(key, *std::move(texts));
        }
    }
    return config;
}

Result<ConfigFile> read_config_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return Error::system(path);
    std::string text(static_cast<std::size_t>(kMaxConfigBytes) + 1, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (file.gcount() > kMaxConfigBytes) return wrong(path, "larger than 1 MiB: not a job description");
    if (file.bad()) return Error::system(path);
    text.resize(static_cast<std::size_t>(file.gcount()));
    return parse_config(text, path);
}

}  // namespace ddprun
