#pragma once

#include <map>
#include <string>
#include <vector>

#include "launcher/spec/job_spec.h"

namespace ddprun {

/// What the user asked for.
struct CommandLine {
    enum Action { Run, Help, Version, PrintCompletion, PrintMan } action = Run;
    JobSpec spec;      ///< for Run; checked, without contradictions
    std::string text;  ///< for the other actions: print it and exit with 0
    /// What the user should know although nothing is wrong ("--start-method: accepted, without effect: ...").
    std::vector<std::string> remarks;
    /// The options that were given, by long name, and their source: "command line", "PET_NNODES", "job.json".
    std::map<std::string, std::string> sources;
    /// The values as they were written; those of a repeatable option are joined with commas.
    std::map<std::string, std::string> values;
};

}  // namespace ddprun
