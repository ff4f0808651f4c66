#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/node/workers.h"

namespace ddprun {

/// Talks with the workers of a node over their lifelines (env/lifeline.h). What they say of recovery in place
/// becomes events of the agent; steps and heartbeats go into their lines of the segment. For the loop's
/// thread.
class Lifelines {
  public:
    using Feed = std::function<void(const AgentEvent&)>;

    /// Borrows all for its whole life.
    Lifelines(os::EventLoop& loop, os::Log& log, NodeWorkers& workers, Feed feed)
        : loop_(loop), log_(log), workers_(workers), feed_(std::move(feed)) {}
    ~Lifelines() { close_all(); }
    Lifelines(const Lifelines&) = delete;
    Lifelines& operator=(const Lifelines&) = delete;

    void listen(int local_rank);
    /// Reads what this worker has said.
    void read(int local_rank);
    /// Sends a packet to a worker; one that does not read its lifeline misses it.
    void tell(int local_rank, std::string_view packet) const;
    /// Sends the next generation, with its segment, to a worker that goes on.
    void send_generation(int local_rank, const WorkerEnv& env) const;
    void close(Worker& worker);
    void close_all();
    /// Returns the stacks that this worker's libddp has sent since the last call.
    [[nodiscard]] std::string take_stacks(int local_rank);

  private:
    void hear(int local_rank, char letter, std::string_view text);
    bool hear_of_recovery(int local_rank, char letter, std::string_view text);
    bool hear_ready(int local_rank, std::string_view text);
    void hear_let_go(int local_rank, std::string_view text);

    os::EventLoop& loop_;
    os::Log& log_;
    NodeWorkers& workers_;
    Feed feed_;
};

}  // namespace ddprun
