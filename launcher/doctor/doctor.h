#pragma once

#include <string>
#include <vector>

namespace ddprun {

/// `ddprun doctor`: looks at this machine, tries an all-reduce, says what is wrong and what to set.
/// Returns the exit code: 0, 1 something is wrong (an error among the findings; warnings are none), 64 wrong
/// usage.
int run_doctor(const std::vector<std::string>& options);

}  // namespace ddprun
