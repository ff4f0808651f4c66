#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "rendezvous/serve/torch_store.h"

namespace ddprun::rdzv {
namespace {

using namespace std::string_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string number(std::int64_t n) {
    std::string out;
    append_number(out, n);
    return out;
}
std::string value(std::string_view bytes) {
    std::string out;
    append_value(out, bytes);
    return out;
}

TorchRequest ask(TorchOp op, std::vector<std::string> keys = {}, std::vector<std::string> values = {},
                 std::int64_t n = 0) {
    return {op, std::move(keys), std::move(values), n};
}

/// The clients of one store, with the answers of each in order.
class TorchClients {
  public:
    explicit TorchClients(TorchLimits limits = {}) : store_(limits) {}
    /// Sends a request and returns the client's answer to it.
    std::string say(int client, TorchRequest request) {
        TorchStore::Outcome outcome =
            store_.apply(static_cast<TorchStore::Client>(client), std::move(request));
        refused_ = outcome.refused ? outcome.refused->what : "";
        for (TorchStore::Answer& answer : outcome.answers)
            told_[static_cast<int>(answer.client)] += answer.bytes;
        return std::exchange(told_[client], {});
    }
    std::string say(int client, TorchRequest first, TorchRequest second) {
        const std::string told = say(client, std::move(first));
        return told + say(client, std::move(second));
    }
    std::string told(int client) { return std::exchange(told_[client], {}); }
    [[nodiscard]] const std::string& refused() const { return refused_; }
    TorchStore& store() { return store_; }

  private:
    TorchStore store_;
    std::map<int, std::string> told_;
    std::string refused_;
};

const std::string kStop(1, '\0'), kCanceled(1, '\1'), kReady(1, '\0'), kNotReady(1, '\1');

// ---- the bytes

TEST(TorchMessage, HasTheBytesThatPyTorchSends) {
    EXPECT_EQ(encode_torch_greeting(), "\0\xce\xf7\x85\x3c"s);
    EXPECT_EQ(encode_torch(ask(TorchOp::Set, {"/k"}, {"v"})), "\1\2\0\0\0\0\0\0\0/k\1\0\0\0\0\0\0\0v"s);
    EXPECT_EQ(encode_torch(ask(TorchOp::Add, {"init/"}, {}, 1)), "\4\5\0\0\0\0\0\0\0init/\1\0\0\0\0\0\0\0"s);
    EXPECT_EQ(encode_torch(ask(TorchOp::Wait, {"a", "b"})),
              "\6\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0a\1\0\0\0\0\0\0\0b"s);
    EXPECT_EQ(encode_torch(ask(TorchOp::Ping, {}, {}, 7)), "\x0d\7\0\0\0"s);
    EXPECT_EQ(encode_torch(ask(TorchOp::CancelWait)), "\x0c"s);
}

std::vector<TorchRequest> one_of_each() {
    return {ask(TorchOp::Set, {"k"}, {"v"}),
            ask(TorchOp::CompareSet, {"k"}, {"v", "w"}),
            ask(TorchOp::Get, {"k"}),
            ask(TorchOp::Add, {"n"}, {}, -5),
            ask(TorchOp::Check, {"a", "b"}),
            ask(TorchOp::Wait, {"k"}),
            ask(TorchOp::CountKeys),
            ask(TorchOp::DeleteKey, {"k"}),
            ask(TorchOp::Append, {"k"}, {"v"}),
            ask(TorchOp::MultiGet, {"a", "b"}),
            ask(TorchOp::MultiSet, {"a", "b"}, {"1", "2"}),
            ask(TorchOp::CancelWait),
            ask(TorchOp::Ping, {}, {}, 77),
            ask(TorchOp::QueuePush, {"q"}, {"v"}),
            ask(TorchOp::QueuePop, {"q"}),
            ask(TorchOp::QueueLength, {"q"}),
            ask(TorchOp::ListKeys),
            ask(TorchOp::Barrier, {"b"}, {}, 3),
            ask(TorchOp::MultiGet)};
}

TEST(TorchMessage, IsReadFromPiecesOfAnySize) {
    std::string stream = encode_torch_greeting();
    for (const TorchRequest& request : one_of_each()) stream += encode_torch(request);
    for (const std::size_t piece : {1U, 2U, 7U, 1000U}) {
        TorchParser parser;
        std::vector<TorchRequest> read;
        for (std::size_t at = 0; at < stream.size(); at += piece) {
            parser.feed(std::string_view(stream).substr(at, piece));
            for (;;) {
                Result<std::optional<TorchRequest>> request = parser.next();
                ASSERT_TRUE(request) << request.error().what;
                if (!*request) break;
                read.push_back(**request);
            }
        }
        EXPECT_EQ(read, one_of_each()) << "in pieces of " << piece;
    }
}

std::string error_of(std::string_view bytes, TorchLimits limits = {}) {
    TorchParser parser(limits);
    parser.feed(bytes);
    for (;;) {
        const Result<std::optional<TorchRequest>> request = parser.next();
        if (!request) return parser.next() ? "an error that does not last" : request.error().what;
        if (!*request) return "";
    }
}

TEST(TorchMessage, WithoutAGreetingHasTheNumbersBeforePyTorch22) {
    const std::string set = "\0"s + value("init/") + value("1"), add = "\3"s + value("init/") + number(1);
    for (const std::string& stream : {set + add, add + set}) {
        for (const std::size_t piece : {1U, 1000U}) {
            TorchParser parser;
            std::vector<TorchRequest> read;
            for (std::size_t at = 0; at < stream.size(); at += piece) {
                parser.feed(std::string_view(stream).substr(at, piece));
                for (auto request = parser.next(); request && *request; request = parser.next())
                    read.push_back(**request);
            }
            EXPECT_THAT(read, ::testing::UnorderedElementsAre(ask(TorchOp::Set, {"init/"}, {"1"}),
                                                              ask(TorchOp::Add, {"init/"}, {}, 1)));
        }
    }
    EXPECT_THAT(error_of(add + "\x0c"), HasSubstr("request 12"));
}

TEST(TorchMessage, OfAnUnknownKindOrASecondGreetingEndsTheConnection) {
    EXPECT_THAT(error_of(encode_torch_greeting() + encode_torch_greeting()), HasSubstr("second greeting"));
    EXPECT_THAT(error_of(encode_torch_greeting() + "\x13"), HasSubstr("request 19"));
    EXPECT_THAT(error_of("GET / HTTP/1.1"), HasSubstr("request 71"));
}

TEST(TorchMessage, LengthsAreCheckedBeforeTheBytesArrive) {
    const std::string greeting = encode_torch_greeting();
    EXPECT_THAT(error_of(greeting + "\3\1\x20\0\0\0\0\0\0"s), HasSubstr("a key of 8193 bytes"));
    EXPECT_THAT(error_of(greeting + "\1"s + value("k") + "\1\0\x80\0\0\0\0\0"s),
                HasSubstr("a value of 8388609 bytes"));
    EXPECT_THAT(error_of(greeting + "\6\1\0\2\0\0\0\0\0"s), HasSubstr("131073 keys in one request"));
    EXPECT_THAT(error_of(greeting + "\x0b\xff\xff\xff\xff\xff\xff\xff\xff"s),
                HasSubstr("keys in one request"));
    TorchLimits small;
    small.request_bytes = 10;
    EXPECT_THAT(error_of(greeting + "\5\2\0\0\0\0\0\0\0"s + value("123456") + value("123456"), small),
                HasSubstr("a request of more than 10 bytes"));
}

// ---- what is answered

TEST(TorchStore, AnswersAsPyTorchsOwnServer) {
    TorchClients c;
    EXPECT_EQ(c.say(1, ask(TorchOp::Ping, {}, {}, 0x01020304)), "\4\3\2\1");
    EXPECT_EQ(c.say(1, ask(TorchOp::Get, {"absent"})), value("")) << "an absent key reads as empty";
    EXPECT_EQ(c.say(1, ask(TorchOp::Set, {"k\xff\0"s}, {"v"})), "")
        << "a set is not answered, and a key is any bytes";
    EXPECT_EQ(c.say(2, ask(TorchOp::Get, {"k\xff\0"s})), value("v"));
    EXPECT_EQ(c.say(1, ask(TorchOp::Add, {"n"}, {}, 40)), number(40));
    EXPECT_EQ(c.say(2, ask(TorchOp::Add, {"n"}, {}, 2)), number(42));
    EXPECT_EQ(c.say(1, ask(TorchOp::Append, {"n"}, {"0"})), "");
    EXPECT_EQ(c.say(1, ask(TorchOp::MultiSet, {"a", "b"}, {"1", "2"})), "");
    EXPECT_EQ(c.say(1, ask(TorchOp::MultiGet, {"b", "none", "a", "n"})),
              value("2") + value("") + value("1") + value("420"));
    EXPECT_EQ(c.say(1, ask(TorchOp::Check, {"a", "b"}), ask(TorchOp::Check, {"a", "none"})),
              kReady + kNotReady);
    EXPECT_EQ(c.say(1, ask(TorchOp::CountKeys)), number(4));
    EXPECT_EQ(c.say(1, ask(TorchOp::DeleteKey, {"a"}), ask(TorchOp::DeleteKey, {"a"})),
              number(1) + number(0));
    EXPECT_EQ(c.say(1, ask(TorchOp::ListKeys)).size(), 8 + 3 * 8 + "k.0bn"s.size());
    EXPECT_EQ(c.store().keys(), 3U);
}

TEST(TorchStore, CompareSetReturnsTheCurrentValue) {
    TorchClients c;
    EXPECT_EQ(c.say(1, ask(TorchOp::CompareSet, {"k"}, {"old", "new"})), value("old"))
        << "of an absent key what was expected";
    EXPECT_EQ(c.say(1, ask(TorchOp::CompareSet, {"k"}, {"", "first"})), value("first"));
    EXPECT_EQ(c.say(1, ask(TorchOp::CompareSet, {"k"}, {"old", "new"})), value("first"));
    EXPECT_EQ(c.say(1, ask(TorchOp::CompareSet, {"k"}, {"first", "new"})), value("new"));
}

TEST(TorchStore, AWaitEndsOnceWithTheLastOfItsKeys) {
    TorchClients c;
    EXPECT_EQ(c.say(1, ask(TorchOp::Wait, {"a", "b", "a"})), "");
    c.say(2, ask(TorchOp::Set, {"a"}, {""}));
    EXPECT_EQ(c.told(1), "");
    c.say(2, ask(TorchOp::Add, {"b"}, {}, 1));
    c.say(2, ask(TorchOp::Add, {"b"}, {}, 1));
    EXPECT_EQ(c.told(1), kStop);
    EXPECT_EQ(c.say(1, ask(TorchOp::Wait, {"a", "b"})), kStop) << "at once";
    EXPECT_EQ(c.say(1, ask(TorchOp::Wait)), kStop) << "for nothing";
    EXPECT_EQ(c.store().waiters(), 0U);
}

TEST(TorchStore, ACanceledWaitIsForgotten) {
    TorchClients c;
    c.say(1, ask(TorchOp::Wait, {"a"}));
    EXPECT_EQ(c.say(1, ask(TorchOp::CancelWait)), kCanceled);
    c.say(2, ask(TorchOp::Set, {"a"}, {"x"}));
    EXPECT_EQ(c.told(1), "");
    EXPECT_EQ(c.say(1, ask(TorchOp::CancelWait)), kCanceled)
        << "the key may have come while the client gave up";
}

TEST(TorchStore, APushWakesOneClientOfTheQueue) {
    TorchClients c;
    c.say(1, ask(TorchOp::Wait, {"q"}));
    c.say(2, ask(TorchOp::Wait, {"q"}));
    c.say(3, ask(TorchOp::QueuePush, {"q"}, {"job"}));
    EXPECT_EQ(c.told(1), kStop);
    EXPECT_EQ(c.told(2), "") << "it would find the queue empty";
    EXPECT_EQ(c.say(3, ask(TorchOp::QueueLength, {"q"})), number(1));
    EXPECT_EQ(c.say(1, ask(TorchOp::QueuePop, {"q"})), number(1) + value("job"));
    EXPECT_EQ(c.say(1, ask(TorchOp::QueuePop, {"q"})), number(0));
    c.say(3, ask(TorchOp::QueuePush, {"q"}, {"next"}));
    EXPECT_EQ(c.told(2), kStop);
    EXPECT_EQ(c.say(3, ask(TorchOp::CountKeys)), number(0)) << "a queue is no key";
    EXPECT_EQ(c.say(3, ask(TorchOp::Check, {"q"})), kReady) << "but it is there while it holds something";
}

TEST(TorchStore, ABarrierEndsWithItsLastClient) {
    TorchClients c;
    EXPECT_EQ(c.say(1, ask(TorchOp::Barrier, {"b"}, {}, 3)), "");
    EXPECT_EQ(c.say(2, ask(TorchOp::Barrier, {"b"}, {}, 3)), "");
    EXPECT_EQ(c.told(1), "");
    EXPECT_EQ(c.say(3, ask(TorchOp::Barrier, {"b"}, {}, 3)), kStop);
    EXPECT_EQ(c.told(1) + c.told(2), kStop + kStop);
}

TEST(TorchStore, ADisconnectedClientIsNotWoken) {
    TorchClients c;
    c.say(1, ask(TorchOp::Wait, {"a", "b"}));
    c.store().disconnect(1);
    EXPECT_EQ(c.store().waiters(), 0U);
    c.say(2, ask(TorchOp::MultiSet, {"a", "b"}, {"", ""}));
    EXPECT_EQ(c.told(1), "");
}

TEST(TorchStore, DropsEverythingOfAnEndedGeneration) {
    TorchClients c;
    c.say(1, ask(TorchOp::Wait, {"a"}));
    c.say(2, ask(TorchOp::Set, {"k"}, {"v"}));
    c.say(2, ask(TorchOp::QueuePush, {"q"}, {"v"}));
    c.store().clear();
    EXPECT_EQ(c.store().keys() + c.store().waiters() + c.store().bytes(), 0U);
    EXPECT_EQ(c.say(2, ask(TorchOp::Check, {"q"})), kNotReady);
}

TEST(TorchStore, UnsupportedRequestsAreRefusedAndChangeNothing) {
    TorchLimits limits;
    limits.keys = 2;
    limits.total_bytes = 20;
    limits.waiting_bytes = 600;
    TorchClients c(limits);
    c.say(1, ask(TorchOp::Set, {"a"}, {"text"}));
    c.say(1, ask(TorchOp::Add, {"a"}, {}, 1));
    EXPECT_THAT(c.refused(), HasSubstr("holds no number"));
    c.say(1, ask(TorchOp::Set, {"b"}, {std::string(16, 'x')}));
    EXPECT_THAT(c.refused(), HasSubstr("full"));
    c.say(1, ask(TorchOp::QueuePush, {"q"}, {"1"}));
    c.say(1, ask(TorchOp::Set, {"b"}, {"1"}));
    EXPECT_THAT(c.refused(), HasSubstr("its 2 keys already"));
    c.say(1, ask(TorchOp::Wait, {"x", "y"}));
    c.say(2, ask(TorchOp::Wait, {"x"}));
    EXPECT_THAT(c.refused(), HasSubstr("wait for too much"));
    c.say(1, ask(TorchOp::Wait, {"z"}));
    EXPECT_THAT(c.refused(), HasSubstr("two things at once"));
    EXPECT_EQ(c.store().keys(), 1U);
    EXPECT_EQ(c.store().bytes(), "atextq1"s.size());
}

TEST(TorchStore, AnAnswerThatIsTooLongIsRefused) {
    TorchLimits limits;
    limits.request_bytes = 30;
    TorchClients c(limits);
    c.say(1, ask(TorchOp::Set, {"a"}, {"12345678"}));
    EXPECT_EQ(c.say(1, ask(TorchOp::ListKeys)), number(1) + value("a"));
    c.say(1, ask(TorchOp::MultiGet, {"a", "a"}));
    EXPECT_THAT(c.refused(), HasSubstr("an answer of more than 30 bytes"));
    c.say(1, ask(TorchOp::Set, {"another"}, {""}));
    c.say(1, ask(TorchOp::ListKeys));
    EXPECT_THAT(c.refused(), HasSubstr("an answer of more than 30 bytes"));
}

TEST(TorchStore, CountsEveryByteOnce) {
    TorchClients c;
    c.say(1, ask(TorchOp::Set, {"key"}, {"value"}));
    c.say(1, ask(TorchOp::Set, {"key"}, {"v"}));
    c.say(1, ask(TorchOp::Append, {"key"}, {"23"}));
    EXPECT_EQ(c.store().bytes(), 6U);
    c.say(1, ask(TorchOp::QueuePush, {"q"}, {"12"}));
    c.say(1, ask(TorchOp::QueuePush, {"q"}, {"345"}));
    EXPECT_EQ(c.store().bytes(), 12U);
    c.say(1, ask(TorchOp::QueuePop, {"q"}));
    c.say(1, ask(TorchOp::QueuePop, {"q"}));
    c.say(1, ask(TorchOp::DeleteKey, {"key"}));
    EXPECT_EQ(c.store().bytes(), 0U);
}

}  // namespace
}  // namespace ddprun::rdzv
