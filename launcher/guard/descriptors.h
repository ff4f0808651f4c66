#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "env/result.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// Every worker needs a few descriptors here; the soft limit is often 1024. Workers get the old limit back.
struct DescriptorLimit {
    std::uint64_t before = 0;  ///< 0: not known
    std::uint64_t now = std::numeric_limits<std::uint64_t>::max();
};
DescriptorLimit raise_descriptor_limit();

/// Descriptors that ddprun holds for its workers while they run. Pure.
int descriptors_for_workers(const OutputSpec& output, int workers);

/// Whether they fit. `open_now` are open already, `limit` is the hard limit (RLIMIT_NOFILE). Pure.
/// Error: InvalidArgument telling how many are needed, the limit and the remedy.
Status check_descriptor_limit(const OutputSpec& output, int workers, int open_now, std::uint64_t limit);

/// The numbers under which a worker finds what it inherits besides its standard streams.
struct InheritedNumbers {
    int segment = 0;
    int lifeline = 0;
    int store = 0;
};
/// High, out of the way of a shell's redirections, and below the worker's own limit (0: none is known): a
/// number at or above it cannot be had. Pure.
InheritedNumbers inherited_numbers(std::uint64_t worker_limit);

/// The descriptors that this process has open, in no order. Reads /proc/self/fd; none when that cannot be
/// read.
std::vector<int> open_descriptors();

/// Buffer of each of a worker's two pipes on a node with that many workers: 1 MiB for few of them, less for
/// many, never under 16 KiB. A power of two, as pipes have.
///
/// An unprivileged user has 64 MiB of pipe buffers by default (/proc/sys/fs/pipe-user-pages-soft); whoever is
/// above it gets new pipes of two pages. Half of it is left to everything else the user runs.
std::size_t pipe_bytes(int workers);

}  // namespace ddprun
