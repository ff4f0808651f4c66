#pragma once

#include <string>
#include <vector>

#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The worker of a stream, for prefixes and file names.
struct StreamOwner {
    int rank = 0;
    int local_rank = 0;
    std::string role = "default";
    std::string host;
};

/// The destinations of one stream of a worker.
struct StreamRoute {
    bool to_console = false;
    bool to_file = false;
    bool is_filtered = false;  ///< lines of it are copied to the file of filtered lines
    /// False when the worker writes to its file, or to /dev/null, itself.
    bool needs_pipe = false;
    bool operator==(const StreamRoute&) const = default;
};

/// `stream` is Out or Err. Without `has_directory`, streams that should go to a file are shown. Pure.
StreamRoute route_of(const OutputSpec& spec, int local_rank, Streams stream, bool has_directory);
/// The filters of a stream: lines that contain one are copied to a file of all ranks. `stream` is Out or Err.
const std::vector<std::string>& filters_of(const OutputSpec& spec, Streams stream);

}  // namespace ddprun
