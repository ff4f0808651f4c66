#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace ddprun {

/// From harmless to fatal: a Note is worth knowing, a Warning costs speed or fails later, with an Error a job
/// cannot work here.
enum class Severity : std::uint8_t { Ok, Note, Warning, Error };

/// One thing that was looked at, and what was found.
struct Finding {
    Severity severity = Severity::Ok;
    std::string section;  ///< "GPUs"
    std::string subject;  ///< "GPU 3"
    std::string what;     ///< "uncorrectable ECC errors since the driver was loaded: 2"
    std::string remedy;   ///< what to do or set; "" nothing
    bool operator==(const Finding&) const = default;
};

inline Severity worst(const std::vector<Finding>& findings) {
    Severity severity = Severity::Ok;
    for (const Finding& finding : findings) severity = std::max(severity, finding.severity);
    return severity;
}

}  // namespace ddprun
