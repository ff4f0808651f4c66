#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// The launchers that can have started this process with a rank, innermost first: Open MPI and Hydra start
/// their daemons with srun or PBS, not the other way round.
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
    Pbs,       ///< gives no ranks; listed so that it is not mistaken for a launcher that does
};
/// The name in DDPRUN_LAUNCHER and our messages: "openmpi".
std::string_view name_of(LauncherFamily family);

/// A launcher's facts about this process. Facts that it does not tell are empty, never guessed.
struct Placement {
    LauncherFamily family = LauncherFamily::Torchrun;
    std::optional<int> rank, size, local_rank, local_size, node_rank, nodes;
    std::string job;  ///< the same for all its processes, different for jobs at the same time; "" not known
    bool operator==(const Placement&) const = default;
};

struct LauncherChoice {
    std::optional<Placement> placement;  ///< nullopt: no launcher gave this process a rank
    std::string rank_variable;           ///< the rank's variable: "PMI_RANK"
    bool has_pmix = false;               ///< PMIX_NAMESPACE is set: a PMIx server may fill in what is missing
    /// One line: "launcher=openmpi rank 3/8 local 1/4; ignored: slurm (batch script)".
    std::string explanation;
};

/// Chooses the launcher whose variables count: of all that are present, without those that give no rank (an
/// sbatch script, a PBS job), the innermost; other variables of the same launcher fill its gaps.
/// DDPRUN_LAUNCHER=<family> or none overrides, except under ddprun itself. Error: Mismatch, with both sides,
/// when variables of one launcher contradict each other, or a RANK set by hand contradicts the launcher;
/// InvalidArgument naming a malformed variable of the chosen launcher.
Result<LauncherChoice> choose_launcher(const EnvironmentLookup& lookup);

/// The known facts as "rank 3/8 local 1/4 node 0/2".
std::string describe(const Placement& placement);

/// The placement as the variables of the contract, for the environment that worker_env_from reads. Error:
/// NotFound, naming the missing fact (size, local rank, local size) and the remedy.
Result<EnvironmentList> to_contract(const Placement& placement);

/// True for a variable by which an MPI launcher, srun or flux gives a process its rank or its channel. Users'
/// variables (OMPI_MCA_btl, SLURM_JOB_ID, PMIX_MCA_...) are none of them. Pure.
bool is_rank_variable(std::string_view variable);

/// The place of a ddprun that an outer launcher started: a node, or a rank.
struct NodePlace {
    int node_rank = 0;
    int nodes = 1;
    bool is_rank = false;  ///< it runs one process, with the launcher's local rank and sizes
    bool operator==(const NodePlace&) const = default;
};
/// The command line's choice. Auto: a rank when the launcher started several ddpruns on this node.
enum class TaskRole : std::uint8_t { Auto, Node, Rank };

/// The place of a ddprun that is one of several tasks; nullopt: it is the only task. Error: Mismatch when
/// each of several on one node would start a whole node's workers; NotFound when Rank needs a launcher and
/// there is none.
Result<std::optional<NodePlace>> node_place(const LauncherChoice& choice, TaskRole role);

}  // namespace ddprun
