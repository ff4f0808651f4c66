#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/sampler.h"
#include "ddp/types.h"
#include "env/unique_fd.h"

namespace ddp {

class Optimizer;
struct CheckpointPart;
namespace cuda {
class HostScratch;
}

using Metadata = std::map<std::string, std::string>;

/// Largest header, in bytes, that is read or written (the format's own limit).
inline constexpr std::uint64_t kSafetensorsHeaderLimit = 100'000'000;

/// Writes a safetensors file (readable by Python's safetensors, Hugging Face and others) and syncs it to the
/// disk; it replaces a file of that name once it is whole. Tensors are whole and in host memory; they lie in
/// the given order, the first at a multiple of 64 bytes. Throws Error naming path and cause, and leaves no
/// unfinished file.
void write_safetensors(const std::string& path, std::span<const Tensor> tensors,
                       const Metadata& metadata = {});

/// A safetensors file, open for reading. The file is not trusted: every size and offset is checked when it is
/// opened.
class SafetensorsFile {
  public:
    struct Entry {
        DType dtype = DType::F32;
        std::vector<std::int64_t> shape;
        std::uint64_t offset = 0;  ///< from the beginning of the file
        std::uint64_t bytes = 0;
    };

    /// Throws InvalidInput naming the path and the fault in its content, Error when it cannot be read.
    static SafetensorsFile open(const std::string& path);

    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const Metadata& metadata() const { return metadata_; }

    /// Throws InvalidInput, naming the first tensor that differs and both shapes, unless the file holds
    /// exactly these tensors. Here and below, "module.fc1.weight" in the file (PyTorch's name in a
    /// DistributedDataParallel) matches the program's "fc1.weight".
    void require_same(std::span<const Tensor> tensors) const;
    /// Calls require_same, then fills the tensors; a part (Tensor::part_begin) gets its range. A read error
    /// after the check leaves them half filled.
    void read_into(std::span<const Tensor> tensors) const;

    /// The tensors that only one of two sets has.
    struct Unmatched {
        std::vector<std::string> missing;  ///< program's names that the file lacks
        std::vector<std::string> unused;   ///< file's names that the program lacks
    };
    /// Maps a name in the program to the name in the file.
    using Rename = std::function<std::string(const std::string& name)>;
    /// Fills the tensors that the file holds; the others stay unchanged. Throws InvalidInput, before anything
    /// is written, when a tensor has another type or shape in the file.
    [[nodiscard]] Unmatched read_matching(std::span<const Tensor> tensors, const Rename& rename = {}) const;

  private:
    [[nodiscard]] const Entry* find(const std::string& name) const;
    void require_fit(const Tensor& tensor, const Entry& entry) const;
    void read(const Tensor& tensor, const Entry& entry) const;
    explicit SafetensorsFile(std::string path) : path_(std::move(path)) {}
    void read_header();
    void parse_header(const std::string& header, std::uint64_t data_begin, std::uint64_t file_bytes);
    [[noreturn]] void refuse(const std::string& what) const;

    std::string path_;
    ddprun::UniqueFd fd_;
    std::map<std::string, Entry> entries_;
    Metadata metadata_;
};

/// The position of a training run; the tensors are kept apart.
struct TrainingState {
    std::uint64_t epoch = 0;  ///< complete epochs
    std::uint64_t step = 0;   ///< optimizer steps done
    SamplerState sampler;
    std::map<std::string, std::string> notes;  ///< the program's own key-value pairs
    bool operator==(const TrainingState&) const = default;
};

/// A further object whose state a checkpoint holds.
struct TrainingPart {
    std::string name;           ///< of letters, digits, '-' and '_'
    Stateful* state = nullptr;  ///< borrowed; null when this run has none and ignores the checkpoint's
    bool optional = false;  ///< may be missing in a checkpoint, and then stays unchanged; a missing part that
                            ///< is not optional throws InvalidInput when it is loaded
};

/// All state of a training run, listed once for saving and loading, so that neither forgets a part. Borrowed.
///
///     const ddp::Training training{model, *optimizer, sampler, {{"schedule", &schedule}}};
///     checkpoints.load(*group, training);
///     while (sampler.epoch() < epochs) {
///         ...
///         sampler.next_epoch();
///         checkpoints.save(*group, training);
///     }
struct Training {
    Stateful& model;  ///< a DistributedDataParallel, or the program's own
    Optimizer& optimizer;
    DistributedSampler& sampler;
    std::vector<TrainingPart> parts = {};
};

/// A directory of checkpoints:
///
///     step-000750/model.safetensors       opens in Python and elsewhere
///     step-000750/optimizer.safetensors
///     step-000750/schedule.safetensors    of a TrainingPart of that name
///     step-000750/state.json
///     latest                              the name of the newest
///
/// A checkpoint appears under its name complete and on the disk, or not at all: it is written to a hidden
/// directory, synced and renamed; `latest` changes last. Whatever interrupts a save (a full disk, SIGKILL, a
/// power cut), earlier checkpoints stay intact. On a file system that cannot exchange two directories (NFS,
/// Lustre), a checkpoint that is saved again at the same step lies as `.replaced-step-…` while the new one is
/// renamed: `latest()` finds it there. One process writes (rank 0); many may read.
class CheckpointDirectory {
  public:
    /// Touches nothing yet. A save keeps the `keep` newest checkpoints and removes older ones; 0 keeps all.
    explicit CheckpointDirectory(std::string path, std::size_t keep = 2);

    /// Collective: rank 0 writes a checkpoint, the others wait until it is on the disk: at most an hour, or
    /// the group's time-out where that is longer; so does load(). `--hang-timeout` takes no rank for hung
    /// meanwhile. Returns the checkpoint's path. Makes the directory when it is missing; removes the
    /// unfinished files of a killed writer. Throws FileError naming path and cause, the same on all ranks.
    std::string save(ProcessGroup& group, const Training& training,
                     const std::map<std::string, std::string>& notes = {});
    /// Collective: rank 0 finds the newest checkpoint and reads it (see load_checkpoint); nullopt without
    /// one.
    std::optional<TrainingState> load(ProcessGroup& group, const Training& training) const;

    /// Saves tensors and a state that the program keeps itself; not collective.
    std::string save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                     const TrainingState& state);

    /// The path of the newest checkpoint, nullopt without one. Throws InvalidInput when `latest` cannot be
    /// read or names no checkpoint.
    [[nodiscard]] std::optional<std::string> latest() const;

    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    std::string write(std::span<const CheckpointPart> parts, const TrainingState& state);
    void remove_left_overs() const;
    void remove_old(const std::string& newest) const;

    std::string path_;
    std::size_t keep_;
    std::shared_ptr<cuda::HostScratch>
        scratch_;  ///< buffers for tensors on a CUDA device, kept between saves
};

/// The state of one checkpoint (a path from save or latest), without its tensors. Throws InvalidInput naming
/// the file and its fault.
TrainingState load_state(const std::string& checkpoint);
/// Collective. Rank 0 loads `checkpoint` (only its argument counts) and sends state, tensors and the
/// sampler's position to all ranks: no shared file system is needed. All checks come before the first write:
/// a checkpoint of another model throws InvalidInput naming the first tensor that differs and both shapes;
/// one with other parts names the part. When rank 0 fails, every rank throws rank 0's exception. Step counts
/// that an old optimizer file lacks become TrainingState::step.
TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint, const Training& training);
/// Loads tensors that the program keeps itself; not collective.
TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer);
/// SafetensorsFile::read_matching of the file at `path`, for tensors on devices too: initial weights. Call it
/// on rank 0 before it makes its DistributedDataParallel, which sends the weights to all ranks.
[[nodiscard]] SafetensorsFile::Unmatched load_weights(const std::string& path, std::span<const Tensor> model,
                                                      const SafetensorsFile::Rename& rename = {});

}  // namespace ddp
