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

/// Tries the addresses in turn, first briefly and then for longer, and returns the first that answers and
/// proves that it knows the token: some addresses may be unreachable from here, or belong to another host.
/// Blocks. Error: Timeout naming all addresses and the last one's error; Refused or Protocol when all have
/// answered so, or when one has and no other was the server within ten seconds.
Result<Reached> reach(const std::vector<Endpoint>& candidates, const ClientOptions& options,
                      TimePoint deadline);

/// The same for the meeting point from an exchange. Asks the exchange again where its channel keeps values,
/// because an earlier job's value may still be there. `point` becomes the one that led to the server.
Result<Reached> reach(Exchange& exchange, MeetingPoint& point, ClientOptions options, TimePoint deadline);

}  // namespace ddprun::rdzv
