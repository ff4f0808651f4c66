#include "rendezvous/server/store_service.h"

#include <algorithm>
#include <utility>

namespace ddprun::rdzv {
namespace {

/// The controller's own, and that of this host's workers: no connection of the server has this number.
constexpr ClientId kOwn = 0;

}  // namespace

StoreService::~StoreService() { parts_.loop.cancel(expiry_timer_); }

Status StoreService::serve_local(UniqueFd listener, const Credentials& credentials, ServerLimits limits) {
    Result<std::unique_ptr<LocalClients>> local =
        LocalClients::serve(parts_.loop, std::move(listener), credentials, limits, *this);
    if (!local) return local.error();
    local_ = *std::move(local);
    return {};
}

void StoreService::on_local_request(std::uint64_t client, std::uint32_t number, StoreRequest request) {
    ask({kOwn, client}, number, std::move(request));
}

void StoreService::on_local_gone(std::uint64_t client) { store_.disconnect({kOwn, client}); }

void StoreService::ask(StoreClientId client, std::uint32_t number, StoreRequest request) {
    deliver(store_.apply(client, number, std::move(request), parts_.loop.now()));
    arm_expiry();
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
        else if (local_) local_->answer(answer.client.number, answer.request, std::move(answer.reply));
    }
}

/// Keeps a timer for the earliest waiter. A timer that is too early costs one wake-up; moving it at every
/// request would cost more.
void StoreService::arm_expiry() {
    const TimePoint next = store_.next_deadline();
    if (next >= expiry_at_) return;
    parts_.loop.cancel(expiry_timer_);
    expiry_at_ = next;
    expiry_timer_ = parts_.loop.call_at(next, [this] {
        expiry_at_ = kNever;
        deliver(store_.expire(parts_.loop.now()));
        arm_expiry();
    });
}

}  // namespace ddprun::rdzv
