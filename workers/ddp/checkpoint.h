#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/sampler.h"
#include "ddp/types.h"

namespace ddprun {
class UniqueFd;
}

namespace ddp {

class Model;
class Optimizer;
struct CheckpointSave;
class WriterLock;
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

/// A safetensors file, or several that an index lists, open for reading. They are not trusted: every size,
/// offset and name is checked when they are opened.
class SafetensorsFile {
  public:
    struct Entry {
        DType dtype = DType::F32;
        /// Its type in the file ("F8_E4M3"), where libddp has none; `dtype` means nothing then, and the
        /// tensor cannot be read.
        std::string other_type = {};
        std::vector<std::int64_t> shape;
        std::uint64_t offset = 0;  ///< from the beginning of the file
        std::uint64_t bytes = 0;
        std::size_t file = 0;  ///< its number among the files
    };

    /// A name that ends with ".index.json" is an index as Hugging Face's: its files lie beside it. Throws
    /// InvalidInput naming the path and the fault in its content (for an index: a file that is missing, lacks
    /// a tensor or is of another save), Error when it cannot be read.
    static SafetensorsFile open(const std::string& path);

    [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }
    [[nodiscard]] const Metadata& metadata() const { return metadata_; }

    /// Throws InvalidInput, naming the first tensor that differs and both shapes, unless the file holds
    /// exactly these tensors. Here and below, "module.fc1.weight" in the file (PyTorch's name in a
    /// DistributedDataParallel) matches the program's "fc1.weight".
    void require_same(std::span<const Tensor> tensors) const;
    /// Calls require_same, then fills the tensors. Throws InvalidInput for a part of a tensor
    /// (Tensor::part_begin), whose other parts would stay unchanged. A read error after the check leaves them
    /// half filled.
    void read_into(std::span<const Tensor> tensors) const;

    /// The tensors that only one of two sets has.
    struct Unmatched {
        std::vector<std::string> missing;  ///< program's names that the file lacks
        std::vector<std::string> unused;   ///< file's names that the program lacks
    };
    /// Maps a name in the program to the name in the file.
    using Rename = std::function<std::string(const std::string& name)>;
    /// Fills the tensors that the file holds; the others stay unchanged. Throws InvalidInput, before anything
    /// is written, when a tensor has another type or shape in the file, and for a part of a tensor.
    [[nodiscard]] Unmatched read_matching(std::span<const Tensor> tensors, const Rename& rename = {}) const;

  private:
    friend class PartReader;
    friend void join_shards(const std::string& index, const std::string& path);
    friend Unmatched load_weights(ProcessGroup& group, const std::string& path, Model& model,
                                  const Rename& rename);
    /// Fills tensors that require_same has checked; a part gets its range.
    void fill(std::span<const Tensor> tensors) const;
    /// As read_matching, for parts too.
    [[nodiscard]] Unmatched fill_matching(std::span<const Tensor> tensors, const Rename& rename) const;
    [[nodiscard]] const Entry* find(const std::string& name) const;
    void require_fit(const Tensor& tensor, const Entry& entry) const;
    void read(const Tensor& tensor, const Entry& entry) const;
    explicit SafetensorsFile(std::string path) : path_(std::move(path)) {}
    void read_index();
    void add_shard(const std::string& name, const std::string& save);
    void read_header();
    void parse_header(const std::string& header, std::uint64_t data_begin, std::uint64_t file_bytes);
    [[noreturn]] void refuse(const std::string& what) const;

    std::string path_;
    std::vector<std::shared_ptr<const ddprun::UniqueFd>> files_;
    std::map<std::string, Entry> entries_;
    Metadata metadata_;
};

/// Writes the tensors of all files of `index` ("step-000750/model.safetensors.index.json") to one file, as
/// write_safetensors does, in the order of their names. Throws as SafetensorsFile::open does before anything
/// is written.
void join_shards(const std::string& index, const std::string& path);

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

struct CheckpointOptions {
    std::size_t keep = 2;       ///< a save removes older checkpoints than the newest `keep`; 0 keeps all
    bool asynchronous = false;  ///< save() returns once the state is copied; a thread writes it to the disk
};

/// A directory of checkpoints:
///
///     step-000750/model.safetensors       opens in Python and elsewhere
///     step-000750/optimizer.safetensors
///     step-000750/schedule.safetensors    of a TrainingPart of that name
///     step-000750/state.json
///     latest                              the name of the newest
///
/// Where training is sharded (Tensor::part_begin), each rank writes some of the tensors, whole, to
/// `optimizer-00002-of-00008.safetensors`, and `optimizer.safetensors.index.json` lists them as Hugging
/// Face's index does. All ranks then need the same directory, on a shared file system where they are on
/// several nodes. Any number of ranks, sharded or not, can load either kind.
///
/// A checkpoint appears under its name complete and on the disk, or not at all: it is written to a hidden
/// directory, synced and renamed; `latest` changes last. Whatever interrupts a save (a full disk, SIGKILL, a
/// power cut), earlier checkpoints stay intact. On a file system that cannot exchange two directories (NFS,
/// Lustre), a checkpoint that is saved again at the same step lies as `.replaced-step-…` while the new one is
/// renamed: `latest()` finds it there.
///
/// One run at a time writes; many may read. From claim() or its first save on the process of rank 0 holds a
/// lock on the file `.writer`, until this object ends or its process does. A save of another run then throws
/// FileError with the host and the process that save here. A restarted job, and the rank 0 of a later
/// generation, go on with their own directory. Where a file system has no locks, only runs on one host find
/// each other, and what a killed writer leaves is removed after an hour.
class CheckpointDirectory {
  public:
    /// Touches nothing yet.
    explicit CheckpointDirectory(std::string path, CheckpointOptions options = {});
    /// Waits for an asynchronous save; prints its error to stderr when neither save(), load() nor finish()
    /// has thrown it.
    ~CheckpointDirectory();
    CheckpointDirectory(const CheckpointDirectory&) = delete;
    CheckpointDirectory& operator=(const CheckpointDirectory&) = delete;

    /// Collective: rank 0 (with sharded state, every rank) writes a checkpoint, and all wait until it is on
    /// the disk: at most an hour, or the group's time-out where that is longer; so do load() and finish().
    /// `--hang-timeout` takes no rank for hung meanwhile. Returns the checkpoint's path. Makes the directory
    /// when it is missing; removes the unfinished files of a killed writer. Throws FileError naming path and
    /// cause, or the other run that saves here, the same on all ranks.
    ///
    /// Once a rank is lost, `latest` does not change any more: the ranks that go on may save this step again.
    /// An asynchronous save that has copied the state ends all the same: every rank had this state.
    ///
    /// An asynchronous save first waits for the save before it, and throws its error in place of saving. The
    /// copies take as much memory as the tensors that this rank writes, and are kept for the next save. The
    /// writing thread has the lowest priority.
    std::string save(ProcessGroup& group, const Training& training,
                     const std::map<std::string, std::string>& notes = {});
    /// Collective: makes this run the one that saves here, as its first save would do: so another run's lock
    /// is an error at the start, and not after the first epoch. Makes the directory. Throws FileError on all
    /// ranks.
    void claim(ProcessGroup& group);
    /// Collective: waits until an asynchronous save is on the disk; throws its error as save() does. Call it
    /// at the end of the run.
    void finish(ProcessGroup& group);
    /// Collective: rank 0 finds the newest checkpoint and reads it (see load_checkpoint); nullopt without
    /// one. Calls finish() first.
    std::optional<TrainingState> load(ProcessGroup& group, const Training& training);

    /// Saves whole tensors and a state that the program keeps itself; not collective, never asynchronous.
    std::string save(std::span<const Tensor> model, std::span<const Tensor> optimizer,
                     const TrainingState& state);

    /// The path of the newest checkpoint, nullopt without one. Throws InvalidInput when `latest` cannot be
    /// read or names no checkpoint.
    [[nodiscard]] std::optional<std::string> latest() const;

    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    /// Makes the directory, and makes this process the one that saves here.
    void hold();
    /// Makes an unfinished checkpoint, a hidden directory; returns its path.
    std::string begin(std::uint64_t step);
    /// `may_go_on` is called before `latest` changes, and may throw.
    void publish(const CheckpointSave& save, const std::function<void()>& may_go_on = {}) const;
    void write_in_background(std::unique_ptr<CheckpointSave> save);
    void remove_left_overs() const;
    void remove_old(const std::string& newest) const;

    std::string path_;
    CheckpointOptions options_;
    std::unique_ptr<WriterLock> writer_;  ///< null before this process saves
    // Kept between saves: copies of tensors, and tensors that were gathered from several ranks.
    std::shared_ptr<cuda::HostScratch> copies_, gathered_;
    std::future<void> pending_;  ///< the asynchronous save; invalid without one
};

/// The state of one checkpoint (a path from save or latest), without its tensors. Throws InvalidInput naming
/// the file and its fault.
TrainingState load_state(const std::string& checkpoint);
/// Collective. Rank 0 loads `checkpoint` (only its argument counts) and sends state, tensors and the
/// sampler's position to all ranks: no shared file system is needed. Only the parts of sharded tensors
/// (Tensor::part_begin) are read by each rank. All checks come before the first write: a checkpoint of
/// another model throws InvalidInput naming the first tensor that differs and both shapes; one with other
/// parts names the part. When a rank fails, every rank throws its exception. Step counts that an old
/// optimizer file lacks become TrainingState::step.
TrainingState load_checkpoint(ProcessGroup& group, const std::string& checkpoint, const Training& training);
/// Loads whole tensors that the program keeps itself; not collective.
TrainingState load_checkpoint(const std::string& checkpoint, std::span<const Tensor> model,
                              std::span<const Tensor> optimizer);
/// SafetensorsFile::read_matching of the file or index at `path`, for tensors on devices too: initial
/// weights. Call it on rank 0 before it makes its DistributedDataParallel, which sends the weights to all
/// ranks.
[[nodiscard]] SafetensorsFile::Unmatched load_weights(const std::string& path, std::span<const Tensor> model,
                                                      const SafetensorsFile::Rename& rename = {});
/// Collective: the weights and buffers of `model`, sharded or not, become those of the file or index at
/// `path`, on all ranks; the tensors that the file lacks become rank 0's. Every rank reads the same file. An
/// optimizer that was made before copies no 16-bit weights again: load them first. When a rank fails, every
/// rank throws its exception, as read_matching does.
[[nodiscard]] SafetensorsFile::Unmatched load_weights(ProcessGroup& group, const std::string& path,
                                                      Model& model,
                                                      const SafetensorsFile::Rename& rename = {});

}  // namespace ddp
