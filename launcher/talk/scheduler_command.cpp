#include "launcher/talk/scheduler_command.h"

#include <fmt/core.h>

#include "env/io/file.h"
#include "env/nodes/batch_job.h"
#include "env/text.h"
#include "env/worker_env.h"

namespace ddprun {

Result<ToolEnd> run_scheduler_command(const std::vector<std::string>& command, Duration timeout,
                                      const std::string& directory) {
    constexpr std::size_t kMostOutput = 16 << 20;
    os::SpawnSpec spec;
    spec.program = find_executable(command[0], scheduler_search_path(process_environment));
    if (spec.program.empty())
        return Error{Errc::NotFound, fmt::format("{}: not found in PATH", command[0]), 0};
    spec.arguments = command;
    spec.environment = scheduler_environment(os::own_environment(), process_environment);
    spec.directory = directory;
    Result<ToolEnd> end = run_tool_and_wait(std::move(spec), {timeout, kMostOutput});
    if (!end || end->is_in_time) return end;
    return Error{Errc::Timeout, fmt::format("{} took longer than {}", command[0], format_duration(timeout)),
                 0};
}

std::string describe_refusal(const std::string& program, const ToolEnd& outcome) {
    std::vector<std::string> lines;
    for (const std::string_view line : split(trim(outcome.err).empty() ? outcome.out : outcome.err, '\n')) {
        if (!trim(line).empty()) lines.emplace_back(trim(line));
    }
    if (lines.empty())
        return fmt::format("{} ended with exit code {} and said nothing", program, outcome.exit_code);
    const std::string text = join(lines, "; ");
    return text.starts_with(program + ":") ? text : fmt::format("{}: {}", program, text);
}

}  // namespace ddprun
