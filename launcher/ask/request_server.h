#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "env/os/acceptor.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// What strangers can make grow here.
struct RequestLimits {
    std::size_t connections = 32;
    std::size_t request_bytes = 16 * 1024;
    std::size_t unsent_bytes = 16 * 1024 * 1024;   ///< of a peer that does not read
    Duration patience = std::chrono::seconds(10);  ///< for the whole request, and for each pause of a reader
};

class RequestServer;

/// Where the answer to one request goes, now or later; small, copied freely, for the loop's thread. A peer
/// that has gone, and a server that is gone, make every call do nothing.
class RequestReply {
  public:
    /// Queues bytes; never waits.
    void send(std::string_view bytes) const;
    /// Nothing more follows: the connection is closed once all has been sent.
    void finish() const;
    [[nodiscard]] bool is_wanted() const;

  private:
    friend class RequestServer;
    RequestReply(std::weak_ptr<RequestServer*> server, std::uint64_t id)
        : server_(std::move(server)), id_(id) {}
    std::weak_ptr<RequestServer*> server_;
    std::uint64_t id_;
};

/// One request per connection on a listening stream socket: reads until the request is complete, hands it
/// over, sends what comes back, closes. Lives on the event loop, never blocks, wakes up for nobody but its
/// peers. A peer that breaks a limit is dropped. When there are too many, the one that has been silent for
/// longest goes; whoever has asked stays.
class RequestServer final : private os::AcceptorOwner {
  public:
    /// Length of the request at the beginning of what has been read; 0: not complete yet.
    using Complete = std::function<std::size_t(std::string_view read)>;
    /// Who may ask; "" lets a new connection in, anything else is sent to it before it is closed.
    using Admit = std::function<std::string(int fd)>;
    using Handler = std::function<void(std::string request, RequestReply reply)>;

    struct Callbacks {
        Complete complete;
        Admit admit;
        Handler handler;
    };

    /// Takes a listening, non-blocking socket. Error: System (epoll).
    static Result<std::unique_ptr<RequestServer>> create(os::EventLoop& loop, UniqueFd listener,
                                                         Callbacks callbacks, RequestLimits limits = {});
    ~RequestServer() override;
    RequestServer(const RequestServer&) = delete;
    RequestServer& operator=(const RequestServer&) = delete;

    [[nodiscard]] std::size_t connections() const { return connections_.size(); }

  private:
    friend class RequestReply;
    struct Connection {
        UniqueFd fd;
        std::string in;
        std::string out;
        bool asked = false;
        bool finished = false;
        TimePoint last_heard{};
        os::EventLoop::TimerId timer = 0;
    };

    RequestServer(os::EventLoop& loop, Callbacks callbacks, RequestLimits limits);
    void on_accepted(UniqueFd fd) override;
    void on_accept_failed(int) override {}  // who asks sees that nobody answers
    bool make_room();
    void on_event(std::uint64_t id, std::uint32_t events);
    void read(std::uint64_t id);
    void write(std::uint64_t id);
    void queue(std::uint64_t id, std::string_view bytes);
    void finish(std::uint64_t id);
    void restart_timer(std::uint64_t id);
    void drop(std::uint64_t id);

    os::EventLoop& loop_;
    Callbacks callbacks_;
    RequestLimits limits_;
    std::unordered_map<std::uint64_t, Connection> connections_;
    std::uint64_t next_id_ = 1;
    os::Acceptor acceptor_;
    std::shared_ptr<RequestServer*> alive_;
};

}  // namespace ddprun
