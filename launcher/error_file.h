#pragma once

#include <string>
#include <string_view>

namespace ddprun {

/// A worker's error report as people read it. torch's error.json becomes the message and, below it, the trace with
/// readable C++ names; any other text stays as it is. Never fails: a worker may write anything.
std::string readable_error_file(std::string_view content);

}  // namespace ddprun
