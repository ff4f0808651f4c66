#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "rendezvous/client/dial.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// On a head that was the standby: dials the lost head's endpoint. A process that listens there and proves
/// that it knows the job's token is told that the job goes on here (rdzv::JobMoved); else a restarted ddprun
/// of the lost head would run the job a second time. Dials again and again for as long as this object lives,
/// on the event loop's thread; never blocks.
class Herald final : private rdzv::ConnectionOwner {
  public:
    struct Parts {
        os::EventLoop& loop;
        rdzv::DialOptions where;
        rdzv::JobMoved moved;
        Duration pause;              ///< between two dials; shorter than a head's last call for nodes
        std::function<void()> told;  ///< called when a process was told and none was at the dial before
    };
    explicit Herald(Parts parts);
    ~Herald() override;
    Herald(const Herald&) = delete;
    Herald& operator=(const Herald&) = delete;

  private:
    void look();
    void tell(rdzv::Dialled dialled);
    void on_frame(rdzv::Connection&, rdzv::Frame) override {}  // the peer does not know JobMoved
    void on_closed(rdzv::Connection&, const Error&) override {}

    Parts parts_;
    std::unique_ptr<rdzv::Dial> dial_;
    std::unique_ptr<rdzv::Connection> connection_;  ///< to the process told last; closed at the next dial
    os::EventLoop::TimerId timer_ = 0;
    bool has_told_ = false;  ///< at the last dial
};

}  // namespace ddprun
