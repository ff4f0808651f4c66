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
#include "launcher/talk/control.h"

namespace ddprun {

/// Limits on what strangers can make grow.
struct RequestLimits {
    std::size_t connections = 32;
    std::size_t request_bytes = 16 * 1024;
    std::size_t unsent_bytes = 16 * 1024 * 1024;  ///< to a peer that does not read
    Duration timeout = std::chrono::seconds(10);  ///< of the whole request, and of each pause of a reader
};

class RequestServer;

/// The way for the answer to one request, now or later; small, copied freely, for the loop's thread. After
/// the end of its peer or of the server every call does nothing.
class RequestReply {
  public:
    /// Queues bytes; never waits.
    void send(std::string_view bytes) const;
    /// Ends the answer: the connection is closed once all has been sent.
    void finish() const;
    [[nodiscard]] bool is_wanted() const;

  private:
    friend class RequestServer;
    RequestReply(std::weak_ptr<RequestServer*> server, std::uint64_t id)
        : server_(std::move(server)), id_(id) {}
    std::weak_ptr<RequestServer*> server_;
    std::uint64_t id_;
};

/// Serves one request per connection on a listening stream socket: reads until the request is complete, hands
/// it to the handler, sends the answer, closes. Runs on the event loop, never blocks, and wakes up for its
/// peers only. Drops a peer that breaks a limit. When there are too many, drops the peer that has been silent
/// longest, but none that has asked.
class RequestServer final : private os::AcceptorOwner {
  public:
    /// Length of the request at the beginning of `read`; 0: not complete yet.
    using Complete = std::function<std::size_t(std::string_view read)>;
    /// Returns "" to admit a new connection, or the text to send before it is closed.
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
    void on_accept_failed(int) override {}  // the peer gets no answer
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

/// Answers a request with lines of JSON (control_text, control_error, or any other) and finish(), at once or
/// later (it may keep the reply). Must not block.
using ControlHandler = std::function<void(const ControlRequest& request, const RequestReply& reply)>;

/// Answers questions to a running ddprun (talk/control.h), one per connection, to the job's user and
/// to root only. Error: System.
Result<std::unique_ptr<RequestServer>> serve_questions(os::EventLoop& loop, const std::string& job,
                                                       ControlHandler handler);

using RenderMetrics = std::function<std::string()>;

/// Serves HTTP to a Prometheus on this host: GET /metrics only. Takes a listening, non-blocking socket.
/// Error: System (epoll).
Result<std::unique_ptr<RequestServer>> serve_metrics(os::EventLoop& loop, UniqueFd listener,
                                                     RenderMetrics render);

/// Length of the request's head with its empty line; 0 when it is not complete. Pure.
std::size_t http_head_length(std::string_view read);
/// The whole response to a request's head; `render` is called for GET /metrics only. Pure.
std::string http_response(std::string_view head, const RenderMetrics& render);

}  // namespace ddprun
