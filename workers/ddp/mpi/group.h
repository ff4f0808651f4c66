#pragma once

#include <memory>

#include "ddp/context.h"
#include "ddp/process_group.h"

namespace ddp::mpi {

/// A process group over the MPI that mpiexec gave this process, on host memory, of one host or many. Calls
/// are carried out in order, in the calling thread or in one of the group's own
/// (ProcessGroupOptions::progress): MPI moves nothing while nobody calls it, so only the latter overlaps with
/// what the program computes. Auto takes it where there is a core for it and the MPI, which the program may
/// have started, takes calls from any thread.
///
/// What a sum's order is, is MPI's to say; 16-bit elements are reduced as float32 and rounded once. A rank's
/// death is mpiexec's to notice, which ends the job, unless a launcher's abort word tells of it first; an
/// error or a time-out leaves the group unusable, and MPI is then not waited for at the end of the process.
///
/// Throws InvalidInput where there is no module (mpi/load.h), where MPI gives another rank than `context`
/// says, or does not take a thread that was asked for; Error with MPI's reason. Collective.
std::unique_ptr<ProcessGroup> make_group(const Context& context, const ProcessGroupOptions& options);

}  // namespace ddp::mpi
