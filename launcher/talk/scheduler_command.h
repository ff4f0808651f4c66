#pragma once

#include <string>
#include <vector>

#include "env/clock.h"
#include "env/os/run_tool.h"
#include "env/result.h"

namespace ddprun {

/// Runs a program of PATH (in a PBS job also of the submitter's PATH) in `directory` ("": ours) and waits for
/// its end. Its output is cut at 16 MiB. Error: NotFound ("qsub: not found in PATH"), Timeout (it was
/// killed), System.
Result<ToolEnd> run_scheduler_command(const std::vector<std::string>& command, Duration timeout,
                                      const std::string& directory = "");

/// One line about a program that failed: its standard error, else its output, else its exit code. Pure.
std::string describe_refusal(const std::string& program, const ToolEnd& outcome);

}  // namespace ddprun
