#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/io/socket.h"
#include "env/result.h"

namespace ddprun {

/// NCCL's RAS service (2.24 and newer): every process of an NCCL job listens at NCCL_RAS_ADDR,
/// localhost:28028 unless set, and tells of the whole job what NCCL knows: processes that do not answer,
/// communicators whose ranks differ in what they have called. Plain lines of text, as NCCL's own client
/// ncclras speaks them.
inline constexpr std::uint16_t kRasPort = 28028;

/// Where NCCL listens, by its variables NCCL_RAS_ENABLE and NCCL_RAS_ADDR; nullopt when it does not, or the
/// address makes no sense. Pure.
std::optional<Endpoint> ras_endpoint(std::optional<std::string_view> enabled,
                                     std::optional<std::string_view> address);

/// The words exchanged. Pure.
class RasDialogue {
  public:
    /// What is said first.
    static std::string greeting();
    /// Takes what has arrived; returns what to say to it, "" nothing. Error: Protocol (this is no RAS
    /// service).
    Result<std::string> take(std::string_view bytes);
    /// The status, as far as it has arrived.
    [[nodiscard]] const std::string& status() const { return status_; }

  private:
    enum class Stage { Greeted, TimeoutSaid, StatusAsked } stage_ = Stage::Greeted;
    std::string line_, status_;
};

}  // namespace ddprun
