#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// Who can have started this process and told it its rank, innermost first: Open MPI and Hydra start their
/// own daemons with srun or PBS, not the other way round.
enum class LauncherFamily : std::uint8_t {
    Torchrun,  ///< ddprun or torchrun: the contract of env/worker_env.h
    OpenMpi,
    Jsm,   ///< LSF jsrun
    Pals,  ///< Cray mpiexec
    Mvapich,
    Pmi,  ///< MPICH's Hydra, Intel MPI, Cray MPICH, srun --mpi=pmi2
    Flux,
    Pmix,      ///< only PMIX_RANK: sizes come from the PMIx server
    Slurm,     ///< a step of srun
    SkyPilot,  ///< runs the command on each of its machines: a rank is a node
    Pbs,       ///< gives no ranks; listed so that it is not mistaken for something that does
};
/// As DDPRUN_LAUNCHER and our lines spell it: "openmpi".
std::string_view name_of(LauncherFamily family);

/// What a launcher says about this process. What it does not say is empty, never guessed.
struct Placement {
    LauncherFamily family = LauncherFamily::Torchrun;
    std::optional<int> rank, size, local_rank, local_size, node_rank, nodes;
    std::string job;  ///< the same for all its processes, different for two jobs at a time; "" not told
    bool operator==(const Placement&) const = default;
};

struct LauncherChoice {
    std::optional<Placement> placement;  ///< none: nobody gave this process a rank
    std::string rank_variable;           ///< where the rank was read: "PMI_RANK"
    bool has_pmix = false;               ///< PMIX_NAMESPACE is set: a PMIx server may fill in what is missing
    /// One line: "launcher=openmpi rank 3/8 local 1/4; ignored: slurm (batch script)".
    std::string explanation;
};

/// Which launcher's word counts. Looks at all that are present, leaves out what is no evidence of a rank (an
/// sbatch script, a PBS job), and takes the innermost; its gaps are filled from variables that the same
/// launcher sets under another name. DDPRUN_LAUNCHER=<family> or none overrides, except under ddprun itself.
/// Error: Mismatch, with both sides, where variables of one launcher contradict each other or where RANK was
/// set by hand and contradicts the launcher; InvalidArgument naming a malformed variable of the launcher that
/// counts.
Result<LauncherChoice> choose_launcher(const EnvironmentLookup& lookup);

/// "rank 3/8 local 1/4 node 0/2", as far as it is known.
std::string describe(const Placement& placement);

/// The placement as the variables of the contract, to be laid over the environment that worker_env_from
/// reads. Error: NotFound, naming what the launcher did not say (size, local rank, local size) and the
/// remedy.
Result<EnvironmentList> to_contract(const Placement& placement);

/// Pure: one of the variables by which an MPI launcher, srun or flux tells one of its processes who it is and
/// how to speak to it. What a user sets (OMPI_MCA_btl, SLURM_JOB_ID, PMIX_MCA_...) is none of them.
bool tells_a_rank(std::string_view variable);

/// What a ddprun that an outer launcher started stands for.
struct NodePlace {
    int node_rank = 0;
    int nodes = 1;
    bool is_rank = false;  ///< for one process: its local rank and sizes are the launcher's
    bool operator==(const NodePlace&) const = default;
};
/// What the command line says of it. Auto: a process where the launcher put several on this node.
enum class TaskRole : std::uint8_t { Auto, Node, Rank };

/// For a ddprun that is one of several tasks: what it stands for. nullopt: it is the only task.
/// Error: Mismatch when each of several on one node would start a whole node's workers; NotFound where there
/// has to be a launcher (Rank) and there is none.
Result<std::optional<NodePlace>> node_place(const LauncherChoice& choice, TaskRole role);

}  // namespace ddprun
