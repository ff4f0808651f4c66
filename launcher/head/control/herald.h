#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "rendezvous/client/dial.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// On a head that was the standby: tells whoever begins to listen where the lost head did, and proves that it
/// knows the job's token, that the job goes on here (rdzv::JobMoved). The lost head's ddprun may be started
/// again, and would run the job a second time. Looks again and again, for as long as this object lives. On
/// the event loop's thread; never blocks.
class Herald final : private rdzv::ConnectionOwner {
  public:
    struct Parts {
        os::EventLoop& loop;
        rdzv::DialOptions where;
        rdzv::JobMoved moved;
        Duration pause;  ///< between two looks: shorter than a head waits for nodes before it begins
        std::function<void()> told;  ///< somebody was, and nobody at the look before
    };
    explicit Herald(Parts parts);
    ~Herald() override;
    Herald(const Herald&) = delete;
    Herald& operator=(const Herald&) = delete;

  private:
    void look();
    void tell(rdzv::Dialled dialled);
    void on_frame(rdzv::Connection&, rdzv::Frame) override {}  // of one that does not know the message
    void on_closed(rdzv::Connection&, const Error&) override {}

    Parts parts_;
    std::unique_ptr<rdzv::Dial> dial_;
    std::unique_ptr<rdzv::Connection>
        connection_;  ///< to the one that was told last; closed at the next look
    os::EventLoop::TimerId timer_ = 0;
    bool has_told_ = false;  ///< at the last look
};

}  // namespace ddprun
