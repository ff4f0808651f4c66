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
#include "launcher/job_spec.h"
#include "launcher/pmix/wish.h"
#include "rendezvous/agent_message.h"

namespace ddprun {

/// The agent as the PMIx server of its workers, so that MPI programs of several kinds run as workers:
/// libpmix, loaded at run time, serves them from a thread of its own; what has to be known of other nodes
/// goes through the controller.
///
/// An interface, because a build without libpmix's headers has nothing behind it. A generation is a namespace
/// of its own. All members are for the loop's thread and wait for nobody but libpmix's thread, which waits
/// for nobody. One per process: libpmix has no room for two.
class PmixServer {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::Log& log;
        std::string host;
        std::string id;                             ///< unlike any other ddprun's
        std::string directory;                      ///< for files of MPI; exists as long as this
        std::function<bool(rdzv::FromAgent)> send;  ///< to the controller; false: there is no connection
        std::function<void(int local_rank)>
            aborted;  ///< the worker has called MPI_Abort; it may go on running all the same
    };

    /// Loads libpmix and begins to listen on the loopback address, which takes some 15 ms. `library`: its
    /// file; "" the one that the system finds. Error: NotFound where there is none that will do, or this
    /// build has no PMIx; System in PMIx's words.
    static Result<std::unique_ptr<PmixServer>> start(const std::string& library, Parts parts);
    /// Whether there is a libpmix that will do; nothing is started. Error: NotFound, as start.
    static Status check(const std::string& library);
    virtual ~PmixServer() = default;

    /// Registers a generation's namespace and workers, behind its World. Error: Protocol, System.
    virtual Status begin(const rdzv::StartGeneration& order) = 0;
    /// "NAME=value", for a worker to find us, and for its MPI to keep its files in our directory. What begins
    /// with OMPI_MCA_ is a default that the user may have set otherwise.
    [[nodiscard]] virtual std::vector<std::string> environment(int local_rank) const = 0;
    /// Nothing that workers wait for will come: they are told so.
    virtual void end_waiting(const std::string& why) = 0;
    /// Forgets the generation: its workers have ended.
    virtual void end_generation() = 0;

    /// Before its end is reported: makes a worker that aborted, or left in the middle of MPI with exit code
    /// 0, one that failed, and says so in the report's meaning.
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
