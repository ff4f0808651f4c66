#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/gpu/gpu_health.h"
#include "launcher/tools/doctor/facts.h"

namespace ddprun::doctor {

struct TextStyle {
    bool color = false;
    std::optional<std::size_t> width{};  ///< columns of the terminal; nullopt (no terminal): do not wrap
};

/// "ok", "note", "warning", "error".
const char* name_of(Severity severity);
/// A table by sections, and a line with the counts. Pure.
std::string render_text(const std::vector<Finding>& findings, const TextStyle& style);
/// One JSON object with the findings and the facts they come from. Documented in docs/doctor.md. Pure.
std::string render_json(const Facts& facts, const std::vector<Finding>& findings);

}  // namespace ddprun::doctor
