#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/unique_fd.h"
#include "launcher/output/output.h"
#include "launcher/start/start_state.h"

namespace ddprun {

/// Starts ddprun on the other hosts of a job, on the event loop of the head: runs and kills the starters that
/// StartState names.
///
/// A starter's output, the lines of the workers on its hosts, is passed on line by line to the same stream.
/// Its last lines are kept until its hosts have joined, for the message when one does not. A starter lives as
/// long as its ddprun, and dies with us.
class RemoteAgents {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        /// Shows a pipe's lines until its end; calls `seen` with each piece and `ended` at the end.
        std::function<Status(UniqueFd pipe, Output::Stream stream, std::function<void(std::string_view)> seen,
                             std::function<void()> ended)>
            relay;
        /// The reason that a host's own ddprun gave why it cannot take part; "" none (yet).
        std::function<std::string(int node)> failure_of;
        /// Called once with the hosts that cannot take part, when the start is settled (start_state.h).
        std::function<void(const std::vector<StartFailure>&)> on_failure;
    };
    struct Plan {
        StartState start;                      ///< as begin_start makes it
        std::vector<std::string> environment;  ///< of the starters
        std::string path;                      ///< the PATH in which they are searched
        std::string token;        ///< written to their standard input, which then stays open; "" not written
        std::string secret_file;  ///< removed when the start is settled, and at the end; "" none
    };
    RemoteAgents(Parts parts, Plan plan);  ///< begins at once
    ~RemoteAgents();                       ///< kills the starters that still run
    RemoteAgents(const RemoteAgents&) = delete;
    RemoteAgents& operator=(const RemoteAgents&) = delete;

    void joined(int node) { feed(start_event::Joined{node}); }
    /// Keeps the exit codes of starters. Call it for each SIGCHLD, before children are reaped.
    void children_ended();
    /// The node is lost and its host sends nothing any more: finish() does not wait for it.
    void fell_silent(int node) { feed(start_event::FellSilent{node}); }
    /// Calls `done` when all starters have ended and their last lines have been read. Kills starters that
    /// have not ended after `timeout`.
    void finish(Duration timeout, std::function<void()> done);

  private:
    struct Process {
        pid_t pid = 0;
        UniqueFd input;  ///< held open: its end tells the other side that we have ended
        int pipes = 0;   ///< the number that it has not closed
        std::optional<int> exit_code;
    };
    void feed(const StartEvent& event);
    Status run(std::size_t starter);
    void ended(std::size_t starter);
    void check_at(TimePoint when);
    void ask_why(const std::vector<int>& nodes);

    Parts parts_;
    Plan plan_;
    std::vector<Process> processes_;  ///< of plan_.start.starters
    os::EventLoop::TimerId timer_ = 0;
    std::function<void()> done_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
