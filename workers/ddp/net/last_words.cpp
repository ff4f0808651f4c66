#include "ddp/net/last_words.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "ddp/worker/told_failure.h"
#include "env/clock.h"

namespace ddp::net {

namespace {

constexpr std::chrono::milliseconds kPatience{200};

}  // namespace

void LastWords::expect(std::uint32_t peer) {
    const auto [ear, is_new] = ears_.try_emplace(peer);
    if (is_new)
        link_.receive(peer, tag_, std::as_writable_bytes(std::span(ear->second.words)), ear->second.heard);
}

void LastWords::say(const std::exception_ptr& failure) {
    if (std::exchange(said_, true)) return;
    told(failure).copy(own_.data(), own_.size() - 1);
    for (auto& [peer, ear] : ears_) link_.send(peer, tag_, std::as_bytes(std::span(own_)), ear.sent);
    // A peer that has sent its own notice needs none.
    const auto has_left = [](const auto& ear) { return ear.second.sent.done || ear.second.heard.done; };
    const auto until = ddprun::MonotonicClock::now() + kPatience;
    while (!std::all_of(ears_.begin(), ears_.end(), has_left) && ddprun::MonotonicClock::now() < until) {
        if (!link_.look()) link_.sleep(std::chrono::milliseconds(1));
    }
    link_.abandon();
}

std::optional<LastWords::Heard> LastWords::heard() const {
    for (const auto& [peer, ear] : ears_) {
        if (ear.heard.done && ear.heard.failure.empty()) return Heard{peer, ear.words.data()};
    }
    return std::nullopt;
}

}  // namespace ddp::net
