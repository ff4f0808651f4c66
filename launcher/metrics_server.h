#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "env/event_loop.h"
#include "env/result.h"
#include "env/socket.h"
#include "launcher/request_server.h"

namespace ddprun {

/// HTTP on the loopback interface, for a Prometheus on this host: GET /metrics and nothing else. On the event loop.
class MetricsServer {
  public:
    using Render = std::function<std::string()>;

    /// `port` 0 takes a free one. Error: System ("listen 127.0.0.1:9400: Address already in use").
    static Result<std::unique_ptr<MetricsServer>> create(os::EventLoop& loop, int port, Render render);

    [[nodiscard]] const Endpoint& bound() const { return bound_; }

  private:
    MetricsServer() = default;
    Endpoint bound_;
    std::unique_ptr<RequestServer> server_;
};

/// Length of the request's head with its empty line, 0 when it is not complete. Pure, as the next.
std::size_t http_head_length(std::string_view read);
/// The whole response to a request's head; `render` is called for GET /metrics only.
std::string http_response(std::string_view head, const MetricsServer::Render& render);

}  // namespace ddprun
