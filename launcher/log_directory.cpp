#include "launcher/log_directory.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "env/file.h"
#include "env/hmac.h"

namespace ddprun {

namespace {

bool wants_files(const OutputSpec& output) {
    const auto any = [](const StreamsMap& map) { return map.everyone != Streams::None || !map.by_local_rank.empty(); };
    return any(output.redirects) || any(output.tee) || !output.stdout_filters.empty() || !output.stderr_filters.empty();
}

/// A run id as part of a path: PBS array jobs have brackets in it, users anything.
std::string as_file_name(std::string id) {
    std::replace_if(id.begin(), id.end(), [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '.'; }, '_');
    return id;
}

}  // namespace

OutputSpec prepare_log_directory(const JobSpec& spec, os::Log& log) {
    OutputSpec output = spec.output;
    if (output.log_dir.empty() && !wants_files(output)) return output;
    const char* temporary = std::getenv("TMPDIR");
    const std::string base = !output.log_dir.empty() ? output.log_dir : temporary != nullptr ? temporary : "/tmp";
    const std::string stem = output.log_dir.empty() ? "ddprun_" : "";
    output.log_dir = fmt::format("{}/{}{}_{}", base, stem, as_file_name(spec.rendezvous.run_id), random_hex(4).value_or("0"));
    const Status made = make_directories(output.log_dir);
    if (made) {
        if (spec.output.log_dir.empty()) log.info("log files are in {} (no --log-dir was given)", output.log_dir);
        return output;
    }
    log.warning("no log files: {}; output goes to the console only", made.error().what);
    output.log_dir.clear();
    output.redirects = output.tee = {};
    output.stdout_filters.clear();
    output.stderr_filters.clear();
    return output;
}

}  // namespace ddprun
