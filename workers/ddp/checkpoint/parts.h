#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/cuda/host_copies.h"
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
std::string index_path_of(const std::string& checkpoint, std::string_view part);
std::string state_path_of(const std::string& checkpoint);
/// The path of the part's file or index in a checkpoint; "" where it has none.
std::string find_part(const std::string& checkpoint, std::string_view part);

/// The content of state.json.
std::string to_json(const TrainingState& state);
/// Requires every member, with its type and a possible value. Throws InvalidInput, beginning with `place`.
TrainingState state_from_json(const std::string& text, const std::string& place);

/// The files of some parts, checked and not read yet.
class PartReader {
  public:
    enum class What { All, PartsOfTensors };  ///< the tensors to read: those of sharded training, or all
    /// Throws as load_checkpoint does.
    PartReader(const std::string& checkpoint, std::span<const CheckpointPart> parts, What what = What::All);
    /// Fills the tensors; `step` becomes the step counts that an old optimizer file lacks.
    void read(std::uint64_t step) const;

  private:
    struct PartFile {
        SafetensorsFile file;
        std::vector<Tensor> counts;  ///< tensors that the file lacks
        cuda::HostCopies copies;
    };
    std::list<PartFile> files_;
};

}  // namespace ddp
