#include "launcher/questions/servers.h"

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/talk/control_socket.h"

namespace ddprun {
namespace {

/// `status` may be followed by lines of the head.
std::string response(std::string_view status, std::string_view type, std::string_view body, bool with_body) {
    return fmt::format("HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
                       status, type, body.size(), with_body ? body : std::string_view());
}

std::string plain(std::string_view status) {
    return response(status, "text/plain", fmt::format("{}\n", status.substr(0, status.find('\r'))), true);
}

std::size_t length_of_line(std::string_view read) { return read.find('\n') + 1; }  // npos + 1 is 0

}  // namespace

Result<std::unique_ptr<RequestServer>> serve_questions(os::EventLoop& loop, const std::string& job,
                                                       ControlHandler handler) {
    Result<UniqueFd> listener = listen_for_questions(job);
    if (!listener) return listener.error();
    const auto answer = [handler = std::move(handler)](const std::string& line, const RequestReply& reply) {
        const Result<ControlRequest> request = decode_control_request(line);
        if (request) return handler(*request, reply);
        reply.send(control_error(request.error().what));
        reply.finish();
    };
    return RequestServer::create(loop, std::move(*listener), {length_of_line, refuse_other_users, answer});
}

std::size_t http_head_length(std::string_view read) {
    const std::size_t end = read.find("\r\n\r\n");
    return end == std::string_view::npos ? 0 : end + 4;
}

std::string http_response(std::string_view head, const RenderMetrics& render) {
    const std::vector<std::string_view> words = split(head.substr(0, head.find("\r\n")), ' ');
    if (words.size() != 3 || !words[2].starts_with("HTTP/1.")) return plain("400 Bad Request");
    if (words[0] != "GET" && words[0] != "HEAD") return plain("405 Method Not Allowed\r\nAllow: GET, HEAD");
    if (words[1].substr(0, words[1].find('?')) != "/metrics") return plain("404 Not Found");
    return response("200 OK", "text/plain; version=0.0.4; charset=utf-8", render(), words[0] == "GET");
}

Result<std::unique_ptr<RequestServer>> serve_metrics(os::EventLoop& loop, UniqueFd listener,
                                                     RenderMetrics render) {
    const auto answer = [render = std::move(render)](const std::string& head, const RequestReply& reply) {
        reply.send(http_response(head, render));
        reply.finish();
    };
    return RequestServer::create(loop, std::move(listener), {http_head_length, {}, answer});
}

}  // namespace ddprun
