#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "env/io/proc.h"

namespace ddprun::os {

/// Every living descendant of `root`, children before their parents; zombies are not living. Reads `proc`
/// without stopping anybody: a process that is just being born can be missed, so who must get them all asks
/// again until the list is empty. Empty when `proc` is not that of our pid namespace.
std::vector<pid_t> descendants_of(pid_t root, const std::string& proc = own_proc());

/// The number of every process and zombie in `proc`, in no order.
std::vector<pid_t> process_numbers(const std::string& proc = own_proc());

/// The two ways it is done. The kernel's lists of children cost one read per thread of the tree but need
/// CONFIG_PROC_CHILDREN (nullopt without); the other reads the parent of every process on the machine.
std::optional<std::vector<pid_t>> descendants_from_children_lists(pid_t root, const std::string& proc);
std::vector<pid_t> descendants_from_parents(pid_t root, const std::string& proc);

}  // namespace ddprun::os
