#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ddp/model.h"

namespace train {

/// The result of one epoch, over all workers.
struct EpochResult {
    std::uint64_t epoch = 0;  ///< from 1
    double loss = 0;          ///< mean over the training samples, at the time of their step
    double training_accuracy = 0;
    double held_out_accuracy = 0;
    double samples_per_second = 0;
    ddp::MemoryUse memory;  ///< of one worker
    /// Parts of the workers' time, 0 to 1: communicating in collectives that all ranks had begun, and waiting
    /// until the last had. Unknown on a GPU, where collectives overlap with computation.
    std::optional<double> communication_share = std::nullopt;
    std::optional<double> waiting_share = std::nullopt;
};

/// To send it to another process.
void to_json(nlohmann::json& json, const EpochResult& result);
void from_json(const nlohmann::json& json, EpochResult& result);

struct Summary {
    int world_size = 1;
    std::vector<EpochResult> epochs;
    double held_out_accuracy = 0;
    double seconds = 0;      ///< from the begin of this run, with the recoveries in place since
    std::string digest;      ///< SHA-256 over all parameters, equal on all ranks
    std::string checkpoint;  ///< path of the last checkpoint
    bool stopped = false;    ///< stopped early by a request
};

/// "epoch  3/30  loss 0.2113  train  94.1 %  held-out  95.5 %  52,341 samples/s  memory 2.6 MiB
/// communication 12 %, waiting 3 %"
std::string format_epoch(const EpochResult& result, std::uint64_t epochs);
/// The same numbers for programs: one JSON object.
std::string to_json(const Summary& summary);
/// 1797 gives "1,797".
std::string grouped(std::uint64_t number);

}  // namespace train
