#include "rendezvous/client/reach.h"

#include <fmt/core.h>
#include <poll.h>

#include <algorithm>
#include <optional>

#include "env/nodes/exchange.h"
#include "env/text.h"

namespace ddprun::rdzv {
namespace {

constexpr Duration kFirstTry = std::chrono::milliseconds(500);
constexpr Duration kLongestTry = std::chrono::seconds(8);
/// The time for other addresses to answer after one has refused us (a foreign server, or a wrong secret).
constexpr Duration kAfterRefusal = std::chrono::seconds(10);
/// The time after which a kept meeting point is read again.
constexpr Duration kBelief = std::chrono::seconds(3);

/// True when another try would fail the same way.
bool is_final(const Error& error) { return error.code == Errc::Refused || error.code == Errc::Protocol; }

}  // namespace

Result<Reached> reach(const std::vector<Endpoint>& candidates, const ClientOptions& options,
                      TimePoint deadline) {
    Error last{Errc::NotFound, "no address is known", 0};
    std::optional<Error> refusal;
    for (Duration patience = kFirstTry; !candidates.empty(); patience = std::min(2 * patience, kLongestTry)) {
        bool may_get_better = false;
        for (const Endpoint& candidate : candidates) {
            const bool was_tried = last.code != Errc::NotFound;
            if (was_tried && MonotonicClock::now() >= deadline) break;
            const TimePoint until = std::min(deadline, deadline_after(MonotonicClock::now(), patience));
            Result<std::unique_ptr<StoreClient>> client = StoreClient::connect(candidate, options, until);
            if (client) return Reached{candidate, *std::move(client)};
            last = client.error();
            may_get_better = may_get_better || !is_final(last);
            if (!is_final(last) || refusal) continue;
            refusal = last;
            deadline = std::min(deadline, deadline_after(MonotonicClock::now(), kAfterRefusal));
        }
        if (!may_get_better || MonotonicClock::now() >= deadline) break;
    }
    const std::string tried = join(candidates, ", ", [](const Endpoint& one) { return to_string(one); });
    if (refusal) return refusal->with("none of " + tried + " is the server");
    return Error{Errc::Timeout, fmt::format("none of {} answers: {}", tried, last.what), 0};
}

Result<Reached> reach(Exchange& exchange, MeetingPoint& point, ClientOptions options, TimePoint deadline) {
    for (;;) {
        const TimePoint begin = MonotonicClock::now();
        const TimePoint until =
            exchange.keeps_what_was_put() ? std::min(deadline, deadline_after(begin, kBelief)) : deadline;
        options.job_id = point.job;
        options.token = point.token;
        Result<Reached> reached = reach(point.endpoints(), options, until);
        if (reached || !exchange.keeps_what_was_put() || MonotonicClock::now() >= deadline) return reached;
        // A refusal comes at once; what replaces it may take a while.
        const TimePoint again = std::min(deadline, deadline_after(begin, std::chrono::milliseconds(200)));
        ::poll(nullptr, 0, poll_milliseconds(MonotonicClock::now(), again));
        Result<MeetingPoint> newer = ask_meeting_point(exchange);
        if (!newer) return newer.error();
        point = *std::move(newer);
    }
}

}  // namespace ddprun::rdzv
