#include "rendezvous/serve/held_answers.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddprun::rdzv {
namespace {

std::size_t value_bytes(const StoreReply& reply) {
    if (const auto* const value = std::get_if<Value>(&reply)) return value->value.size();
    if (const auto* const exchanged = std::get_if<Exchanged>(&reply)) return exchanged->value.size();
    return 0;
}

}  // namespace

std::optional<StoreAnswer> HeldAnswers::pass(StoreAnswer answer, std::size_t unacknowledged) {
    const bool is_the_agents_own = answer.client.number == 0;
    if (is_the_agents_own || (answers_.empty() && unacknowledged < kRelayWindow)) return answer;
    push(std::move(answer));
    return std::nullopt;
}

void HeldAnswers::push(StoreAnswer answer) {
    std::size_t& all = bytes_[answer.client.number];
    std::size_t bytes = value_bytes(answer.reply);
    if (all + bytes > most_) {
        answer.reply =
            Failure{Errc::Limit,
                    fmt::format("{} of answers to this client have not been taken yet", format_bytes(all))};
        bytes = 0;
    }
    all += bytes;
    answers_.push_back({std::move(answer), bytes});
}

std::optional<StoreAnswer> HeldAnswers::next(std::size_t unacknowledged) {
    if (answers_.empty() || unacknowledged >= kRelayWindow) return std::nullopt;
    Held first = std::move(answers_.front());
    answers_.pop_front();
    bytes_.find(first.answer.client.number)->second -= first.bytes;
    if (answers_.empty()) bytes_.clear();
    return std::move(first.answer);
}

void HeldAnswers::forget(std::uint64_t client) {
    std::erase_if(answers_, [&](const Held& held) { return held.answer.client.number == client; });
    bytes_.erase(client);
}

}  // namespace ddprun::rdzv
