#pragma once

#include <string>

namespace ddprun {

/// The manual page ddprun(1) as troff source, from the same tables as --help.
std::string render_man_page();

}  // namespace ddprun
