#include "launcher/job/run_state.h"

#include <fmt/core.h>

#include "env/json.h"
#include "env/nodes/batch_job.h"

namespace ddprun {

/// All members of the file besides its version.
template <class State, class Field>
static void each_member(State& state, const Field& field) {
    field("job", state.job);
    field("first_job", state.first_job);
    field("run", state.run);
    field("generation", state.generation);
    field("restarts_used", state.restarts_used);
    field("last_step", state.last_step);
    field("runs_without_progress", state.runs_without_progress);
    field("phase", state.phase);
    field("why", state.why);
}

std::string render_run_state(const RunState& state) {
    Json json = {{"version", 1}};
    each_member(state, member_writer(json));
    return to_text(json, 2) + '\n';
}

Result<RunState> parse_run_state(std::string_view text) {
    const Result<Json> json = parse_json(text);
    if (!json) return json.error();
    if (as<int>(*json, "version").value_or(0) != 1)
        return Error{Errc::InvalidArgument, "not a state of version 1", 0};
    RunState state;
    each_member(state, member_reader(*json));
    if (state.run < 1 || state.run >= 1'000'000)
        return Error{Errc::InvalidArgument, fmt::format("run {} is out of range", state.run), 0};
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
