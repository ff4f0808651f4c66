#pragma once

#include <memory>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/nodes/exchange.h"
#include "env/nodes/meeting_point.h"
#include "env/result.h"
#include "rendezvous/client/store_client.h"

namespace ddprun::rdzv {

/// A server that answered and proved that it knows the token.
struct Reached {
    Endpoint endpoint;
    std::unique_ptr<StoreClient> client;
};

/// Asks one address after the other, each for a moment, then for longer: the first that answers and knows the
/// token. Hosts may have addresses that others cannot reach, or that somebody else has here. Blocks. Error:
/// Timeout naming them all and what the last one said; Refused or Protocol when all have answered so, or one
/// has and no other was the server within ten seconds.
Result<Reached> reach(const std::vector<Endpoint>& candidates, const ClientOptions& options,
                      TimePoint deadline);

/// The same for what an exchange told, which is asked again where the channel keeps what was put: what an
/// earlier job left leads nowhere, until it is replaced. `point` becomes what led to the server.
Result<Reached> reach(Exchange& exchange, MeetingPoint& point, ClientOptions options, TimePoint deadline);

}  // namespace ddprun::rdzv
