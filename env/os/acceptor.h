#pragma once

#include <memory>
#include <vector>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun::os {

/// The owner of accepted connections. Called on the loop's thread.
class AcceptorOwner {
  public:
    virtual ~AcceptorOwner() = default;
    /// A connection was accepted; its socket is non-blocking.
    virtual void on_accepted(UniqueFd fd) = 0;
    /// The time from which another connection can be accepted; until then it waits in the kernel's queue.
    [[nodiscard]] virtual TimePoint room_at() { return TimePoint::min(); }
    /// Called when this process has no descriptor or memory for one more connection. True: the owner has
    /// closed another one.
    virtual bool close_another() { return false; }
    /// accept(2) failed with this errno; it is tried again after a pause.
    virtual void on_accept_failed(int error) = 0;
};

/// Accepts connections on the event loop, from one or several listening sockets; never blocks, and never
/// spins while it cannot accept.
class Acceptor {
  public:
    /// Both are borrowed for its life.
    Acceptor(EventLoop& loop, AcceptorOwner& owner) : loop_(loop), owner_(owner) {}
    ~Acceptor();
    Acceptor(const Acceptor&) = delete;
    Acceptor& operator=(const Acceptor&) = delete;

    /// Adds a listening, non-blocking socket. Error: System (epoll); the socket is then closed.
    Status listen(UniqueFd listener);
    /// Call it when there may be room sooner than the owner's room_at().
    void room_was_made();

  private:
    enum class Outcome { Again, Done };
    void accept_some(int listener);
    Outcome accept_one(int listener);
    Outcome judge(int error, int listener);
    void pause(TimePoint until, bool waits_for_room);
    void resume();

    EventLoop& loop_;
    AcceptorOwner& owner_;
    std::vector<UniqueFd> listeners_;
    EventLoop::TimerId pause_timer_ = 0;  ///< while nothing is accepted
    bool waits_for_room_ = false;         ///< the pause is for the owner's room_at()
};

}  // namespace ddprun::os
