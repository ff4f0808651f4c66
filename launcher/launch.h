#pragma once

#include <string>
#include <vector>

namespace ddprun {

/// The signals that a running job reads from its event loop; blocked in this thread from now on.
void block_handled_signals();
const std::vector<int>& handled_signals();

/// The whole program: reads the command line, says what is wrong with it in one line, or runs the job.
/// Returns the exit code (exit_codes.h).
int launch(const std::vector<std::string>& arguments);

}  // namespace ddprun
