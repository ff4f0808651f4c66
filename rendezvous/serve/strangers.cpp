#include "rendezvous/serve/strangers.h"

namespace ddprun::rdzv {

void Strangers::arrived(ClientId id, TimePoint now) {
    last_words_.emplace(id, now);
    by_last_word_.emplace(now, id);
}

void Strangers::spoke(ClientId id, TimePoint now) {
    const auto known = last_words_.find(id);
    if (known == last_words_.end()) return;
    by_last_word_.erase({known->second, id});
    known->second = now;
    by_last_word_.emplace(now, id);
}

void Strangers::refused(ClientId id) {
    if (left(id)) refused_.insert(id);
}

bool Strangers::left(ClientId id) {
    const auto known = last_words_.find(id);
    if (known == last_words_.end()) return refused_.erase(id) > 0;
    by_last_word_.erase({known->second, id});
    last_words_.erase(known);
    return true;
}

TimePoint Strangers::room_at() const {
    if (!is_crowded() || !refused_.empty()) return TimePoint::min();
    return by_last_word_.begin()->first + kPatience;
}

std::optional<ClientId> Strangers::next_to_go() const {
    if (!refused_.empty()) return *refused_.begin();
    if (!by_last_word_.empty()) return by_last_word_.begin()->second;
    return std::nullopt;
}

}  // namespace ddprun::rdzv
