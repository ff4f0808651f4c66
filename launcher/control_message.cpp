#include "launcher/control_message.h"

#include <nlohmann/json.hpp>

namespace ddprun {
namespace {

using Json = nlohmann::ordered_json;

Error malformed(std::string what) { return {Errc::Protocol, std::move(what), 0}; }

std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n'; }

}  // namespace

std::string ControlRequest::argument(const std::string& key) const {
    const auto found = arguments.find(key);
    return found == arguments.end() ? "" : found->second;
}

std::string encode(const ControlRequest& request) {
    Json json;
    json["request"] = request.name;
    for (const auto& [key, value] : request.arguments) json[key] = value;
    return line_of(json);
}

Result<ControlRequest> decode_control_request(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) return malformed("the request is not a JSON object");
    ControlRequest request;
    for (const auto& [key, value] : json.items()) {
        if (!value.is_string()) return malformed("'" + key + "' is not a text");
        if (key == "request") request.name = value.get<std::string>();
        else request.arguments[key] = value.get<std::string>();
    }
    if (request.name.empty()) return malformed("there is no 'request'");
    return request;
}

std::string control_text(std::string_view text) { return line_of({{"ok", true}, {"text", text}}); }
std::string control_error(std::string_view why) { return line_of({{"ok", false}, {"error", why}}); }

Result<std::string> decode_control_text(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("ok") || !json["ok"].is_boolean()) return malformed("the answer makes no sense");
    const char* key = json["ok"].get<bool>() ? "text" : "error";
    if (!json.contains(key) || !json[key].is_string()) return malformed(std::string("the answer has no ") + key);
    std::string text = json[key].get<std::string>();
    if (json["ok"].get<bool>()) return text;
    return Error{Errc::Refused, std::move(text), 0};
}

}  // namespace ddprun
