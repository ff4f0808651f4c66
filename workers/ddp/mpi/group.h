#pragma once

#include <memory>

#include "ddp/context.h"
#include "ddp/process_group.h"

namespace ddp::mpi {

/// A process group over the MPI of the mpiexec that started this process, on host memory, of one host or
/// many. Calls run in order, in the calling thread or in one of the group's own
/// (ProcessGroupOptions::progress): MPI moves data only inside calls, so only the latter overlaps with the
/// program's computing. Auto chooses it when there is a core for it and MPI, which the program may have
/// started, accepts calls from any thread.
///
/// MPI decides the order of a sum; 16-bit elements are reduced as float32 and rounded once. mpiexec detects a
/// rank's death and ends the job, unless a launcher's abort word reports it first. An error or a time-out
/// leaves the group unusable, and MPI is then not finalized at the end of the process.
///
/// Collective. Throws InvalidInput when there is no module (mpi/load.h), when MPI gives another rank than
/// `context`, or refuses a requested thread; Error with MPI's reason.
std::unique_ptr<ProcessGroup> make_group(const Context& context, const ProcessGroupOptions& options);

}  // namespace ddp::mpi
