#pragma once

#include <string>
#include <vector>

namespace ddprun {

/// Opens /dev/null in place of a standard stream that our starter has closed: else the next descriptor we
/// open is number 2, and error messages go into it.
void open_standard_streams();

/// The whole program: reads the command line, says what is wrong with it in one line, or runs the job.
/// Returns the exit code (exit_codes.h).
int launch(const std::vector<std::string>& arguments);

}  // namespace ddprun
