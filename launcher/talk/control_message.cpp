#include "launcher/talk/control_message.h"

#include "env/json.h"
#include "env/text.h"

namespace ddprun {

std::string ControlRequest::argument(const std::string& key) const {
    const auto found = arguments.find(key);
    return found == arguments.end() ? "" : found->second;
}

std::string encode(const ControlRequest& request) {
    JsonWriter json;
    json("request", request.name);
    for (const auto& [key, value] : request.arguments) json(key, value);
    return std::move(json).text() + '\n';
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

std::string control_error(std::string_view why) {
    JsonWriter json;
    json("ok", false);
    json("error", why);
    return std::move(json).text() + '\n';
}

Status check_answer(JsonReader& reader) {
    bool ok = false;
    std::string why = "the job gave no reason";
    reader.defaulted("ok", ok);
    reader.defaulted("error", why);
    if (const Status read = reader.end(); !read) return read.error().with("the answer makes no sense");
    return ok ? Status() : Error{Errc::Refused, why, 0};
}

}  // namespace ddprun
