#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// What one run of a batch job leaves for the next: a job that is put back into the queue, by us (--requeue)
/// or by the scheduler, goes on counting where the last run stopped. One file, docs/batch.md has its fields.
struct RunState {
    std::string job;                ///< the scheduler's id of the job that reads this, or writes it
    std::string first_job;          ///< of the first run
    int run = 1;                    ///< of this job, from 1 on
    std::int64_t generation = 0;    ///< of the run's last world
    int restarts_used = 0;          ///< in the run
    std::int64_t last_step = -1;    ///< the furthest that any worker has told in any run; -1: none told
    int runs_without_progress = 0;  ///< in a row
    std::string phase = "running";  ///< running, queued (for the next run), ended
    std::string why;                ///< of queued or ended
    bool operator==(const RunState&) const = default;
};

std::string render_run_state(const RunState& state);
/// Error: InvalidArgument, in one line.
Result<RunState> parse_run_state(std::string_view text);

/// "DIR/ddprun-12.pbs01.json": elements of an array have files of their own.
std::string run_state_path(const std::string& directory, std::string_view job);

/// The state at the beginning of a run: `before` is what the last one left, nullopt at the first.
RunState next_run(const std::optional<RunState>& before, const std::string& job);
/// The state of a run that goes on under another head: `before` is what the lost head has written, nullopt
/// when it could not.
RunState same_run(const std::optional<RunState>& before, const std::string& job);

}  // namespace ddprun
