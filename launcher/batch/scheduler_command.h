#pragma once

#include <string>
#include <vector>

#include "env/clock.h"
#include "env/os/run_tool.h"
#include "env/result.h"

namespace ddprun {

/// Runs a program that is found in PATH, or in a PBS job where its submitter had it, in `directory` ("":
/// ours), and waits for its end. What it writes is cut at 16 MiB. Error: NotFound ("qsub: not found in
/// PATH"), Timeout (it was killed), System.
Result<ToolEnd> run_scheduler_command(const std::vector<std::string>& command, Duration patience,
                                      const std::string& directory = "");

/// What a program that refused said, as one line: its standard error, else its output, else its exit code.
/// Pure.
std::string words_of_refusal(const std::string& program, const ToolEnd& outcome);

}  // namespace ddprun
