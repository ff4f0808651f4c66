#pragma once

#include <span>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/types.h"

namespace ddp {

/// The content of NAME.safetensors in a checkpoint.
struct CheckpointPart {
    std::string name;
    std::vector<Tensor> tensors;
};
inline constexpr const char* kModelPart = "model";
inline constexpr const char* kOptimizerPart = "optimizer";

std::string path_of(const std::string& checkpoint, std::string_view part);

/// The content of state.json.
std::string to_json(const TrainingState& state);
/// Requires every member, with its type and a possible value. Throws InvalidInput, beginning with `place`.
TrainingState state_from_json(const std::string& text, const std::string& place);

/// Fills the parts from the files of a checkpoint, all or none, as load_checkpoint does.
void read_parts(const std::string& checkpoint, std::span<const CheckpointPart> parts,
                const TrainingState& state);

}  // namespace ddp
