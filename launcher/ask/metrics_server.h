#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "launcher/ask/request_server.h"

namespace ddprun {

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
