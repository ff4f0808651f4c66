#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/worker_env.h"

namespace ddprun {

/// What a batch system has given this job of this host, as far as its variables tell.
struct Grant {
    std::string by;           ///< "PBS", "Torque", "Slurm", "LSF"; "" there is none, or it does not say
    std::optional<int> cpus;  ///< of this host; PBS tells those of its first chunk
    int slots = 1;            ///< lines of this host in PBS' node file: chunks, or mpiprocs of one
    /// OMP_NUM_THREADS where PBS has set it itself, to the chunk's ncpus, or to the directive ompthreads.
    std::optional<int> preset_threads;
    bool operator==(const Grant&) const = default;
};

/// Pure. `node_file`: the content of PBS_NODEFILE, "" where there is none; `host`: ours, short or with its
/// domain.
Grant grant_of(const EnvironmentLookup& env, std::string_view node_file, std::string_view host);
/// The same, with the node file read.
Grant read_grant(const EnvironmentLookup& env, std::string_view host);

/// Whether a preset OMP_NUM_THREADS is the user's word (ompthreads) rather than ncpus: there are several
/// slots, and so many threads for each worker find a core.
bool means_threads_of_a_worker(const Grant& grant, int workers, int cores);

}  // namespace ddprun
