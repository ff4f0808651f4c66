#include "ddp/nccl_ras.h"

#include <sys/socket.h>

#include <cstdlib>
#include <string_view>

namespace ddp::nccl {

using ddprun::Result;
using ddprun::TimePoint;

namespace {

constexpr std::uint16_t kRasPort = 28028;
constexpr std::size_t kLongestAnswer = 16 * 1024;

bool send_line(int socket, std::string_view line) {
    return ::send(socket, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
}

/// Reads until `done` says so, the other side ends, or the time is over.
template <class Done>
std::string read_until(int socket, TimePoint deadline, Done done) {
    std::string text;
    char buffer[4096];
    while (text.size() < kLongestAnswer && !done(text)) {
        const Result<bool> ready = ddprun::wait_readable(socket, deadline);
        if (!ready || !*ready) break;
        const ssize_t got = ::recv(socket, buffer, sizeof buffer, MSG_DONTWAIT);
        if (got <= 0) break;
        text.append(buffer, static_cast<std::size_t>(got));
    }
    return text;
}

std::string read_line(int socket, TimePoint deadline) {
    return read_until(socket, deadline, [](const std::string& text) { return text.ends_with('\n'); });
}

}  // namespace

std::optional<ddprun::Endpoint> ras_address() {
    const char* enabled = std::getenv("NCCL_RAS_ENABLE");
    if (enabled != nullptr && std::string_view(enabled) == "0") return std::nullopt;
    const char* set = std::getenv("NCCL_RAS_ADDR");
    const Result<ddprun::Endpoint> where =
        ddprun::parse_endpoint(set != nullptr ? set : "localhost", kRasPort);
    if (!where) return std::nullopt;
    return *where;
}

// The protocol of ncclras, NCCL's own client.
std::string ask_ras(const ddprun::Endpoint& where, TimePoint deadline) {
    const Result<ddprun::UniqueFd> connection = ddprun::connect_tcp(where, deadline);
    if (!connection) return "";
    const int socket = connection->get();
    if (!send_line(socket, "CLIENT PROTOCOL 2\n")) return "";
    if (!read_line(socket, deadline).starts_with("SERVER PROTOCOL ")) return "";
    // How long the RAS threads wait for each other: less than we wait for them.
    if (!send_line(socket, "TIMEOUT 2\n") || read_line(socket, deadline) != "OK\n") return "";
    if (!send_line(socket, "STATUS\n")) return "";
    std::string answer = read_until(socket, deadline, [](const std::string&) { return false; });
    if (answer.size() > kLongestAnswer) answer.resize(kLongestAnswer);
    return answer;
}

}  // namespace ddp::nccl
