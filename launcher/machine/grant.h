#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/worker_env.h"

namespace ddprun {

/// This host's share that the batch system gave the job, as far as its variables tell.
struct Grant {
    std::string by;           ///< "PBS", "Torque", "Slurm", "LSF"; "" no batch system, or not known
    std::optional<int> cpus;  ///< CPUs of this host; under PBS those of the first chunk
    int slots = 1;            ///< lines of this host in PBS' node file: chunks, or mpiprocs of one
    /// OMP_NUM_THREADS when PBS has set it, to the chunk's ncpus or to the directive ompthreads.
    std::optional<int> preset_threads;
    bool operator==(const Grant&) const = default;
};

/// `node_file` is the content of PBS_NODEFILE ("" without one), `host` our name, short or with its domain.
/// Pure.
Grant grant_of(const EnvironmentLookup& env, std::string_view node_file, std::string_view host);
/// Reads the node file and calls grant_of().
Grant read_grant(const EnvironmentLookup& env, std::string_view host);

/// True when a preset OMP_NUM_THREADS is the user's ompthreads rather than ncpus: the host has several slots,
/// and enough cores for that many threads of each worker.
bool preset_is_per_worker(const Grant& grant, int workers, int cores);

}  // namespace ddprun
