#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/os/event_loop.h"
#include "env/os/system.h"
#include "env/unique_fd.h"
#include "launcher/start/starter_command.h"

namespace ddprun {

/// A host that cannot take part.
struct StartFailure {
    std::string host;
    std::string why;  ///< the starter's own last words, or its ddprun's
};
/// "2 of 3 hosts cannot take part: node01, node02". Pure.
std::string render_start_failures(const std::vector<StartFailure>& failures, std::size_t hosts);

/// How far one starter has come.
enum class StarterPhase : std::uint8_t {
    Waiting,   ///< it has not begun
    Starting,  ///< it runs, and one of its hosts at least has not joined yet
    Settled,   ///< all of its hosts have joined, or it has ended
};
/// More starters than these do not start at a time: the encryption of all their connections shares the head's
/// processors.
inline constexpr std::size_t kMostStarting = 64;
/// Which starter begins next: the first that waits; nullopt while kMostStarting are starting, or none waits.
/// Pure.
std::optional<std::size_t> next_starter(std::span<const StarterPhase> starters);

/// Starts ddprun on the other hosts of a job, on the event loop of the head, each by its program and in waves
/// (next_starter), and waits until all have joined.
///
/// What a starter writes is passed on line by line, to the console that it chose: the lines of the workers
/// over there. Its last lines are kept until its hosts have joined: they are what is said when one does not.
/// A starter lives as long as its ddprun, and dies with us.
class RemoteAgents {
  public:
    enum class Console : std::uint8_t { Out, Err };
    struct Parts {
        os::EventLoop& loop;
        os::System& system;
        /// Shows a pipe's lines until its end: tells each piece to `seen`, the end to `ended`.
        std::function<Status(UniqueFd pipe, Console console, std::function<void(std::string_view)> seen, std::function<void()> ended)> relay;
        /// What a host's own ddprun has told of why it cannot take part; "" nothing (yet).
        std::function<std::string(int node)> failure_of;
        /// Some hosts cannot take part. Called once, when all others have joined or enough time has passed.
        std::function<void(const std::vector<StartFailure>&)> on_failure;
    };
    struct Plan {
        std::vector<std::string> hosts;        ///< by node rank
        NodeRange nodes;                       ///< those of them that are to be started
        std::vector<StarterCommand> commands;
        std::vector<std::string> environment;  ///< of the starters
        std::string path;                      ///< where they are looked for, as PATH
        std::string token;                     ///< written into their standard input, which then stays open; "" they get none
        std::string secret_file;               ///< removed once it is needed no more; "" none
        Duration timeout{};  ///< a host has to join within this time after the last starter has begun
    };
    /// Begins at once.
    RemoteAgents(Parts parts, Plan plan);
    /// Kills what still runs.
    ~RemoteAgents();
    RemoteAgents(const RemoteAgents&) = delete;
    RemoteAgents& operator=(const RemoteAgents&) = delete;

    void joined(int node);
    /// For each SIGCHLD, before children are reaped: keeps the exit codes of starters.
    void children_ended();
    /// The node is lost, and its host as good as dead: nothing comes from there any more, so that finish() does not wait for it.
    void fell_silent(int node);
    /// Calls `done` when all starters have ended and their last lines been read; those that have not by `patience` are killed.
    void finish(Duration patience, std::function<void()> done);

  private:
    struct Starter;
    [[nodiscard]] StarterPhase phase_of(const Starter& starter) const;
    void start_some();
    void fail(int node, std::string why);
    Status start(Starter& starter);
    void ended(Starter& starter);
    void look();
    void conclude();
    [[nodiscard]] std::string last_words_of(int node) const;
    [[nodiscard]] bool is_open(int node) const;
    void settle_end();
    void give_up(Starter& starter) const;
    void remove_secret();

    Parts parts_;
    Plan plan_;
    std::vector<std::unique_ptr<Starter>> starters_;
    enum class Node : std::uint8_t { Open, Joined, Failed };
    std::vector<Node> nodes_;
    std::vector<StartFailure> failures_;
    TimePoint deadline_{}, conclude_at_ = kNever;
    os::EventLoop::TimerId timer_ = 0;
    bool is_over_ = false;  ///< failures have been told, or all have joined
    std::function<void()> done_;
    os::EventLoop::TimerId end_timer_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
