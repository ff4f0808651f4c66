#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "env/result.h"

/// Which connections the server accepts, decided by the address and the first byte. Pure.
namespace ddprun::rdzv {

/// What is known of a connection when its first byte comes.
struct Arrival {
    std::string from;  ///< the peer's numeric address
    std::string to;    ///< this side's numeric address
    char first_byte = 0;
    bool is_sealed = false;  ///< the connection is encrypted by TLS
};

/// Checks that the connection uses TLS exactly when the job does; a connection within this host may always be
/// plain. Error: Refused, with the remedy.
Status admits_speech(const Arrival& arrival, bool job_has_tls);

/// The state of the server that decides whether a client of PyTorch's TCPStore is accepted.
struct TorchDoor {
    bool is_open = false;          ///< the server serves PyTorch's TCPStore
    std::uint64_t generation = 0;  ///< the store's generation; 0: none has begun
    std::size_t clients = 0;       ///< clients connected now
    std::size_t most = 0;
    const std::set<std::string>& nodes;  ///< addresses of the job's nodes
};

/// Checks the peer's address, because these clients cannot prove that they know the token. Error: Refused,
/// Limit.
Status admits_torch(const Arrival& arrival, const TorchDoor& door);

}  // namespace ddprun::rdzv
