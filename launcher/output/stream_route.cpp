#include "launcher/output/stream_route.h"

#include <algorithm>

namespace ddprun {

StreamRoute route_of(const OutputSpec& spec, int local_rank, Streams stream, bool has_directory) {
    const bool redirected = has(spec.redirects.of(local_rank), stream);
    const bool teed = has(spec.tee.of(local_rank), stream);
    const bool is_kept = spec.log_dir.empty() || has_directory;
    const std::vector<int>& shown = spec.local_ranks;
    const bool is_shown = shown.empty() || std::find(shown.begin(), shown.end(), local_rank) != shown.end();
    StreamRoute route;
    route.to_console = is_shown && (!redirected || teed || !is_kept);
    route.to_file = (redirected || teed) && has_directory;
    route.is_filtered = !filters_of(spec, stream).empty();
    if (route.to_console || route.is_filtered) route.needs_pipe = true;
    else if (route.to_file) route.needs_pipe = spec.max_file_bytes != 0;
    else route.needs_pipe = stream == Streams::Err;  // the report needs its last lines
    return route;
}

const std::vector<std::string>& filters_of(const OutputSpec& spec, Streams stream) {
    return stream == Streams::Out ? spec.stdout_filters : spec.stderr_filters;
}

}  // namespace ddprun
