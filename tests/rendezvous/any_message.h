#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/store_message.h"

/// Any message of the protocol, for tests of all messages and for peers that send forbidden ones.
namespace ddprun::rdzv {

/// A message of an unknown type.
struct Unknown {
    std::uint8_t type = 0;
    bool operator==(const Unknown&) const = default;
};

/// Used like a std::variant of all messages; one with 38 alternatives takes seconds to compile in each test.
class Message {
  public:
    template <class M>
    requires(!std::same_as<M, Message>) Message(M message)
        : held_(std::make_shared<const Holds<M>>(std::move(message))) {}
    bool operator==(const Message& other) const { return held_->equals(*other.held_); }

    /// Null for another message.
    template <class M>
    friend const M* get_if(const Message& message) {
        const auto* const held = dynamic_cast<const Holds<M>*>(message.held_.get());
        return held == nullptr ? nullptr : &held->message;
    }

  private:
    struct Held {
        virtual ~Held() = default;
        [[nodiscard]] virtual bool equals(const Held& other) const = 0;
    };
    template <class M>
    struct Holds final : Held {
        explicit Holds(M one) : message(std::move(one)) {}
        [[nodiscard]] bool equals(const Held& other) const override {
            const auto* const same = dynamic_cast<const Holds*>(&other);
            return same != nullptr && same->message == message;
        }
        M message;
    };
    std::shared_ptr<const Held> held_;
};
template <class M>
bool holds_alternative(const Message& message) {
    return get_if<M>(message) != nullptr;
}
/// A copy. Throws std::bad_variant_access for another message.
template <class M>
M get(const Message& message) {
    if (const M* const held = get_if<M>(message)) return *held;
    throw std::bad_variant_access();
}

/// Converts a message of one family to any message.
template <class Family>
Message any(Family family) {
    return std::visit([](auto& one) { return Message(std::move(one)); }, family);
}

/// nullopt if the message is no part of a handshake.
std::optional<HandshakeMessage> as_handshake(const Message& message);

std::string_view message_name(const Message& message);
void PrintTo(const Message& message, std::ostream* out);
Result<Message> decode(Frame frame);
Result<std::string> encode(const Message& message, std::uint32_t request);

}  // namespace ddprun::rdzv
