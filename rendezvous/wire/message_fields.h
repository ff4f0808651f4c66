#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/json.h"
#include "env/result.h"
#include "rendezvous/wire/message.h"

/// Private to the sources that read and write messages: one list of a message's fields serves for both.
namespace ddprun::rdzv {

/// A visitor of a message's fields, in the order in which they are written. The names are those on the wire:
/// released names never change.
class Fields {
  public:
    virtual ~Fields() = default;

    virtual void operator()(const char* key, std::string& value) = 0;
    virtual void operator()(const char* key, bool& value) = 0;
    virtual void operator()(const char* key, std::vector<std::string>& values) = 0;
    virtual void operator()(const char* key, std::uint64_t& value) = 0;
    void operator()(const char* key, std::int64_t& value) {
        whole(key, value, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
    }
    void operator()(const char* key, int& value);
    void operator()(const char* key, std::uint32_t& value);
    void operator()(const char* key, Duration& value);
    /// A field that may be absent (nullopt).
    template <class T>
    void operator()(const char* key, std::optional<T>& value) {
        if (!goes_on(key, !value)) return;
        if (!value) value.emplace();
        (*this)(key, *value);
    }
    /// A field that earlier minor versions did not have: absent keeps the default.
    template <class T>
    void defaulted(const char* key, T& value) {
        if (goes_on(key, false)) (*this)(key, value);
    }
    /// A field that is left out when it has its usual value, which keeps frequent messages short.
    template <class T>
    void usually(const char* key, T& value, const T& usual) {
        if (goes_on(key, value == usual)) (*this)(key, value);
    }
    /// The bytes behind the JSON; a message that does not ask for them has none.
    virtual void blob(Blob& value) = 0;
    /// Reports an error that the message itself found in a field.
    virtual void fail(std::string_view what) = 0;

  protected:
    virtual void whole(const char* key, std::int64_t& value, std::int64_t least, std::int64_t most) = 0;
    /// For a field that may be absent: true when it is there to be read, or is to be written.
    virtual bool goes_on(const char* key, bool left_out) = 0;
};

/// Writes a message's fields as JSON text directly, because users feel the cost of store requests.
class FieldWriter final : public Fields {
  public:
    using Fields::operator();
    void operator()(const char* key, std::string& value) override;
    void operator()(const char* key, bool& value) override;
    void operator()(const char* key, std::vector<std::string>& values) override;
    void operator()(const char* key, std::uint64_t& value) override;
    void blob(Blob& value) override { blob_ = std::move(value); }
    void fail(std::string_view) override {}
    /// Returns the message with its header. Without any field there is no JSON. Error: Limit.
    Result<EncodedMessage> seal(MessageType type, std::uint32_t request) &&;

  private:
    void whole(const char* key, std::int64_t& value, std::int64_t least, std::int64_t most) override;
    bool goes_on(const char*, bool left_out) override { return !left_out; }
    void name(const char* key);

    std::string json_;
    Blob blob_;
};

/// Reads a message's fields from a frame and remembers the first one that is missing or wrong.
class FieldReader final : public Fields {
  public:
    explicit FieldReader(Frame frame);

    using Fields::operator();
    void operator()(const char* key, std::string& value) override;
    void operator()(const char* key, bool& value) override;
    void operator()(const char* key, std::vector<std::string>& values) override;
    void operator()(const char* key, std::uint64_t& value) override;
    void blob(Blob& value) override { value = Blob(std::exchange(frame_.blob, {})); }
    void fail(std::string_view what) override;
    [[nodiscard]] std::uint8_t type() const { return frame_.type; }
    /// Call it after the last field. Error: the first one found.
    Status end();

  private:
    void whole(const char* key, std::int64_t& value, std::int64_t least, std::int64_t most) override;
    bool goes_on(const char* key, bool) override { return object_.contains(key); }
    /// The field as a T; nullopt when it is missing or wrong, which fail() has then recorded.
    template <class T>
    std::optional<T> read(const char* key);

    Frame frame_;
    Json object_ = Json::object();
    std::optional<Error> error_;
};

void fields(Fields& f, Failure& m);

void cut(std::string& text, std::size_t max_bytes);

template <class M>
Result<EncodedMessage> encode_one(M& message, std::uint32_t request) {
    FieldWriter writer;
    fields(writer, message);
    return std::move(writer).seal(M::kType, request);
}

template <class M>
Result<M> decode_one(Frame&& frame) {
    FieldReader reader(std::move(frame));
    M message{};
    fields(reader, message);
    if (const Status read = reader.end(); !read) return read.error();
    return message;
}

/// Reads the message of the variant whose type the frame has.
template <class... M>
void read_one_of(std::variant<M...>& family, FieldReader& reader) {
    const auto read_if = [&]<class One>(One message) {
        if (static_cast<std::uint8_t>(One::kType) != reader.type()) return false;
        fields(reader, message);
        family = std::move(message);
        return true;
    };
    if (!(read_if(M{}) || ...)) reader.fail("is not expected here");
}

template <class Family>
Result<Family> decode_one_of(Frame&& frame) {
    FieldReader reader(std::move(frame));
    Result<Family> message =
        Family();  // one object for both outcomes: GCC 12 finds what it moves uninitialized
    read_one_of(*message, reader);
    if (const Status read = reader.end(); !read) message = read.error();
    return message;
}

}  // namespace ddprun::rdzv
