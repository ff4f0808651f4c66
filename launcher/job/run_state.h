#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// The state that one run of a batch job leaves for the next: a job that is put back into the queue, by us
/// (--requeue) or by the scheduler, goes on counting. One file; docs/batch.md has its fields.
struct RunState {
    std::string job;                ///< the scheduler's id of the job that reads or writes this
    std::string first_job;          ///< id of the first run
    int run = 1;                    ///< of this job, from 1 on
    std::int64_t generation = 0;    ///< of the run's last world
    int restarts_used = 0;          ///< in the run
    std::int64_t last_step = -1;    ///< the highest step reported in any run; -1: none
    int runs_without_progress = 0;  ///< in a row
    std::string phase = "running";  ///< running, queued (for the next run), ended
    std::string why;                ///< the reason for queued or ended
    bool operator==(const RunState&) const = default;
};

std::string render_run_state(const RunState& state);
/// Error: InvalidArgument, in one line.
Result<RunState> parse_run_state(std::string_view text);

/// "DIR/ddprun-12.pbs01.json"; each element of an array has its own file.
std::string run_state_path(const std::string& directory, std::string_view job);

/// The state at the beginning of a run; `before` is the last run's, nullopt at the first.
RunState next_run(const std::optional<RunState>& before, const std::string& job);
/// The state of a run that goes on under another head; `before` is the lost head's, nullopt when it wrote
/// none.
RunState same_run(const std::optional<RunState>& before, const std::string& job);

}  // namespace ddprun
