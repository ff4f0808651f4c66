#include "launcher/batch/run_state.h"

#include <fmt/core.h>

#include "env/json.h"
#include "env/nodes/batch_job.h"

namespace ddprun {

std::string render_run_state(const RunState& state) {
    const Json json{{"version", 1},
                    {"job", state.job},
                    {"first_job", state.first_job},
                    {"run", state.run},
                    {"generation", state.generation},
                    {"restarts_used", state.restarts_used},
                    {"last_step", state.last_step},
                    {"runs_without_progress", state.runs_without_progress},
                    {"phase", state.phase},
                    {"why", state.why}};
    return to_text(json, 2) + '\n';
}

Result<RunState> parse_run_state(std::string_view text) {
    const Result<Json> json = parse_json(text);
    if (!json) return json.error();
    if (!json->is_object() || (*json)["version"].as_int() != 1) return Error{Errc::InvalidArgument, "not a state of version 1", 0};
    RunState state;
    take(*json, "job", state.job);
    take(*json, "first_job", state.first_job);
    take(*json, "run", state.run);
    take(*json, "generation", state.generation);
    take(*json, "restarts_used", state.restarts_used);
    take(*json, "last_step", state.last_step);
    take(*json, "runs_without_progress", state.runs_without_progress);
    take(*json, "phase", state.phase);
    take(*json, "why", state.why);
    if (state.run < 1 || state.run >= 1'000'000) return Error{Errc::InvalidArgument, fmt::format("run {} cannot be", state.run), 0};
    return state;
}

std::string run_state_path(const std::string& directory, std::string_view job) {
    return fmt::format("{}/ddprun-{}.json", directory, file_name_of(job));
}

RunState next_run(const std::optional<RunState>& before, const std::string& job) {
    RunState state = before.value_or(RunState{});
    if (before) ++state.run;
    state.job = job;
    if (state.first_job.empty()) state.first_job = job;
    state.generation = 0;
    state.restarts_used = 0;
    state.phase = "running";
    state.why.clear();
    return state;
}

RunState same_run(const std::optional<RunState>& before, const std::string& job) {
    return before && before->job == job ? *before : next_run(before, job);
}

}  // namespace ddprun
