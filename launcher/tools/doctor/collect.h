#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/tools/doctor/facts.h"

/// Read this machine. Never fail: facts that cannot be read keep their defaults. Together they take some ten
/// milliseconds, and more when a driver must be woken.
namespace ddprun::doctor {

HostFacts collect_host();
Variables collect_variables();

/// A small file of /proc or /sys without the white space around it; "" when it cannot be read.
std::string content_of(const std::string& path);

}  // namespace ddprun::doctor
