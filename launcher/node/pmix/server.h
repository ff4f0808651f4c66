#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/node/pmix/wish.h"
#include "launcher/spec/job_spec.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// The PMIx server of the agent's workers, so that MPI programs of several kinds run as workers. libpmix,
/// loaded at run time, serves them from its own thread; requests to other nodes go through the controller.
///
/// It is an interface because builds without libpmix's headers have no implementation. Each generation is a
/// namespace. All members are for the loop's thread and wait at most for libpmix's thread, which never waits.
/// One per process: libpmix allows no second.
class PmixServer {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::Log& log;
        std::string host;
        std::string id;                               ///< unique among ddpruns
        std::string directory;                        ///< for files of MPI; exists as long as this object
        std::function<bool(rdzv::FromAgent)> send;    ///< to the controller; false: no connection
        std::function<void(int local_rank)> aborted;  ///< the worker called MPI_Abort, and may go on running
    };

    /// Loads libpmix from the file `library` ("": the system's) and listens on the loopback address; takes
    /// some 15 ms. Error: NotFound when no usable libpmix exists or this build has no PMIx; System with
    /// PMIx's message.
    static Result<std::unique_ptr<PmixServer>> start(const std::string& library, Parts parts);
    /// Checks that a usable libpmix exists, without starting it. Error: NotFound, as start.
    static Status check(const std::string& library);
    virtual ~PmixServer() = default;

    /// Registers a generation's namespace and workers, after its World has arrived. Error: Protocol, System.
    virtual Status begin(const rdzv::StartGeneration& order) = 0;
    /// "NAME=value" variables by which a worker finds us and its MPI keeps its files in our directory. Those
    /// with OMPI_MCA_ are defaults that the user may override.
    [[nodiscard]] virtual std::vector<std::string> environment(int local_rank) const = 0;
    /// Fails all calls in which workers wait.
    virtual void end_waiting(const std::string& why) = 0;
    /// Forgets the generation: its workers have ended.
    virtual void end_generation() = 0;

    /// Call it before a worker's end is reported: marks a worker that called MPI_Abort, or exited with 0
    /// without MPI_Finalize, as failed, with the reason in the report's meaning.
    virtual void explain(rdzv::WorkerExited& report) = 0;

    virtual void handle(const rdzv::World& world) = 0;
    virtual void handle(const rdzv::FenceOver& over) = 0;
    virtual void handle(const rdzv::ModexRequest& request) = 0;
    virtual void handle(const rdzv::ModexReply& reply) = 0;
};

/// The workers' PMIx server; null where none is wished for, or where there is none, which the log is told.
/// Error: there is none, and the user insists on it (--pmix on).
Result<std::unique_ptr<PmixServer>> serve_pmix(const PmixWish& wish, PmixUse use, PmixServer::Parts parts);

/// MPI behind a script or in Python is seen only where it is loaded: looks into the memory of a `worker` (0:
/// it has ended) three times, 1 s, 5 s and 30 s after the look before, and warns once if it finds one that
/// lacks a PMIx server.
void look_for_mpi(os::EventLoop& loop, os::Log& log, std::function<pid_t()> worker, std::size_t nth = 0);

}  // namespace ddprun
