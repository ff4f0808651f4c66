#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/cli/options.h"
#include "launcher/head/start/host_starter.h"
#include "launcher/node/plan/program.h"

namespace ddprun {

/// The hosts of the allocation around us, or of --hosts, become the job's nodes: `line` becomes that of their
/// head; what it starts. nullopt: it starts none. Nothing changes where the job stays on this host; why, is
/// among the line's remarks. Error: as find_allocation and plan_start.
Result<std::optional<HostStart>> use_allocation(CommandLine& line, const std::vector<std::string>& arguments);
/// The rest of what the head tells the ddprun that it starts: itself, the program, the directory, the
/// environment, of which the variables that are `asked` for by name are sent too. Error: System.
Status complete_order(HostStart& start, const ResolvedProgram& program,
                      const std::vector<std::string>& asked);

/// On another host: the head's directory and environment become this process's, its command line is read
/// again here. Error: Mismatch (another ddprun), System (no such directory), as parse_command_line.
Result<CommandLine> take_order(const StartedNode& started);
/// The program is what it is on the head. Where that is no file (a Python module) nothing is compared. Error:
/// Mismatch, System.
Status check_same_program(const StartedNode& started, const ResolvedProgram& program);

}  // namespace ddprun
