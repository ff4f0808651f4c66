#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ddp/recovery.h"
#include "env/kept.h"
#include "env/unique_fd.h"

namespace ddp {

/// An object or a value whose state recovery keeps.
struct KeptItem {
    std::string name;
    Recovery::Kind kind = Recovery::Kind::Committed;
    std::vector<Tensor> tensors;  ///< none where the state is a text
    std::function<std::string()> read = {};
    std::function<void(const std::string&)> write = {};
    Stateful* object = nullptr;  ///< told when its tensors were filled
};

/// The declared state. A copy of the items of one kind is their tensors' bytes, and texts with their lengths.
class KeptState {
  public:
    using Kind = Recovery::Kind;

    /// Throws InvalidInput for a name that is empty or used.
    void add(KeptItem item);
    [[nodiscard]] bool has(Kind kind) const { return !names(kind).empty(); }
    /// "'rng', 'losses'"; "" for none.
    [[nodiscard]] std::string names(Kind kind) const;
    /// Names, kinds, types and shapes: one line for each tensor or text.
    [[nodiscard]] std::string layout() const;

    /// Replaces `copy` by a copy of the items of this kind.
    void copy(Kind kind, std::string& copy) const;
    /// Restores the items of this kind from their copy.
    void restore(Kind kind, std::string_view copy) const;

    /// Remembers hashes of the items of this kind.
    void note(Kind kind);
    /// The first tensor or text of this kind that has changed since: "'model', w"; "" for none, or before a
    /// note.
    [[nodiscard]] std::string changed(Kind kind) const;

    // The Committed and Moving items, for another rank, in two parts:
    /// The tensors that a group on this device can send. Throws InvalidInput for those of another CUDA
    /// device.
    [[nodiscard]] std::vector<Tensor> tensors(const Device& device) const;
    /// The texts, and the tensors in host memory under a group of another device.
    [[nodiscard]] std::string texts(const Device& device) const;
    void set_texts(const Device& device, std::string_view texts) const;
    /// Tells the objects of the Committed and Moving items that their tensors were filled.
    void announce_loaded() const;

  private:
    std::vector<KeptItem> items_;
    std::array<std::vector<std::uint64_t>, 3> noted_;  ///< by kind
};

/// This rank's line and slots in the memory that outlives it (env/kept.h).
class KeptMemory {
  public:
    /// Without a descriptor (-1): memory of this process. Throws InvalidInput for a descriptor that is no
    /// kept memory of this release.
    KeptMemory(int fd, std::uint32_t local_rank);
    ~KeptMemory();
    KeptMemory(const KeptMemory&) = delete;
    KeptMemory& operator=(const KeptMemory&) = delete;

    [[nodiscard]] ddprun::KeptLine& line() const { return *line_; }
    /// The time within which the launcher recovers.
    [[nodiscard]] std::chrono::nanoseconds limit() const { return limit_; }

    /// Forgets commits and copies: a run begins.
    void reset();
    /// Keeps the copy that belongs to `commits`. Throws Error when it is too long for a slot.
    void store(std::uint64_t commits, std::string_view copy);
    /// There is no copy: the memory is that of another node than before.
    [[nodiscard]] bool is_empty() const;
    [[nodiscard]] bool has_copy(std::uint64_t commits) const;
    [[nodiscard]] std::string_view copy_for(std::uint64_t commits) const;

  private:
    std::byte* slot(std::uint64_t commits) const {
        return slots_ + commits % ddprun::kKeptSlots * slot_bytes_;
    }
    std::byte* map(int fd, std::uint64_t offset, std::size_t bytes);

    struct Mapping {
        void* address;
        std::size_t bytes;
    };
    std::vector<Mapping> mappings_;
    ddprun::KeptLine* line_ = nullptr;
    std::byte* slots_ = nullptr;
    std::size_t slot_bytes_ = 0;
    std::chrono::nanoseconds limit_{};
};

}  // namespace ddp
