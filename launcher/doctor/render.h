#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/doctor/facts.h"
#include "launcher/gpu/gpu_health.h"

namespace ddprun::doctor {

struct Look {
    bool color = false;
    std::optional<std::size_t>
        width{};  ///< of the terminal, in columns; nullopt: a file or a pipe, nothing is wrapped
};

/// "ok", "note", "warning", "error".
const char* name_of(Severity severity);
/// A table by sections, and one line that counts. Pure.
std::string render_text(const std::vector<Finding>& findings, const Look& look);
/// One JSON object with the findings and the facts they come from. Documented in docs/doctor.md. Pure.
std::string render_json(const Facts& facts, const std::vector<Finding>& findings);

}  // namespace ddprun::doctor
