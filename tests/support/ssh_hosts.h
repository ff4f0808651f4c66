#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/hosts.h"

namespace ddprun::test {

/// An sshd on port 22 of every host. `ssh node01 true` then works from any of them, as it does for a user of
/// a cluster: the key, and a configuration that accepts host keys unseen, lie in the common home directory.
class SshHosts {
  public:
    /// The reason why this machine cannot have them; nothing if it can.
    static std::optional<std::string> why_not();

    explicit SshHosts(Hosts& hosts);

    /// The log of a host's sshd, with a line for each connection and refusal. Ends that sshd.
    std::string log(int host);

  private:
    std::vector<std::unique_ptr<Program>> daemons_;
};

}  // namespace ddprun::test
