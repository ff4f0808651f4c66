#include "launcher/head/herald.h"

#include <algorithm>
#include <utility>

#include "rendezvous/client/redial_state.h"

namespace ddprun {
namespace {

/// The least pause after a refusal: another job's head has this endpoint now and logs each of our dials.
constexpr Duration kPauseBehindRefusal = std::chrono::minutes(1);

}  // namespace

Herald::Herald(Parts parts) : parts_(std::move(parts)) { look(); }

Herald::~Herald() { parts_.loop.cancel(timer_); }

void Herald::look() {
    connection_.reset();
    dial_ = std::make_unique<rdzv::Dial>(parts_.loop, parts_.where, [this](Result<rdzv::Dialled> outcome) {
        const bool is_refused = !outcome && !rdzv::is_worth_coming_again(outcome.error());
        const bool is_there = outcome.has_value();
        if (is_there) tell(*std::move(outcome));
        if (is_there && !has_told_) parts_.told();
        has_told_ = is_there;
        timer_ = parts_.loop.call_after(
            is_refused ? std::max(parts_.pause, kPauseBehindRefusal) : parts_.pause, [this] { look(); });
    });
}

void Herald::tell(rdzv::Dialled dialled) {
    connection_ = std::move(dialled.connection);
    connection_->hand_to(*this);
    connection_->send(encode_message(parts_.moved));
}

}  // namespace ddprun
