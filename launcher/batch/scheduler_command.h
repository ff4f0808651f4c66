#pragma once

#include <string>
#include <vector>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun {

/// What a scheduler's program said.
struct CommandOutcome {
    int exit_code = 0;  ///< 128 + signal where one ended it
    std::string out;
    std::string err;
};

/// Runs a program that is found in PATH, or in a PBS job where its submitter had it, in `directory` ("": ours), with nothing to read, and waits for its end. It hears
/// signals as any program does, also where ours are blocked. What it writes is cut at 16 MiB.
/// Error: NotFound ("qsub: not found in PATH"), Timeout (it was killed), System.
Result<CommandOutcome> run_scheduler_command(const std::vector<std::string>& command, Duration patience, const std::string& directory = "");

/// What a program that refused said, as one line: its standard error, else its output, else its exit code. Pure.
std::string words_of_refusal(const std::string& program, const CommandOutcome& outcome);

}  // namespace ddprun
