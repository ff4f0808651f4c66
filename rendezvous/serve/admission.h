#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "env/result.h"

/// Who may speak to the server, and how, before a word of it has been understood. Pure.
namespace ddprun::rdzv {

/// What is known of a connection when its first byte comes.
struct Arrival {
    std::string from;  ///< the peer's numeric address
    std::string to;    ///< this side's
    char first_byte = 0;
    bool is_sealed = false;  ///< by TLS
};

/// Error: Refused, with the remedy: TLS is for all nodes or for none. What does not leave this host may be
/// plain.
Status admits_speech(const Arrival& arrival, bool job_has_tls);

/// What decides about PyTorch's clients.
struct TorchDoor {
    bool is_open = false;          ///< their store is served here
    std::uint64_t generation = 0;  ///< the store's; 0: none has begun
    std::size_t clients = 0;       ///< that there are
    std::size_t most = 0;
    const std::set<std::string>& nodes;  ///< addresses of the job's
};

/// They prove nothing: where they come from has to do. Error: Refused, Limit.
Status admits_torch(const Arrival& arrival, const TorchDoor& door);

}  // namespace ddprun::rdzv
