#include "launcher/questions/request_server.h"

#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "env/text.h"
#include "launcher/talk/control.h"

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

void RequestReply::send(std::string_view bytes) const {
    if (const auto server = server_.lock()) (*server)->queue(id_, bytes);
}

void RequestReply::finish() const {
    if (const auto server = server_.lock()) (*server)->finish(id_);
}

bool RequestReply::is_wanted() const {
    const auto server = server_.lock();
    return server && (*server)->connections_.contains(id_);
}

RequestServer::RequestServer(os::EventLoop& loop, Callbacks callbacks, RequestLimits limits)
    : loop_(loop),
      callbacks_(std::move(callbacks)),
      limits_(limits),
      acceptor_(loop, *this),
      alive_(std::make_shared<RequestServer*>(this)) {}

Result<std::unique_ptr<RequestServer>> RequestServer::create(os::EventLoop& loop, UniqueFd listener,
                                                             Callbacks callbacks, RequestLimits limits) {
    std::unique_ptr<RequestServer> server(new RequestServer(loop, std::move(callbacks), limits));
    if (const Status listens = server->acceptor_.listen(std::move(listener)); !listens)
        return listens.error();
    return server;
}

RequestServer::~RequestServer() {
    while (!connections_.empty()) drop(connections_.begin()->first);
}

void RequestServer::on_accepted(UniqueFd fd) {
    const int raw = fd.get();
    std::string refusal = callbacks_.admit ? callbacks_.admit(raw) : std::string();
    if (!make_room()) return;  // closes it: the peer may connect again
    const std::uint64_t id = next_id_++;
    connections_[id].fd = std::move(fd);
    connections_[id].last_heard = loop_.now();
    const Status watched =
        loop_.watch(raw, EPOLLIN, [this, id](std::uint32_t events) { on_event(id, events); });
    if (!watched) {
        connections_.erase(id);
        return;
    }
    restart_timer(id);
    if (refusal.empty()) return;
    connections_[id].asked = true;
    queue(id, refusal);
    finish(id);
}

/// Drops a silent connection, which must not keep others from asking. False when all connections have asked.
bool RequestServer::make_room() {
    if (connections_.size() < limits_.connections) return true;
    const auto rank = [](const auto& entry) {
        const auto& [id, connection] = entry;
        return std::tuple(connection.asked, connection.last_heard, id);
    };
    const auto silent = std::min_element(connections_.begin(), connections_.end(),
                                         [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    if (silent->second.asked) return false;
    drop(silent->first);
    return true;
}

void RequestServer::on_event(std::uint64_t id, std::uint32_t events) {
    if ((events & EPOLLIN) != 0) return read(id);
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) return drop(id);
    if ((events & EPOLLOUT) != 0) write(id);
}

void RequestServer::read(std::uint64_t id) {
    Connection& connection = connections_.at(id);
    char piece[4096];
    const ssize_t n = ::recv(connection.fd.get(), piece, sizeof piece, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return drop(id);
    connection.last_heard = loop_.now();
    connection.in.append(piece, static_cast<std::size_t>(n));
    const std::size_t length = callbacks_.complete(connection.in);
    if (length == 0) {
        if (connection.in.size() >= limits_.request_bytes) drop(id);
        return;
    }
    connection.asked = true;
    loop_.change(connection.fd.get(), 0);
    // The handler has no timeout: the peer decides how long it waits.
    loop_.cancel(std::exchange(connection.timer, 0));
    std::string request = std::move(connection.in);
    request.resize(length);
    callbacks_.handler(std::move(request), RequestReply(alive_, id));
}

void RequestServer::queue(std::uint64_t id, std::string_view bytes) {
    const auto found = connections_.find(id);
    if (found == connections_.end() || found->second.finished) return;
    found->second.out += bytes;
    if (found->second.out.size() > limits_.unsent_bytes) return drop(id);
    write(id);
}

void RequestServer::finish(std::uint64_t id) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    found->second.finished = true;
    write(id);
}

void RequestServer::write(std::uint64_t id) {
    Connection& connection = connections_.at(id);
    std::size_t sent = 0;
    while (sent < connection.out.size()) {
        const ssize_t n = ::send(connection.fd.get(), connection.out.data() + sent,
                                 connection.out.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) return drop(id);
        sent += static_cast<std::size_t>(n);
    }
    connection.out.erase(0, sent);
    if (connection.out.empty()) {
        if (connection.finished) return drop(id);
        loop_.cancel(std::exchange(connection.timer, 0));
        return loop_.change(connection.fd.get(), 0);
    }
    loop_.change(connection.fd.get(), EPOLLOUT);
    if (sent > 0 || connection.timer == 0) restart_timer(id);
}

void RequestServer::restart_timer(std::uint64_t id) {
    Connection& connection = connections_.at(id);
    loop_.cancel(connection.timer);
    connection.timer = loop_.call_after(limits_.timeout, [this, id] { drop(id); });
}

void RequestServer::drop(std::uint64_t id) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    loop_.cancel(found->second.timer);
    loop_.unwatch(found->second.fd.get());
    connections_.erase(found);
}

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
