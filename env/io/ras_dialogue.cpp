#include "env/io/ras_dialogue.h"

#include <fmt/core.h>
#include <strings.h>

#include <utility>

namespace ddprun {
namespace {

constexpr std::size_t kMaxLine = 1024;
constexpr int kProtocol = 2;
constexpr int kTimeoutSeconds = 2;

bool begins_with(const std::string& line, std::string_view word) {
    return line.size() >= word.size() && ::strncasecmp(line.c_str(), word.data(), word.size()) == 0;
}

}  // namespace

std::optional<Endpoint> ras_endpoint(std::optional<std::string_view> enabled,
                                     std::optional<std::string_view> address) {
    if (enabled == "0") return std::nullopt;
    const Result<Endpoint> where = parse_endpoint(address.value_or("localhost"), kRasPort);
    return where ? std::optional(*where) : std::nullopt;
}

std::string RasDialogue::greeting() { return fmt::format("CLIENT PROTOCOL {}\n", kProtocol); }

Result<std::string> RasDialogue::take(std::string_view bytes) {
    if (stage_ == Stage::StatusAsked) {
        status_ += bytes;
        return std::string();
    }
    line_ += bytes;
    if (line_.find('\n') == std::string::npos) {
        if (line_.size() > kMaxLine) return Error{Errc::Protocol, "this is no RAS service of NCCL", 0};
        return std::string();
    }
    const std::string line = std::exchange(line_, {});
    if (stage_ == Stage::Greeted) {
        // Accept any version: all have used the same words so far.
        if (!begins_with(line, "SERVER PROTOCOL "))
            return Error{Errc::Protocol, "this is no RAS service of NCCL", 0};
        stage_ = Stage::TimeoutSaid;
        return fmt::format("TIMEOUT {}\n", kTimeoutSeconds);
    }
    // A service that does not know TIMEOUT still knows STATUS.
    stage_ = Stage::StatusAsked;
    return std::string("STATUS\n");
}

}  // namespace ddprun
