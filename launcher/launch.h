#pragma once

#include <string>
#include <vector>

namespace ddprun {

/// Opens /dev/null in place of a standard stream that is closed: otherwise the next descriptor that we open
/// may be number 2, and error messages go into it.
void open_standard_streams();

/// The whole program: reads the command line, and reports what is wrong with it in one line or runs the job.
/// Returns the exit code (exit_codes.h).
int launch(const std::vector<std::string>& arguments);

}  // namespace ddprun
