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
    const std::uint64_t written = acknowledged_ + kept_.size();
    if (received < acknowledged_ || received > written) {
        return Error{Errc::Protocol,
                     fmt::format("it has received {} messages of {} to {}", received, acknowledged_, written),
                     0};
    }
    for (; acknowledged_ < received; ++acknowledged_) {
        kept_bytes_ -= kept_.front().size();
        kept_.pop_front();
    }
    return {};
}

void Outbox::go_on(Outbox&& earlier) {
    for (std::deque<Item>* part : {&earlier.kept_, &earlier.waiting_}) {
        for (Item& item : *part) {
            item.written = 0;
            if (item.is_counted) add(std::move(item));
        }
    }
    acknowledged_ = earlier.acknowledged_;
    keeps_ = true;
    earlier.clear();
}

// ---- inbox

bool Inbox::take(std::size_t bytes) {
    if (passed_over_ > 0) {
        --passed_over_;
        return false;
    }
    ++received_;
    untold_bytes_ += bytes;
    return true;
}

Status Inbox::go_on(std::uint64_t begins) {
    if (begins > received_)
        return Error{Errc::Protocol,
                     fmt::format("{} messages have come, and {} would be passed over", received_, begins), 0};
    passed_over_ = received_ - begins;
    return {};
}

bool Inbox::owes_a_word() const {
    constexpr std::uint64_t kMessages = 256;
    constexpr std::size_t kBytes = 1U << 20;
    return received_ - told_ >= kMessages || untold_bytes_ >= kBytes;
}

Heartbeat Inbox::word() {
    told_ = received_;
    untold_bytes_ = 0;
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
