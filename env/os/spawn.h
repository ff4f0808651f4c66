#pragma once

#include <cstdint>
#include <optional>

#include "env/os/system.h"

namespace ddprun::os {

/// What spawning keeps from one child to the next: above all a few low descriptor numbers, so that a child's
/// table can be cut off right behind them.
///
/// A launcher of a thousand workers holds thousands of descriptors, and a fork copies them all, for the child
/// to close them again: quadratic, and most of the cost of a large launch. So the child shares our table at
/// first (CLONE_FILES), what it needs stands in these slots, and its first act is close_range(behind the
/// slots, max, CLOSE_RANGE_UNSHARE), which copies the table only up to there (Linux 5.9; older ones copy
/// all).
class SpawnSlots {
  public:
    /// Puts each descriptor on a slot and tells the slots' numbers in its place. False: there are more
    /// descriptors than slots, or none could be opened; nothing has changed.
    bool fill(std::vector<FdMapping>& mappings);
    /// Empties them again: a pipe's end must not stay open here.
    void clear();
    /// The first number behind the slots.
    [[nodiscard]] int end() const { return end_; }
    /// Those this process ignored when it was first asked, which a child must not inherit; bit n is signal n
    /// + 1. Kept: asking for all signals costs as much as a small fork.
    [[nodiscard]] std::uint64_t ignored_signals();

  private:
    bool open();

    std::vector<UniqueFd> slots_;
    UniqueFd null_;
    std::size_t used_ = 0;
    int end_ = 0;
    std::optional<std::uint64_t> ignored_signals_;
};

/// Whether a child can be born in this cgroup (a directory's descriptor) and live: tries it with one that
/// does nothing. A kernel or a container may lack or deny clone3; and Linux 6.18 was seen to kill every child
/// that is born in a cgroup that has been killed once when its parent's has not been.
bool can_be_born_in(int cgroup);

/// LinuxSystem::spawn. A file of its own: its code runs in a child that shares this process's memory.
Result<pid_t> spawn_process(const SpawnSpec& spec, SpawnSlots& slots);

}  // namespace ddprun::os
