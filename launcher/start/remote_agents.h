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

/// Starts ddprun on the other hosts of a job, on the event loop of the head, and waits until all have joined:
/// runs the starters that StartState names, and kills those.
///
/// What a starter writes is passed on line by line, to the console that it chose: the lines of the workers
/// over there. Its last lines are kept until its hosts have joined: they are what is said when one does not.
/// A starter lives as long as its ddprun, and dies with us.
class RemoteAgents {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        /// Shows a pipe's lines until its end: tells each piece to `seen`, the end to `ended`.
        std::function<Status(UniqueFd pipe, Output::Stream stream, std::function<void(std::string_view)> seen,
                             std::function<void()> ended)>
            relay;
        /// What a host's own ddprun has told of why it cannot take part; "" nothing (yet).
        std::function<std::string(int node)> failure_of;
        /// Some hosts cannot take part. Called once, when all others have joined or enough time has passed.
        std::function<void(const std::vector<StartFailure>&)> on_failure;
    };
    struct Plan {
        StartState start;                      ///< as begin_start makes it
        std::vector<std::string> environment;  ///< of the starters
        std::string path;                      ///< where they are looked for, as PATH
        std::string token;  ///< written into their standard input, which then stays open; "" they get none
        std::string secret_file;  ///< removed when the start is settled, and at the end; "" none
    };
    RemoteAgents(Parts parts, Plan plan);  ///< begins at once
    ~RemoteAgents();                       ///< kills what still runs
    RemoteAgents(const RemoteAgents&) = delete;
    RemoteAgents& operator=(const RemoteAgents&) = delete;

    void joined(int node) { feed(start_event::Joined{node}); }
    /// For each SIGCHLD, before children are reaped: keeps the exit codes of starters.
    void children_ended();
    /// The node is lost, and its host as good as dead: nothing comes from there any more, so that finish()
    /// does not wait for it.
    void fell_silent(int node) { feed(start_event::FellSilent{node}); }
    /// Calls `done` when all starters have ended and their last lines been read; those that have not by
    /// `patience` are killed.
    void finish(Duration patience, std::function<void()> done);

  private:
    struct Process {
        pid_t pid = 0;
        UniqueFd input;  ///< held open: its end tells the other side that we are gone
        int pipes = 0;   ///< that it has not closed
        std::optional<int> exit_code;
    };
    void feed(const StartEvent& event);
    Status run(std::size_t starter);
    void ended(std::size_t starter);
    void look_at(TimePoint when);
    void ask_why(const std::vector<int>& nodes);

    Parts parts_;
    Plan plan_;
    std::vector<Process> processes_;  ///< of plan_.start.starters
    os::EventLoop::TimerId timer_ = 0;
    std::function<void()> done_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
