#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The soft limit on descriptors, often 1024, before and after raise_descriptor_limit(): every worker needs a
/// few here. Workers get the old limit back.
struct DescriptorLimit {
    std::uint64_t before = 0;  ///< 0: not known
    std::uint64_t now = std::numeric_limits<std::uint64_t>::max();
};
DescriptorLimit raise_descriptor_limit();

/// The number of descriptors that ddprun holds for its workers while they run. Pure.
int descriptors_for_workers(const OutputSpec& output, int workers);

/// Checks that they fit: `open_now` are open already, `limit` is the hard limit (RLIMIT_NOFILE). Pure.
/// Error: InvalidArgument with the number needed, the limit and the remedy.
Status check_descriptor_limit(const OutputSpec& output, int workers, int open_now, std::uint64_t limit);

/// The numbers of the descriptors that a worker inherits besides its standard streams.
struct InheritedNumbers {
    int segment = 0;
    int lifeline = 0;
    int store = 0;
    int kept = 0;
};
/// High numbers, out of the way of a shell's redirections, and below the worker's own limit (0: not known).
/// Pure.
InheritedNumbers inherited_numbers(std::uint64_t worker_limit);

/// This process's open descriptors, in no order, from /proc/self/fd; empty when that cannot be read.
std::vector<int> open_descriptors();

/// The buffer of each of a worker's two pipes on a node with that many workers: 1 MiB for few workers, less
/// for many, never under 16 KiB. A power of two, as pipes have.
///
/// An unprivileged user has 64 MiB of pipe buffers by default (/proc/sys/fs/pipe-user-pages-soft); above
/// that, new pipes have two pages. We use half of it.
std::size_t pipe_bytes(int workers);

}  // namespace ddprun
