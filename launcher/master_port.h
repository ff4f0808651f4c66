#pragma once

#include <string>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Keeps a TCP port free for a worker's own server (PyTorch's rank 0 listens on MASTER_PORT).
///
/// The socket is bound and never listens: the kernel gives the port to nobody else, while a server that sets
/// SO_REUSEADDR, as they all do, can still bind it. There is no moment between probing and using.
class MasterPort {
  public:
    /// A port the kernel picks, new for every call; the one before is released. Error: System.
    Result<int> reserve();
    /// Checks that nobody listens on a port the user chose.
    /// Error: System ("--master-port: 29500: Address already in use").
    static Status check(int port);

  private:
    UniqueFd held_;
};

}  // namespace ddprun
