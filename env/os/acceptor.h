#pragma once

#include <memory>
#include <vector>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun::os {

/// Whoever serves those that connect. Called on the loop's thread.
class AcceptorOwner {
  public:
    virtual ~AcceptorOwner() = default;
    /// One has come; its socket does not block.
    virtual void on_accepted(UniqueFd fd) = 0;
    /// From when on another one can be taken; long ago: now. Until then they wait in the kernel's queue.
    [[nodiscard]] virtual TimePoint room_at() { return TimePoint::min(); }
    /// This process has no descriptor, or no memory, for one more. True: now it has, for another connection
    /// was closed.
    virtual bool close_another() { return false; }
    /// accept(2) failed with this errno, and is tried again after a pause.
    virtual void on_accept_failed(int error) = 0;
};

/// Accepts connections on the event loop, from one or several listening sockets; never blocks, and does not
/// spin where nothing can be accepted.
class Acceptor {
  public:
    /// Both are borrowed for its life.
    Acceptor(EventLoop& loop, AcceptorOwner& owner) : loop_(loop), owner_(owner) {}
    ~Acceptor();
    Acceptor(const Acceptor&) = delete;
    Acceptor& operator=(const Acceptor&) = delete;

    /// Accepts from this one too; it listens and does not block. Error: System (epoll); then it is closed.
    Status listen(UniqueFd listener);
    /// There may be room sooner than the owner said.
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
    bool waits_for_room_ = false;         ///< then: for the owner's, that is
};

}  // namespace ddprun::os
