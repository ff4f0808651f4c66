#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "ddp/context.h"
#include "ddp/types.h"

namespace ddp {

/// The first failure of a rank of spawn. what() begins with the rank: "rank 2: <the exception's text>", "rank
/// 2 was killed by signal 9 (Killed)", "rank 2 exited with code 3".
class SpawnError : public Error {
  public:
    SpawnError(int rank, const std::string& what) : Error(what), rank_(rank) {}
    [[nodiscard]] int rank() const { return rank_; }

  private:
    int rank_;
};

struct SpawnOptions {
    /// Time that the other ranks have to end after SIGTERM, once one has failed; then they get SIGKILL. At
    /// least 0.
    std::chrono::nanoseconds grace = std::chrono::seconds(5);
};

/// Runs `fn` in `ranks` forked processes of this host, one world without a launcher, and waits for all of
/// them: the role of torch.multiprocessing.spawn.
///
///     ddp::spawn([](const ddp::Context& context) {
///         const auto group = ddp::ProcessGroup::create(context);
///         ...
///     }, 4);
///
/// The ranks get a context, which Context::from_env returns there too; this process's environment does not
/// change. A rank succeeds when `fn` returns, or when it calls exit(0); it then ends without destructors of
/// static objects and handlers of atexit, but with flushed output. Ranks die with the calling thread. Results
/// travel over files, or over pipes and shared memory made before the call.
///
/// It forks: call it before this process has threads, opens a device or makes a process group. A child has
/// the caller's memory, but no other thread.
///
/// Throws SpawnError for the first rank that throws, exits with another code, or dies of a signal: the other
/// ranks are ended first, and their calls of libddp throw PeerLostError meanwhile. InvalidInput for less than
/// 1 or more than 512 ranks, and in a process that is a rank itself, of ddprun, torchrun, mpirun or another
/// spawn, in a world of several: it has a context already. Error when the kernel refuses a process. Nothing
/// is left behind in any case.
void spawn(const std::function<void(const Context&)>& fn, int ranks, const SpawnOptions& options = {});

}  // namespace ddp
