#include "rendezvous/client/store_relay.h"

#include <utility>

namespace ddprun::rdzv {

Result<std::unique_ptr<StoreRelay>> StoreRelay::serve(Parts parts, UniqueFd listener, Credentials credentials,
                                                      ServerLimits limits) {
    std::unique_ptr<StoreRelay> relay(new StoreRelay(std::move(parts)));
    Result<std::unique_ptr<StorePeers>> clients =
        StorePeers::serve(relay->parts_.loop, std::move(listener), std::move(credentials), limits, *relay);
    if (!clients) return clients.error();
    relay->clients_ = *std::move(clients);
    return relay;
}

/// The link with a session; null when there is none.
AgentLink* StoreRelay::session() const {
    AgentLink* const link = parts_.link();
    return link != nullptr && link->is_connected() ? link : nullptr;
}

void StoreRelay::on_store_request(ClientId client, std::uint32_t number, StoreRequest request) {
    if (session() == nullptr)
        return clients_->answer(client, number, Failure{Errc::Closed, "this node has no controller"});
    perform(state_.ask(client, number, std::move(request), parts_.loop.now()));
}

void StoreRelay::on_store_peer_gone(ClientId client) {
    if (AgentLink* const link = session()) link->tell_gone({client});
    perform(state_.leave(client, parts_.loop.now()));
}

void StoreRelay::on_store_reply(std::uint32_t number, const StoreReply& reply) {
    perform(state_.answer(number, reply, parts_.loop.now()));
}

void StoreRelay::on_acknowledged() {
    const AgentLink* const link = session();
    if (link != nullptr && link->kept_bytes() < kRelayWindow) clients_->resume();
}

void StoreRelay::on_lost(const std::string& why) {
    perform(state_.lose({Errc::Closed, why}));
    clients_->resume();
}

void StoreRelay::perform(RelayState::Actions actions) {
    AgentLink* const link = session();
    for (RelayState::Forward& one : actions.forward) {
        const Status asked = link == nullptr ? Status() : link->ask_store(std::move(one.request), one.number);
        if (!asked) perform(state_.answer(one.number, failure_of(asked.error()), parts_.loop.now()));
    }
    for (RelayState::Told& one : actions.told)
        clients_->answer(one.client, one.request, std::move(one.reply));
    if (link != nullptr && link->kept_bytes() >= kRelayWindow) clients_->pause();
    expiry_.arm(state_.next_deadline());
}

}  // namespace ddprun::rdzv
