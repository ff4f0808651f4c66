#include "rendezvous/wire/session.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ddprun::rdzv {

Outage outage_of(const Error& why) {
    if (why.code != Errc::Closed) return Outage::Final;
    const bool is_broken = why.sys == 0 || why.sys == ECONNRESET || why.sys == EPIPE;
    return is_broken ? Outage::Broken : Outage::Unreachable;
}

Duration wait_for_redial(Outage outage, const Heartbeats& limits) {
    switch (outage) {
        case Outage::Broken: return limits.timeout / 200;
        case Outage::Unreachable: return limits.timeout;
        case Outage::Final: break;
    }
    return Duration::zero();
}

// ---- outbox

void Outbox::clear() { *this = Outbox(); }

void Outbox::push(EncodedMessage message) {
    Item item{std::move(message), 0, keeps_};
    is_resuming_ ? hold(std::move(item)) : add(std::move(item));
}

void Outbox::hold(Item item) {
    item.written = 0;
    kept_bytes_ += item.size();
    kept_.push_back(std::move(item));
    ++held_;
}

void Outbox::add(Item item) {
    unwritten_bytes_ += item.size();
    waiting_.push_back(std::move(item));
}

std::size_t Outbox::fill(std::span<iovec> parts) const {
    std::size_t count = 0;
    for (const Item& item : waiting_) {
        std::size_t written = item.written;
        for (const std::string_view bytes : {std::string_view(item.message.head), item.message.blob.view()}) {
            const std::size_t skipped = std::min(written, bytes.size());
            written -= skipped;
            if (skipped == bytes.size()) continue;
            if (count == parts.size()) return count;
            parts[count++] = {const_cast<char*>(bytes.data()) + skipped, bytes.size() - skipped};
        }
    }
    return count;
}

void Outbox::consume(std::size_t bytes) {
    unwritten_bytes_ -= bytes;
    while (!waiting_.empty()) {
        Item& item = waiting_.front();
        const std::size_t taken = std::min(bytes, item.size() - item.written);
        item.written += taken;
        bytes -= taken;
        if (item.is_counted) kept_bytes_ += taken;
        if (item.written < item.size()) return;
        if (item.is_counted) kept_.push_back(std::move(item));
        waiting_.pop_front();
    }
}

Status Outbox::acknowledge(std::uint64_t received) {
    const std::uint64_t written = acknowledged_ + kept_.size() - held_;
    if (received < acknowledged_ || received > written) {
        return Error{Errc::Protocol,
                     fmt::format("it has received {} messages of {} to {}", received, acknowledged_, written),
                     0};
    }
    for (; acknowledged_ < received; ++acknowledged_) {
        kept_bytes_ -= kept_.front().size();
        kept_.pop_front();
    }
    if (!std::exchange(is_resuming_, false)) return {};
    kept_bytes_ = held_ = 0;
    for (Item& item : std::exchange(kept_, {})) {
        item.written = 0;
        add(std::move(item));
    }
    return {};
}

void Outbox::resume(Outbox&& earlier) {
    keeps_ = is_resuming_ = true;
    acknowledged_ = earlier.acknowledged_;
    kept_ = std::move(earlier.kept_);
    held_ = earlier.held_;
    for (const Item& item : kept_) kept_bytes_ += item.size();
    for (Item& item : earlier.waiting_) {
        if (item.is_counted) hold(std::move(item));
    }
    earlier.clear();
}

// ---- inbox

void Inbox::take(std::size_t bytes) {
    ++received_;
    unacknowledged_bytes_ += bytes;
}

bool Inbox::is_due() const {
    constexpr std::uint64_t kMessages = 256;
    constexpr std::size_t kBytes = 1U << 20;
    return received_ - acknowledged_ >= kMessages || unacknowledged_bytes_ >= kBytes;
}

Heartbeat Inbox::acknowledgement() {
    acknowledged_ = received_;
    unacknowledged_bytes_ = 0;
    return {received_};
}

// ---- silence

SilenceWatch::Verdict SilenceWatch::look(TimePoint now, TimePoint heard) {
    const TimePoint lost_at = deadline_after(heard, limits_.timeout);
    if (lost_at > now) return wait_until(std::min(lost_at, now + limits_.interval), false);
    if (!is_second_) {
        const bool were_away = now - due_ > limits_.interval;
        return wait_until(were_away ? now + limits_.timeout / 3 : now, true);
    }
    Verdict verdict = wait_until(now, false);  // another peer may be due as well
    verdict.are_lost = true;
    return verdict;
}

SilenceWatch::Verdict SilenceWatch::wait_until(TimePoint next, bool is_second) {
    due_ = next;
    is_second_ = is_second;
    return {false, next};
}

}  // namespace ddprun::rdzv
