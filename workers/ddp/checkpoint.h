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
class HostRoom;
}

using Metadata = std::map<std::string, std::string>;

/// Largest header that is read or written (the format's own limit).
inline constexpr std::uint64_t kSafetensorsHeaderLimit = 100'000'000;

/// Writes a safetensors file (readable by Python's safetensors, Hugging Face and others) and syncs it to the
/// disk. Tensors lie in the file in the order given, the first at a multiple of 64 bytes. Not atomic: a
/// reader may see half of it; see CheckpointDirectory. Throws Error naming path and cause; what was written
/// is removed.
void write_safetensors(const std::string& path, std::span<const Tensor> tensors,
                       const Metadata& metadata = {});

/// A safetensors file, open for reading. Nothing in the file is trusted: every size and offset is checked
/// when it is opened.
class SafetensorsFile {
  public:
    struct Entry {
        DType dtype = DType::F32;
        std::vector<std::int64_t> shape;
        std::uint64_t offset = 0;  ///< from the beginning of the file
        std::uint64_t bytes = 0;
    };

    /// Throws InvalidInput naming the path and what is wrong with it, Error when it cannot be read.
    static SafetensorsFile open(const std::string& path);

    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const Metadata& metadata() const { return metadata_; }

    /// Throws InvalidInput, naming the first tensor that differs and both shapes, unless the file holds
    /// exactly these tensors. As everywhere below, "module.fc1.weight" in the file (PyTorch's name in a
    /// DistributedDataParallel) is the program's "fc1.weight".
    void require_same(std::span<const Tensor> tensors) const;
    /// require_same, then fills their memory. A throw after the check (the disk fails) leaves them half
    /// filled.
    void read_into(std::span<const Tensor> tensors) const;

    /// What two sets of tensors do not share.
    struct Unmatched {
        std::vector<std::string> missing;  ///< in the file, by the program's names
        std::vector<std::string> unused;   ///< by the program, by the file's names
    };
    /// The name in the file for one in the program.
    using Rename = std::function<std::string(const std::string& name)>;
    /// Fills those tensors that the file holds; the others stay as they are. Throws InvalidInput for one that
    /// is of another type or shape there, before anything is written.
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

/// Where training stands, beside the tensors.
struct TrainingState {
    std::uint64_t epoch = 0;  ///< epochs that are complete
    std::uint64_t step = 0;   ///< optimizer steps done
    SamplerState sampler;
    std::map<std::string, std::string> notes;  ///< the program's own
    bool operator==(const TrainingState&) const = default;
};

/// A further piece of what a training goes on from.
struct TrainingPart {
    std::string name;  ///< of letters, digits, '-' and '_'
    Stateful* state =
        nullptr;  ///< borrowed; null: this run has none, and leaves out what a checkpoint holds of it
    bool optional = false;  ///< may be missing in a checkpoint, and is then left as it is; else loading
                            ///< throws InvalidInput
};

/// All that a training goes on from. Named once, for saving and loading alike, so that neither forgets
/// anything. Borrowed.
///
///     const ddp::Training training{model, *optimizer, sampler, {{"schedule", &schedule}}};
///     checkpoints.load(*group, training);
///     while (sampler.epoch() < epochs) {
///         ...
///         sampler.next_epoch();
///         checkpoints.save(*group, training);
///     }
struct Training {
    Stateful& model;  ///< a DistributedDataParallel, or what the program has
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
/// directory, synced and renamed; `latest` moves last. Whatever ends a save (a full disk, SIGKILL, a power
/// cut), what was there before is untouched. On a file system that cannot exchange two directories (NFS,
/// Lustre), one that is saved again at the same step lies as `.replaced-step-…` while the new one takes its
/// name: `latest()` finds it there. One process writes (rank 0); many may read.
class CheckpointDirectory {
  public:
    /// Nothing is touched yet. `keep` newest checkpoints stay, older ones are removed after a save; 0 keeps
    /// all.
    explicit CheckpointDirectory(std::string path, std::size_t keep = 2);

    /// Collective: rank 0 writes a checkpoint, the others wait until it is on the disk: an hour at the
    /// longest, or the group's time-out where that is longer; load() likewise. `--hang-timeout` takes nobody
    /// for hung meanwhile. Returns its path. Makes the directory when it is missing; removes what a killed
    /// writer left half done. Throws FileError naming path and cause, the same on all ranks.
    std::string save(ProcessGroup& group, const Training& training,
                     const std::map<std::string, std::string>& notes = {});
    /// Collective: rank 0 looks for the newest checkpoint and reads it (see load_checkpoint); nullopt where
    /// there is none.
    std::optional<TrainingState> load(ProcessGroup& group, const Training& training) const;

    /// The same of tensors and a state that the program has itself, by this process alone.
    std::string save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                     const TrainingState& state);

    /// Path of the newest, nullopt when there is none. Throws InvalidInput when `latest` cannot be read or
    /// names nothing that is there.
    [[nodiscard]] std::optional<std::string> latest() const;

    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    std::string write(std::span<const CheckpointPart> parts, const TrainingState& state);
    void remove_left_overs() const;
    void remove_old(const std::string& newest) const;

    std::string path_;
    std::size_t keep_;
    std::shared_ptr<cuda::HostRoom> room_;  ///< of tensors on a CUDA device, from one save to the next
};

/// The state of one checkpoint (a path that save or latest gave), without its tensors.
/// Throws InvalidInput naming the file and what is wrong with it.
TrainingState load_state(const std::string& checkpoint);
/// Collective. Rank 0 loads `checkpoint` (its argument alone counts), everyone gets state, tensors and the
/// sampler's place from it: no shared file system is needed. Everything is checked before anything is
/// written: a checkpoint of another model throws InvalidInput naming the first tensor that differs and both
/// shapes, one with other parts names the part. When rank 0 fails, every rank throws what rank 0 threw. Step
/// counts that an optimizer's file lacks (older ones have none of their own) become TrainingState::step.
TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint, const Training& training);
/// The same of the program's own tensors, by this process alone.
TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer);
/// SafetensorsFile::read_matching of the file at `path`, for tensors on devices too: weights to begin with.
/// Done on rank 0 before its DistributedDataParallel is made, which gives them to everyone.
[[nodiscard]] SafetensorsFile::Unmatched load_weights(const std::string& path, std::span<const Tensor> model,
                                                      const SafetensorsFile::Rename& rename = {});

}  // namespace ddp
