#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/cli/options.h"
#include "launcher/job/job_setup.h"
#include "launcher/plan/program.h"
#include "launcher/start/host_starter.h"

namespace ddprun {

/// Opens /dev/null in place of a standard stream that is closed. Otherwise the next descriptor that we open
/// could be number 2, and error messages would go into it.
void open_standard_streams();

/// The whole program: reads the command line, and reports what is wrong with it in one line or runs the job.
/// Returns the exit code (exit_codes.h).
int launch(const std::vector<std::string>& arguments);

/// Prints what --dry-run shows: the decisions of this run, without carrying them out. Error: why the run
/// would be refused.
Status show_plan(const JobSetup& setup, bool workers_are_given);

/// Makes the hosts of our allocation, or of --hosts, the job's nodes: `line` becomes the command line of
/// their head. Returns the hosts that this ddprun starts; nullopt: it starts none. If the job stays on this
/// host, nothing changes but a remark of `line` that says why. Error: as find_allocation and plan_start.
Result<std::optional<HostStart>> use_allocation(CommandLine& line, const std::vector<std::string>& arguments);
/// Completes the order that the head sends to every ddprun that it starts: its own file, the program, the
/// directory and the environment, with the variables named in `asked`. Error: System.
Status complete_order(HostStart& start, const ResolvedProgram& program,
                      const std::vector<std::string>& asked);

/// Takes the head's directory and environment, on another host, and reads the head's command line again.
/// Error: Mismatch (another ddprun), System (no such directory), as parse_command_line.
Result<CommandLine> take_order(const StartedNode& started);
/// Checks that the program is the same file as on the head. A program that is no file (a Python module) is
/// not compared. Error: Mismatch, System.
Status check_same_program(const StartedNode& started, const ResolvedProgram& program);

}  // namespace ddprun
