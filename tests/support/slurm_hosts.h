#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/hosts.h"

namespace ddprun::test {

/// A Slurm over all hosts: munged and slurmd on each, slurmctld on the first. sbatch, srun, squeue, scancel
/// and scontrol work on any of them as for a user of a cluster. There are neither cgroups nor accounting, and
/// Slurm believes that each host has four CPUs.
class SlurmHosts {
  public:
    /// The reason why this machine cannot have it; nothing if it can.
    static std::optional<std::string> why_not();

    /// Returns when all nodes are idle. `more`: further lines of slurm.conf. Throws std::runtime_error.
    explicit SlurmHosts(const Hosts& hosts, const std::string& more = "");
    ~SlurmHosts();
    SlurmHosts(const SlurmHosts&) = delete;
    SlurmHosts& operator=(const SlurmHosts&) = delete;

    /// Runs a command of Slurm's on the first host.
    [[nodiscard]] Outcome run(const std::vector<std::string>& command, const std::string& input = "") const;
    /// Submits a script that runs in the home directory, with its output in the file `out` there. Returns the
    /// job's id.
    [[nodiscard]] std::string submit(const std::string& script,
                                     const std::vector<std::string>& options = {}) const;
    /// Waits until a job has one of these states ("COMPLETED", "CANCELLED") and returns it; else returns the
    /// last state.
    [[nodiscard]] std::string await_state(const std::string& id,
                                          const std::vector<std::string>& states) const;
    /// Waits until a file in the home directory contains this text.
    [[nodiscard]] bool await_text(const std::string& file, const std::string& text) const;

  private:
    void start(int host, const std::vector<std::string>& daemon);
    const Hosts& hosts_;
    const std::string directory_;
    std::vector<std::unique_ptr<Program>> daemons_;
};

}  // namespace ddprun::test
