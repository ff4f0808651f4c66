#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/checkpoint/durable_file.h"
#include "ddp/checkpoint/parts.h"
#include "ddp/cuda/host_copies.h"
#include "ddp/cuda/memory.h"

namespace ddp {

/// Time limit of a save or a load; the group's time-out is for collectives.
inline constexpr std::chrono::hours kFileTimeout{1};

/// Another rank did not write its file: that rank knows why.
class OtherRankFailed : public FileError {
  public:
    OtherRankFailed(std::size_t of, const std::string& what) : FileError(what), rank(of) {}
    const std::size_t rank;
};

/// One rank's share of a checkpoint that is being written. Rank 0 publishes the checkpoint when all files are
/// there, without a call of the group, which others may use meanwhile: a file has its unfinished name while
/// it is written, then its name, and neither when its writer has failed.
struct CheckpointSave {
    struct File {
        std::string path;
        std::vector<Tensor> tensors;
        Metadata metadata;
        bool is_copy = false;  ///< the tensors lie in host memory that nobody changes
        std::unique_ptr<DurableFile> file = nullptr;
    };
    CheckpointSave() = default;
    CheckpointSave(const CheckpointSave&) = delete;
    CheckpointSave& operator=(const CheckpointSave&) = delete;
    /// Rank 0 removes what was not published.
    ~CheckpointSave();

    /// Copies the tensors that the program may change.
    void copy(const std::shared_ptr<cuda::HostScratch>& scratch);
    /// Makes the files, empty. Throws FileError, as write() does.
    void create();
    void write(const std::shared_ptr<cuda::HostScratch>& scratch);
    /// Waits on rank 0 for the other ranks' files, for kFileTimeout at most. Throws OtherRankFailed.
    void wait_for_others() const;

    std::string hidden;  ///< the directory
    bool publishes = false;
    std::vector<File> files;                      ///< of this rank
    std::optional<cuda::DeviceMemory> on_device;  ///< of tensors that were gathered there
    // Rank 0 has these:
    std::vector<std::pair<std::string, std::string>> texts;    ///< paths and contents of small files
    std::vector<std::pair<std::size_t, std::string>> awaited;  ///< ranks and paths of their files
};

/// The path of the checkpoint that the unfinished one at `hidden` becomes.
std::string published_path(const std::string& hidden);
/// The random name of the save, for the files that belong together.
std::string save_name_of(const std::string& hidden);
/// Metadata of every file.
Metadata metadata_of(std::uint64_t step);

}  // namespace ddp
