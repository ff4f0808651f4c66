#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/doctor/facts.h"

/// Looks at this machine. Nothing here fails: what cannot be read stays at its default. Together some ten
/// milliseconds, and more where a driver has to be woken.
namespace ddprun::doctor {

HostFacts collect_host();
Variables collect_variables();

/// A small file of /proc or /sys without the white space around it; "" when it cannot be read.
std::string content_of(const std::string& path);

}  // namespace ddprun::doctor
