#pragma once

#include <cstddef>

namespace ddprun {

/// Buffer of each of a worker's two pipes on a node with that many workers: 1 MiB for few of them, less for many,
/// never under 16 KiB. A power of two, as pipes have.
///
/// An unprivileged user has 64 MiB of pipe buffers by default (/proc/sys/fs/pipe-user-pages-soft); whoever is above
/// it gets new pipes of two pages. Half of it is left to everything else the user runs.
std::size_t pipe_bytes(int workers);

}  // namespace ddprun
