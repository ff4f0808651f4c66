#include "rendezvous/serve/store_service.h"

#include <algorithm>
#include <utility>

namespace ddprun::rdzv {

Status StoreService::serve(UniqueFd listener, const Credentials& credentials, ServerLimits limits) {
    Result<std::unique_ptr<StorePeers>> peers =
        StorePeers::serve(parts_.loop, std::move(listener), credentials, limits, *this);
    if (!peers) return peers.error();
    peers_ = *std::move(peers);
    return {};
}

void StoreService::on_store_request(ClientId client, std::uint32_t number, StoreRequest request) {
    ask({kOwn, client}, number, std::move(request));
}

void StoreService::ask(StoreClientId client, std::uint32_t number, StoreRequest request) {
    deliver(store_.apply(client, number, std::move(request), parts_.loop.now()));
    expiry_.arm(store_.next_deadline());
}

StoreReply StoreService::ask_own(StoreOp op) {
    StoreRequest request{store_.generation(), Duration::zero(), std::move(op)};
    StoreAnswers answers = store_.apply(kOwn, 0, std::move(request), parts_.loop.now());
    for (StoreAnswer& late : store_.expire(parts_.loop.now())) answers.push_back(std::move(late));
    StoreReply own = Failure{Errc::Timeout, "the store did not answer"};
    const auto mine = std::find_if(answers.begin(), answers.end(),
                                   [](const StoreAnswer& a) { return a.client == StoreClientId(kOwn); });
    if (mine != answers.end()) own = mine->reply;
    deliver(std::move(answers));
    return own;
}

void StoreService::deliver(StoreAnswers answers) {
    for (StoreAnswer& answer : answers) {
        if (answer.client.connection != kOwn) parts_.answer(std::move(answer));
        else if (peers_) peers_->answer(answer.client.number, answer.request, std::move(answer.reply));
    }
}

void StoreService::expire() {
    deliver(store_.expire(parts_.loop.now()));
    expiry_.arm(store_.next_deadline());
}

}  // namespace ddprun::rdzv
