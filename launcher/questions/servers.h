#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "launcher/questions/request_server.h"
#include "launcher/talk/control_message.h"

namespace ddprun {

/// Answers a request with lines of JSON (control_text, control_error, or any other) and finish(), at once or
/// later (it may keep the reply). Must not block.
using ControlHandler = std::function<void(const ControlRequest& request, const RequestReply& reply)>;

/// Answers questions to a running ddprun (talk/control_socket.h), one per connection, to the job's user and
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
