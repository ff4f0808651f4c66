#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "env/io/proc.h"

namespace ddprun::os {

/// Every living descendant of `root` (no zombies), children before their parents. Reads `proc` without
/// stopping processes, so one that is just being forked can be missed: to get all, call it until the list is
/// empty. Empty when `proc` is not that of our pid namespace.
std::vector<pid_t> descendants_of(pid_t root, const std::string& proc = own_proc());

/// The pid of every process and zombie in `proc`, in no order.
std::vector<pid_t> process_numbers(const std::string& proc = own_proc());

/// The two ways of descendants_of. The kernel's lists of children cost one read per thread of the tree but
/// need CONFIG_PROC_CHILDREN (nullopt without); the other way reads the parent of every process on the
/// machine.
std::optional<std::vector<pid_t>> descendants_from_children_lists(pid_t root, const std::string& proc);
std::vector<pid_t> descendants_from_parents(pid_t root, const std::string& proc);

}  // namespace ddprun::os
