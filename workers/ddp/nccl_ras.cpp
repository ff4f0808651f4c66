#include "ddp/nccl_ras.h"

#include <sys/socket.h>

#include <cstdlib>
#include <string_view>

#include "env/ras_dialogue.h"

namespace ddp::nccl {

using ddprun::Result;
using ddprun::TimePoint;

namespace {

constexpr std::size_t kLongestAnswer = 16 * 1024;

std::optional<std::string_view> variable(const char* name) {
    const char* const set = std::getenv(name);
    return set != nullptr ? std::optional<std::string_view>(set) : std::nullopt;
}

bool send_line(int socket, std::string_view line) {
    return ::send(socket, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
}

}  // namespace

std::optional<ddprun::Endpoint> ras_address() {
    return ddprun::ras_endpoint(variable("NCCL_RAS_ENABLE"), variable("NCCL_RAS_ADDR"));
}

std::string ask_ras(const ddprun::Endpoint& where, TimePoint deadline) {
    const Result<ddprun::UniqueFd> connection = ddprun::connect_tcp(where, deadline);
    if (!connection) return "";
    const int socket = connection->get();
    ddprun::RasDialogue dialogue;
    if (!send_line(socket, ddprun::RasDialogue::greeting())) return "";
    while (dialogue.status().size() < kLongestAnswer) {
        const Result<bool> ready = ddprun::wait_readable(socket, deadline);
        if (!ready || !*ready) break;
        char piece[4096];
        const ssize_t got = ::recv(socket, piece, sizeof piece, MSG_DONTWAIT);
        if (got <= 0) break;
        const Result<std::string> words = dialogue.take({piece, static_cast<std::size_t>(got)});
        if (!words || (!words->empty() && !send_line(socket, *words))) return "";
    }
    return dialogue.status().substr(0, kLongestAnswer);
}

}  // namespace ddp::nccl
