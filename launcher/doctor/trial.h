#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/doctor/facts.h"

/// A short all-reduce among this machine's GPUs, or CPUs, as a real job: started by this very ddprun.
namespace ddprun::doctor {

/// What the user may choose of it.
struct TrialSize {
    std::string seconds = "2";
    std::string bytes;  ///< "" as fits the device
};

struct TrialPlan {
    int workers = 1;
    bool on_gpus = false;
    std::vector<std::string> arguments;    ///< of ddprun
    std::vector<std::string> environment;  ///< "NAME=value" besides ours
    std::string why;                       ///< why the CPUs although there are GPUs; ""
};

/// One worker per visible GPU, by NCCL; where there is none, or one is lost, one per CPU of our quota. Pure.
TrialPlan plan_trial(const HostFacts& host, const NvidiaFacts& nvidia, int visible_gpus,
                     const TrialSize& size = {});

/// Runs it, for a minute at most. Never fails: what went wrong is in the facts.
TrialFacts run_trial(const TrialPlan& plan);

/// From what the job wrote and how it ended. `started_at_ns` is the steady clock's. Pure.
TrialFacts read_trial(std::string_view output, int exit_code, std::int64_t started_at_ns);

}  // namespace ddprun::doctor
