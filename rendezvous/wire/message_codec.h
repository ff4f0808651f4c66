#pragma once

#include <utility>
#include <variant>

#include "env/describe.h"
#include "rendezvous/wire/message.h"

/// Private to the sources that describe messages: encodes and decodes them by their descriptions.
namespace ddprun::rdzv {

void describe(Visitor& v, Failure& m);

void cut(std::string& text, std::size_t max_bytes);

/// Returns the written message with its header. Without any member there is no JSON. Error: Limit.
Result<EncodedMessage> seal(JsonWriter writer, const MessageType& type, std::uint32_t request);

template <class M>
Result<EncodedMessage> encode_one(M& message, std::uint32_t request) {
    JsonWriter writer;
    describe(writer, message);
    return seal(std::move(writer), M::kType, request);
}

/// Returns the message that `describe_it` has read, or the first error with the name of the message.
template <class M, class Describe>
Result<M> decode_by(Frame&& frame, const Describe& describe_it) {
    JsonReader reader(frame.json.empty() ? std::string_view("{}") : frame.json, Strictness::Exact,
                      std::move(frame.blob));
    // One object serves for both outcomes, because GCC 12 takes what it moves for uninitialized.
    Result<M> message = M();
    describe_it(reader, *message);
    if (const Status read = reader.end(); !read) message = read.error().with(message_name(frame.type));
    return message;
}

template <class M>
Result<M> decode_one(Frame&& frame) {
    return decode_by<M>(std::move(frame), [](JsonReader& reader, M& message) { describe(reader, message); });
}

/// Reads the message of the family whose type the frame has.
template <class... M>
void read_one_of(std::variant<M...>& family, std::uint8_t type, JsonReader& reader) {
    const auto read_if = [&]<class One>(One message) {
        if (One::kType.number != type) return false;
        describe(reader, message);
        family = std::move(message);
        return true;
    };
    if (!(read_if(M{}) || ...)) reader.fail("is not expected here");
}

template <class Family>
Result<Family> decode_one_of(Frame&& frame) {
    const std::uint8_t type = frame.type;
    return decode_by<Family>(
        std::move(frame), [type](JsonReader& reader, Family& family) { read_one_of(family, type, reader); });
}

}  // namespace ddprun::rdzv
