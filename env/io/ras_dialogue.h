#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/io/socket.h"
#include "env/result.h"

namespace ddprun {

/// The protocol of NCCL's RAS service (2.24 and newer). Every process of an NCCL job listens at
/// NCCL_RAS_ADDR, localhost:28028 by default, and reports NCCL's view of the whole job: processes that do not
/// answer, communicators whose ranks called different collectives. It has plain lines of text, as in NCCL's
/// client ncclras.
inline constexpr std::uint16_t kRasPort = 28028;

/// NCCL's endpoint by its variables NCCL_RAS_ENABLE and NCCL_RAS_ADDR; nullopt when it is off or the address
/// is malformed. Pure.
std::optional<Endpoint> ras_endpoint(std::optional<std::string_view> enabled,
                                     std::optional<std::string_view> address);

/// The client's side of the protocol. Pure.
class RasDialogue {
  public:
    /// The client's first line.
    static std::string greeting();
    /// Takes received bytes; returns the bytes to send, "" none. Error: Protocol (this is no RAS service).
    Result<std::string> take(std::string_view bytes);
    /// The status, as far as it has arrived.
    [[nodiscard]] const std::string& status() const { return status_; }

  private:
    enum class Stage { Greeted, TimeoutSaid, StatusAsked } stage_ = Stage::Greeted;
    std::string line_, status_;
};

}  // namespace ddprun
