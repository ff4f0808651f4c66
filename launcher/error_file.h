#pragma once

#include <string>
#include <string_view>

namespace ddprun {

/// A worker's error report as people read it. torch's error.json becomes the message and, below it, the trace with
/// readable C++ names; any other text stays as it is. Never fails: a worker may write anything.
std::string readable_error_file(std::string_view content);

/// Every mangled C++ name in the text, in its readable form: a signal handler cannot do that itself.
std::string with_readable_names(std::string_view text);

}  // namespace ddprun
