#pragma once

#include <sys/types.h>

#include <string>

namespace ddprun {

/// "/proc" when its pids are those of our pid namespace, so that they can be signalled.
///
/// Otherwise a path with nothing below it: /proc may belong to another pid namespace (`unshare --pid` without
/// --mount-proc shows the outer one, whose pids name strangers here) or not be mounted. Every reader of
/// /proc/<pid> begins with it; /proc/self and files without a pid are always right.
const std::string& own_proc();

/// True where own_proc() is "/proc".
bool has_own_proc();

/// The pid under which /proc shows this process, even of another namespace; getpid() when /proc does not
/// tell.
pid_t own_number_in_proc();

/// The kernel's id of this boot: equal for all processes of a running host, also in containers. "" when /proc
/// does not tell.
std::string boot_id();

}  // namespace ddprun
