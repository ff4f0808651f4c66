#pragma once

#include <cstdint>
#include <optional>

#include "env/os/system.h"

namespace ddprun::os {

/// A few low descriptor numbers kept from one child to the next, so that a child's table can be cut off after
/// them.
///
/// A launcher of a thousand workers holds thousands of descriptors, and a fork copies them all, for the child
/// to close them again: quadratic, and most of the cost of a large launch. So the child shares our table at
/// first (CLONE_FILES), finds its descriptors in these slots, and begins with close_range(end(), max,
/// CLOSE_RANGE_UNSHARE), which copies the table only up to there (Linux 5.9; older kernels copy all).
class SpawnSlots {
  public:
    /// Puts each descriptor whose number is above the slots on a slot and replaces it by the slot's number.
    /// False: there are more descriptors than slots, or no slot could be opened; nothing has changed.
    bool fill(std::vector<FdMapping>& mappings);
    /// Empties the slots, so that no pipe's end stays open here.
    void clear();
    /// The first number after the slots.
    [[nodiscard]] int end() const { return end_; }
    /// The signals that this process ignores and a child must not; bit n is signal n + 1. Read once, because
    /// reading all signals costs as much as a small fork.
    [[nodiscard]] std::uint64_t signals_to_reset();

  private:
    bool open();

    std::vector<UniqueFd> slots_;
    UniqueFd null_;
    std::size_t used_ = 0;
    int end_ = 0;
    std::optional<std::uint64_t> signals_to_reset_;
};

/// True when a child can start in this cgroup (a directory's descriptor) and live; tries it with a child that
/// does nothing. A kernel or container may lack or deny clone3, and Linux 6.18 kills every child that is born
/// in a cgroup that has been killed once when its parent's has not.
bool can_be_born_in(int cgroup);

/// Implements LinuxSystem::spawn. Its code runs in a child that shares this process's memory.
Result<pid_t> spawn_process(const SpawnSpec& spec, SpawnSlots& slots);

}  // namespace ddprun::os
