#include "launcher/error_file.h"

#include <cxxabi.h>
#include <fmt/core.h>

#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "env/text.h"

namespace ddprun {
namespace {

using Json = nlohmann::json;

std::string text_in(const Json& object, const char* key) {
    if (!object.is_object() || !object.contains(key)) return {};
    const Json& value = object.at(key);
    return value.is_string() ? value.get<std::string>() : std::string();
}

std::string readable_name(const std::string& symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
    return status == 0 ? name.get() : symbol;
}

/// The last words of NCCL and CUDA, one line each, where the message does not say them already.
std::string device_words(const Json& extra, const std::string& message) {
    std::string lines;
    for (const auto& [key, library] : {std::pair{"nccl_error", "NCCL"}, std::pair{"cuda_error", "CUDA"}}) {
        const std::string words = text_in(extra, key);
        if (!words.empty() && message.find(words) == std::string::npos) lines += fmt::format("last {} error: {}\n", library, words);
    }
    return lines;
}

}  // namespace

std::string with_readable_names(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const std::size_t at = text.find("_Z");
        out += text.substr(0, at);
        if (at == std::string_view::npos) break;
        const std::size_t end = text.find_first_of(" +)[]\n", at);
        out += readable_name(std::string(text.substr(at, end - at)));
        text = end == std::string_view::npos ? std::string_view() : text.substr(end);
    }
    return out;
}

std::string readable_error_file(std::string_view content) {
    const Json json = Json::parse(content, nullptr, false);
    if (!json.is_object() || !json.contains("message")) return std::string(trim(content));
    // {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}, in older releases {"message": "..."}.
    const Json& inner = json.at("message");
    std::string text = inner.is_string() ? inner.get<std::string>() : text_in(inner, "message");
    if (text.empty()) return std::string(trim(content));
    const Json extra = inner.is_object() && inner.contains("extraInfo") ? inner.at("extraInfo") : Json();
    const std::string stack = with_readable_names(text_in(extra, "py_callstack"));
    const std::string device = device_words(extra, text);
    // A Python trace ends with the message; do not say it twice.
    if (stack.find(text) != std::string::npos) return device + std::string(trim(stack));
    text += '\n' + device;
    return std::string(trim(text + std::string(trim(stack))));
}

}  // namespace ddprun
