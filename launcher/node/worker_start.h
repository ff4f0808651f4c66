#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/guard/guards.h"
#include "launcher/node/workers.h"
#include "launcher/output/output.h"
#include "launcher/output/pipes.h"

namespace ddprun {

/// Reads the log of NCCL in one worker for the network that it takes, and drops all else. NCCL_DEBUG_FILE is
/// a pipe of ours, so that no file is left and nothing reaches the worker's output.
///
/// For the loop's thread. Must outlive the worker, because a writer to a pipe without a reader dies.
class NcclWords {
  public:
    /// `found` is called once, with the name. Error: System.
    static Result<std::unique_ptr<NcclWords>> open(os::EventLoop& loop,
                                                   std::function<void(const std::string& network)> found);
    ~NcclWords();
    NcclWords(const NcclWords&) = delete;
    NcclWords& operator=(const NcclWords&) = delete;

    /// The value for NCCL_DEBUG_FILE, valid while this process lives.
    [[nodiscard]] std::string path() const;

  private:
    NcclWords(os::EventLoop& loop, UniqueFd read, UniqueFd write,
              std::function<void(const std::string&)> found);
    void on_readable();
    void take(std::string_view bytes);

    os::EventLoop& loop_;
    UniqueFd read_;
    UniqueFd write_;  ///< held open: a pipe without a writer is always at its end
    std::function<void(const std::string&)> found_;
    std::string line_;  ///< the part that has arrived
};

/// Starts workers and gives them what they need: streams, descriptors, a place for their error report, and
/// their environment. For the loop's thread.
class WorkerStarter {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        Output& output;
        Warden* warden;  ///< null: there is none
        os::Log& log;
        const AgentConfig& config;
        NodeWorkers& workers;
    };
    /// Borrows the parts for its whole life.
    explicit WorkerStarter(Parts parts);

    /// Adds a worker by its plan, in the place of another one or a new place.
    void plan(Worker& worker, WorkerPlan plan);
    /// Starts a worker. The caller listens to its lifeline.
    Result<pid_t> start(int local_rank);
    /// The worker's environment in the current generation: the plan's, completed.
    [[nodiscard]] WorkerEnv environment_of(const Worker& worker) const;
    /// A variable of the worker's environment at its start, without those that ddprun sets (RANK, ...);
    /// nullopt: not set.
    [[nodiscard]] std::optional<std::string> variable(int local_rank, std::string_view name) const;

  private:
    Status place_error_file(Worker& worker, int local_rank) const;
    Status connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status connect_stream(const StreamOwner& owner, Output::Stream stream, os::SpawnSpec& spec,
                          std::vector<UniqueFd>& childs);
    Status give_descriptors(Worker& worker, int local_rank, os::SpawnSpec& spec,
                            std::vector<UniqueFd>& childs);
    [[nodiscard]] std::vector<std::string> all_variables(const Worker& worker) const;
    void add_pmix_variables(int local_index, std::vector<std::string>& environment) const;
    void listen_to_nccl(WorkerPlan& plan);

    Parts parts_;
    NodeWorkers& workers_;
    const AgentConfig& config_;
    UniqueFd null_;
    std::unique_ptr<StdinRelay> stdin_relay_;  ///< while a worker reads our terminal
    std::unique_ptr<NcclWords> nccl_words_;    ///< NCCL's lines of the first worker; null: not read
};

}  // namespace ddprun
