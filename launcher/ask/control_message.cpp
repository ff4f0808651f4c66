#include "launcher/ask/control_message.h"

#include "env/json.h"
#include "env/text.h"

namespace ddprun {
namespace {

std::string line_of(const Json& json) { return to_text(json) + '\n'; }

}  // namespace

std::string ControlRequest::argument(const std::string& key) const {
    const auto found = arguments.find(key);
    return found == arguments.end() ? "" : found->second;
}

std::string encode(const ControlRequest& request) {
    Json json{{"request", request.name}};
    for (const auto& [key, value] : request.arguments) json.set(key, value);
    return line_of(json);
}

Result<ControlRequest> decode_control_request(std::string_view line) {
    const std::optional<Json> json = parse_json_object(line);
    if (!json) return Error::protocol("the request is not a JSON object");
    ControlRequest request;
    for (const auto& [key, value] : json->members()) {
        if (!value.is_text()) return Error::protocol("'" + excerpt(key) + "' is not a text");
        if (key == "request") request.name = value.text();
        else request.arguments[key] = value.text();
    }
    if (request.name.empty()) return Error::protocol("there is no 'request'");
    return request;
}

std::string control_text(std::string_view text) { return line_of(Json{{"ok", true}, {"text", text}}); }
std::string control_error(std::string_view why) { return line_of(Json{{"ok", false}, {"error", why}}); }

Result<std::string> decode_control_text(std::string_view line) {
    const std::optional<Json> json = parse_json_object(line);
    const std::optional<bool> ok = json ? (*json)["ok"].as_bool() : std::nullopt;
    if (!ok) return Error::protocol("the answer makes no sense");
    const Json& text = (*json)[*ok ? "text" : "error"];
    if (!text.is_text()) return Error::protocol(std::string("the answer has no ") + (*ok ? "text" : "error"));
    if (*ok) return text.text();
    return Error{Errc::Refused, text.text(), 0};
}

}  // namespace ddprun
