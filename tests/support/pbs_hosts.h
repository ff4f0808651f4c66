#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "tests/support/hosts.h"

namespace ddprun::test {

/// A fake PBS over hosts, as jobs and users see it (tests/support/fake_pbs): qsub, qstat, qdel, qrerun,
/// pbsdsh, pbs_tmrsh. They are on the PATH of job scripts; for the test itself they are in bin(), and work
/// from any directory that hosts see.
class PbsHosts {
  public:
    /// The reason why this machine cannot have it; nothing if it can.
    static std::optional<std::string> why_not();

    struct Settings {
        int cpus = 64, gpus = 4;                                          ///< of each host
        std::chrono::milliseconds kill_delay = std::chrono::seconds(10);  ///< from SIGTERM to SIGKILL
        std::chrono::milliseconds poll =
            std::chrono::milliseconds(200);  ///< how often a MoM looks at the walltime
    };
    /// Throws std::runtime_error.
    explicit PbsHosts(const Hosts& hosts) : PbsHosts(hosts, Settings{}) {}
    PbsHosts(const Hosts& hosts, const Settings& settings);
    ~PbsHosts();
    PbsHosts(const PbsHosts&) = delete;
    PbsHosts& operator=(const PbsHosts&) = delete;

    [[nodiscard]] std::string bin() const { return state_ + "/bin"; }
    /// Options for the test's own commands: a directory to submit from, and a PATH with bin().
    [[nodiscard]] RunOptions options() const;

  private:
    const std::string home_, state_;
    std::unique_ptr<Program> server_;
};

}  // namespace ddprun::test
