#pragma once

#include <map>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun {

/// A request to a running job, as one line of JSON: {"request":"signal","signal":"USR1","rank":"3"}.
struct ControlRequest {
    std::string name;
    std::map<std::string, std::string> arguments;  ///< all values are texts
    bool operator==(const ControlRequest&) const = default;

    /// The value of an argument; "" when it is absent.
    [[nodiscard]] std::string argument(const std::string& key) const;
};

/// The time for the stacks of one node: a debugger reads the symbols of a large program.
inline constexpr Duration kStackTimeout = std::chrono::seconds(15);

/// The request as one line with its newline.
std::string encode(const ControlRequest& request);
/// Error: Protocol (no JSON, no object, no "request", a value that is no text).
Result<ControlRequest> decode_control_request(std::string_view line);

/// Answers, each one line with its newline: {"ok":true,"text":...} and {"ok":false,"error":...}.
std::string control_text(std::string_view text);
std::string control_error(std::string_view why);
/// The text of an answer. Error: Refused with the job's reason; Protocol.
Result<std::string> decode_control_text(std::string_view line);

}  // namespace ddprun
