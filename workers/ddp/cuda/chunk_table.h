#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ddp/cuda/memory.h"
#include "ddp/process_group.h"

namespace ddp::cuda {

/// Entries in device memory that the host replaces now and then while kernels of one stream read them.
///
/// Nothing waits: the entries travel from page-locked memory in the order of the stream, so behind the
/// kernels that read the last ones. Two page-locked copies take turns; only a host that is two replacements
/// ahead of the device waits for it, or one with more entries than there ever were.
///
/// A captured graph reads its entries whenever it is launched: they stay as they are for the life of this
/// object. Not thread-safe.
class DeviceTable {
  public:
    /// Room for so many bytes; it grows. `owner` begins the messages of errors.
    DeviceTable(std::shared_ptr<const Gpu> gpu, std::string owner, std::size_t bytes);

    /// What the launches from now on read. Throws Error while `stream` is captured (the copying would become
    /// a part of the graph), and what CUDA says.
    void replace(std::span<const std::byte> entries, Stream stream);
    /// The entries, for a launch on `stream` that comes next.
    [[nodiscard]] const std::byte* for_launch(Stream stream);

  private:
    struct Stage {
        explicit Stage(const std::shared_ptr<const Gpu>& gpu) : copied(gpu->shared_api()) {}
        std::unique_ptr<PinnedMemory> memory;
        Event copied;
    };
    [[nodiscard]] const PinnedMemory& free_stage(Stage& stage, std::size_t bytes) const;

    std::shared_ptr<const Gpu> gpu_;
    std::string owner_;
    Stage stages_[2];
    int turn_ = 0;
    // Behind the stages, to be freed before them: that waits for the device, which may still copy.
    std::vector<DeviceMemory> memories_;  ///< the last one holds the entries, those before it are of graphs
    bool captured_ = false;               ///< the last one is, too
};

/// The chunks of a list of gradients, made and brought to the device anew only when the list has changed.
template <class Chunk>
class ChunkTable {
  public:
    ChunkTable(std::shared_ptr<const Gpu> gpu, std::string owner, std::size_t chunks)
        : table_(std::move(gpu), std::move(owner), chunks * sizeof(Chunk)) {}

    /// The chunks, in device memory, for a launch on `stream` that comes next. `make` returns a vector of
    /// them. Throws what it throws, and see DeviceTable::replace; then the next call tries again.
    template <class Make>
    std::span<const Chunk> of(std::span<const Buffer> gradients, Stream stream, const Make& make) {
        if (!is_of(gradients)) remake(gradients, make(), stream);
        if (count_ == 0) return {};
        return {reinterpret_cast<const Chunk*>(table_.for_launch(stream)), count_};
    }

  private:
    bool is_of(std::span<const Buffer> gradients) const {
        return std::equal(gradients.begin(), gradients.end(), made_of_.begin(), made_of_.end(),
                          [](const Buffer& a, const Buffer& b) {
                              return a.data == b.data && a.count == b.count && a.dtype == b.dtype;
                          });
    }
    void remake(std::span<const Buffer> gradients, const std::vector<Chunk>& chunks, Stream stream) {
        // Of nothing, should the replacing fail: what the device holds then is not known.
        made_of_.clear();
        count_ = 0;
        if (!chunks.empty()) table_.replace(std::as_bytes(std::span(chunks)), stream);
        made_of_.assign(gradients.begin(), gradients.end());
        count_ = chunks.size();
    }

    DeviceTable table_;
    std::vector<Buffer> made_of_;
    std::size_t count_ = 0;
};

}  // namespace ddp::cuda
