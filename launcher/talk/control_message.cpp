#include "launcher/talk/control_message.h"

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
    for (const auto& [key, value] : request.arguments) json[key] = value;
    return line_of(json);
}

Result<ControlRequest> decode_control_request(std::string_view line) {
    const Result<Json> json = parse_json_object(line);
    if (!json) return Error::protocol("the request is not a JSON object");
    ControlRequest request;
    for (const auto& [key, value] : members(*json)) {
        const Result<std::string> text = as<std::string>(value);
        if (!text) return Error::protocol("'" + excerpt(key) + "' is not a text");
        (key == "request" ? request.name : request.arguments[key]) = *text;
    }
    if (request.name.empty()) return Error::protocol("there is no 'request'");
    return request;
}

std::string control_text(std::string_view text) { return line_of(Json{{"ok", true}, {"text", text}}); }
std::string control_error(std::string_view why) { return line_of(Json{{"ok", false}, {"error", why}}); }

Result<std::string> decode_control_text(std::string_view line) {
    const Result<Json> json = parse_json_object(line);
    const Result<bool> ok = json ? as<bool>(*json, "ok") : json.error();
    if (!ok) return Error::protocol("the answer makes no sense");
    Result<std::string> text = as<std::string>(*json, *ok ? "text" : "error");
    if (!text) return Error::protocol(std::string("the answer has no ") + (*ok ? "text" : "error"));
    if (*ok) return text;
    return Error{Errc::Refused, *text, 0};
}

}  // namespace ddprun
