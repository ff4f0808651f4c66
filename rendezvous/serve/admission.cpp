#include "rendezvous/serve/admission.h"

#include <fmt/core.h>

#include "env/io/socket.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

// ---- who may connect

namespace {

bool is_of_this_host(const Arrival& arrival) {
    return stays_on_host(arrival.from) || arrival.from == arrival.to;
}

Error tls_differs(std::string_view how) {
    return {Errc::Refused, fmt::format("{}: give --tls to every node, or to none", how), 0};
}

}  // namespace

Status admits_speech(const Arrival& arrival, bool job_has_tls) {
    if (!job_has_tls && arrival.first_byte == kTlsFirstByte) {
        return tls_differs("this connection is TLS, and the job was started without --tls");
    }
    const bool may_be_plain = !job_has_tls || is_of_this_host(arrival);
    if (!arrival.is_sealed && !may_be_plain)
        return tls_differs("this connection is plain, and the job was started with --tls");
    return {};
}

Status admits_torch(const Arrival& arrival, const TorchDoor& door) {
    if (!door.is_open) return Error{Errc::Refused, "its store is not served here", 0};
    if (door.generation == 0) return Error{Errc::Refused, "no generation has begun", 0};
    if (door.clients >= door.most)
        return Error{Errc::Limit, fmt::format("there are {} of them", door.clients), 0};
    const bool is_of_job = is_of_this_host(arrival) || door.nodes.contains(arrival.from);
    return is_of_job ? Status() : Error{Errc::Refused, "it comes from no node of the job", 0};
}

// ---- which of them gives way

void Strangers::arrived(ClientId id, TimePoint now) {
    last_heard_.emplace(id, now);
    by_last_heard_.emplace(now, id);
}

void Strangers::spoke(ClientId id, TimePoint now) {
    const auto known = last_heard_.find(id);
    if (known == last_heard_.end()) return;
    by_last_heard_.erase({known->second, id});
    known->second = now;
    by_last_heard_.emplace(now, id);
}

void Strangers::refused(ClientId id) {
    if (left(id)) refused_.insert(id);
}

bool Strangers::left(ClientId id) {
    const auto known = last_heard_.find(id);
    if (known == last_heard_.end()) return refused_.erase(id) > 0;
    by_last_heard_.erase({known->second, id});
    last_heard_.erase(known);
    return true;
}

TimePoint Strangers::room_at() const {
    if (!is_crowded() || !refused_.empty()) return TimePoint::min();
    return by_last_heard_.begin()->first + kHandshakeSilence;
}

std::optional<ClientId> Strangers::next_to_go() const {
    if (!refused_.empty()) return *refused_.begin();
    if (!by_last_heard_.empty()) return by_last_heard_.begin()->second;
    return std::nullopt;
}

}  // namespace ddprun::rdzv
