#pragma once

#include "env/system.h"

namespace ddprun::os {

/// LinuxSystem::spawn. A file of its own: its code runs in a child that shares this process's memory.
Result<pid_t> spawn_process(const SpawnSpec& spec);

}  // namespace ddprun::os
