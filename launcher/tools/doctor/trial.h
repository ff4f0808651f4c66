#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/tools/doctor/facts.h"

/// A short all-reduce among this machine's GPUs, or CPUs, as a real job of this ddprun.
namespace ddprun::doctor {

/// The user's choices for the trial.
struct TrialSize {
    std::string seconds = "2";
    std::string bytes;  ///< "" the device's default
};

struct TrialPlan {
    int workers = 1;
    bool on_gpus = false;
    std::vector<std::string> arguments;    ///< of ddprun
    std::vector<std::string> environment;  ///< "NAME=value", added to ours
    std::string why;                       ///< why it uses the CPUs despite GPUs; "" it does not
};

/// Plans one worker per visible GPU, with NCCL; without GPUs, or when one is lost, one per CPU of our quota.
/// Pure.
TrialPlan plan_trial(const HostFacts& host, const NvidiaFacts& nvidia, int visible_gpus,
                     const TrialSize& size = {});

/// Runs the trial, for a minute at most. Never fails: an error is in the facts.
TrialFacts run_trial(const TrialPlan& plan);

/// The facts from the job's output and exit code. `started_at_ns` is on the steady clock. Pure.
TrialFacts read_trial(std::string_view output, int exit_code, std::int64_t started_at_ns);

}  // namespace ddprun::doctor
