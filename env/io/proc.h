#pragma once

#include <sys/types.h>

#include <string>

namespace ddprun {

/// The directory in which a process number names a process that this process can signal under the same
/// number: "/proc".
///
/// A path below which there is nothing when /proc belongs to another pid namespace (`unshare --pid` without
/// --mount-proc shows the outer one, whose numbers name strangers here) or is not mounted. Every reader of
/// /proc/<number> begins with it; /proc/self and files without a number are always right.
const std::string& own_proc();

/// True where own_proc() is "/proc".
bool has_own_proc();

/// The number under which /proc shows this process, whichever namespace it belongs to; getpid() when /proc
/// does not tell.
pid_t own_number_in_proc();

}  // namespace ddprun
