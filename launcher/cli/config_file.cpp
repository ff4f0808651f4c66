#include "launcher/cli/options.h"

#include <fmt/core.h>

#include "env/io/file.h"
#include "env/json.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// Configuration files are some hundred bytes; a wrong path may name an endless file.
constexpr std::size_t kMaxConfigBytes = 1 << 20;

Error wrong(const std::string& path, const std::string& what) {
    return Error::invalid(fmt::format("{}: {}", path, what));
}

/// A scalar as a user would type it; nullopt for objects, arrays and null.
std::optional<std::string> as_text(const Json& value) {
    if (const Result<bool> flag = as<bool>(value)) return *flag ? "1" : "0";
    if (value.is_number()) return to_text(value);
    const Result<std::string> text = as<std::string>(value);
    return text ? std::optional(*text) : std::nullopt;
}

Result<std::vector<std::string>> as_texts(const Json& value, const std::string& where) {
    std::vector<std::string> texts;
    for (const Json& element : value.is_array() ? elements(value) : Json::array_t{value}) {
        std::optional<std::string> text = as_text(element);
        if (!text)
            return Error::invalid(where + ": expected text, a number, true, false, or a list of these");
        texts.push_back(*std::move(text));
    }
    return texts;
}

}  // namespace

Result<ConfigFile> parse_config(const std::string& text, const std::string& path) {
    const Result<Json> root = parse_json(text, {.comments = true, .unique_names = true});
    if (!root) return root.error().with(path);
    if (!root->is_object()) return wrong(path, "expected one JSON object");
    ConfigFile config;
    for (const auto& [key, value] : members(*root)) {
        Result<std::vector<std::string>> texts = as_texts(value, fmt::format("{}: {}", path, excerpt(key)));
        if (!texts) return texts.error();
        if (key == "program") {
            if (texts->size() != 1 || texts->front().empty())
                return wrong(path, "program: expected one name");
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
    const Result<std::string> text = read_regular_file(path, kMaxConfigBytes);
    if (!text && text.error().code == Errc::Limit)
        return wrong(path, "larger than 1 MiB: not a job description");
    if (!text) return text.error();
    return parse_config(*text, path);
}

}  // namespace ddprun
