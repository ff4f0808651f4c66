#include <gtest/gtest.h>

#include "rendezvous/serve/store.h"
#include "tests/rendezvous/store_values.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;
using namespace store_op;

/// A store with a clock and a request counter, which collects the answers of each client.
struct Bench {
    explicit Bench(StoreLimits limits = {}) : store(limits) {}

    StoreAnswers ask(ClientId client, StoreOp op, std::optional<Duration> timeout = std::nullopt) {
        return store.apply(client, ++request, {generation, timeout, std::move(op)}, now);
    }
    /// The only answer of an operation that does not wait.
    StoreReply reply(StoreOp op, ClientId client = 1) {
        StoreAnswers answers = ask(client, std::move(op));
        EXPECT_EQ(answers.size(), 1U);
        return answers.empty() ? StoreReply(Failure{}) : answers.back().reply;
    }
    Store store;
    TimePoint now = t0;
    std::uint64_t generation = 0;
    std::uint32_t request = 0;
};

Errc code(const StoreReply& reply) { return std::get<Failure>(reply).code; }
std::string what(const StoreReply& reply) { return std::get<Failure>(reply).what; }

TEST(Store, KeepsWhatWasSet) {
    Bench b;
    EXPECT_EQ(b.reply(set_of("k", "one")), StoreReply(Done{}));
    EXPECT_EQ(b.reply(set_of("k", std::string("\0two", 4))), StoreReply(Done{}));
    EXPECT_EQ(b.reply(TryGet{"k"}), value(std::string("\0two", 4)));
    EXPECT_EQ(b.reply(Get{"k"}), value(std::string("\0two", 4)));
    EXPECT_EQ(b.reply(TryGet{"other"}), StoreReply(Absent{}));
    EXPECT_EQ(b.store.keys(), 1U);
}

TEST(Store, DistinguishesAnEmptyValueFromNone) {
    Bench b;
    b.reply(set_of("k", ""));
    EXPECT_EQ(b.reply(TryGet{"k"}), value(""));
}

TEST(Store, AddsFromZero) {
    Bench b;
    EXPECT_EQ(b.reply(Add{"n", 5}), StoreReply(Sum{5}));
    EXPECT_EQ(b.reply(Add{"n", -7}), StoreReply(Sum{-2}));
    EXPECT_EQ(b.reply(TryGet{"n"}), value("-2"));
}

TEST(Store, AddRefusesTextAndOverflowAndChangesNothing) {
    Bench b;
    b.reply(set_of("text", "seven"));
    EXPECT_EQ(code(b.reply(Add{"text", 1})), Errc::InvalidArgument);
    b.reply(Add{"n", INT64_MAX});
    EXPECT_EQ(code(b.reply(Add{"n", 1})), Errc::Limit);
    EXPECT_EQ(b.reply(TryGet{"n"}), value(std::to_string(INT64_MAX)));
}

TEST(Store, CompareSetSwapsOnlyWhatWasExpected) {
    Bench b;
    EXPECT_EQ(b.reply(CompareSet{"k", "old", Blob("new")}), StoreReply(Exchanged{false, Blob()}));
    EXPECT_EQ(b.reply(CompareSet{"k", std::nullopt, Blob("first")}),
              StoreReply(Exchanged{true, Blob("first")}));
    EXPECT_EQ(b.reply(CompareSet{"k", std::nullopt, Blob("second")}),
              StoreReply(Exchanged{false, Blob("first")}));
    EXPECT_EQ(b.reply(CompareSet{"k", "first", Blob("second")}), StoreReply(Exchanged{true, Blob("second")}));
}

TEST(Store, CompareSetDistinguishesEmptyFromAbsent) {
    Bench b;
    EXPECT_EQ(b.reply(CompareSet{"k", "", Blob("x")}), StoreReply(Exchanged{false, Blob()}));
    EXPECT_EQ(b.reply(TryGet{"k"}), StoreReply(Absent{}));
}

TEST(Store, EraseReportsWhetherTheKeyExisted) {
    Bench b;
    b.reply(set_of("k", "v"));
    EXPECT_EQ(b.reply(Erase{"k"}), StoreReply(Erased{true}));
    EXPECT_EQ(b.reply(Erase{"k"}), StoreReply(Erased{false}));
    EXPECT_EQ(b.store.bytes(), 0U);
}

TEST(Store, GetWaitsForTheKey) {
    Bench b;
    EXPECT_TRUE(b.ask(1, Get{"k"}, 10s).empty());
    EXPECT_TRUE(b.ask(2, Get{"k"}, 10s).empty());
    const StoreAnswers answers = b.ask(3, set_of("k", "v"));
    ASSERT_EQ(answers.size(), 3U);
    EXPECT_EQ(answers[0].client, 1U);
    EXPECT_EQ(answers[0].request, 1U);
    EXPECT_EQ(answers[0].reply, value("v"));
    EXPECT_EQ(answers[1].client, 2U);
    EXPECT_EQ(b.store.waiters(), 0U);
    EXPECT_EQ(b.store.next_deadline(), kNever);
}

TEST(Store, AddAndCompareSetWakeWaitingClientsToo) {
    Bench b;
    b.ask(1, Get{"n"});
    EXPECT_EQ(b.ask(2, Add{"n", 4})[0].reply, value("4"));
    b.ask(1, Get{"c"});
    EXPECT_EQ(b.ask(2, CompareSet{"c", std::nullopt, Blob("x")})[0].reply, value("x"));
}

TEST(Store, WaitNeedsAllKeysAtTheSameTime) {
    Bench b;
    EXPECT_TRUE(b.ask(1, Wait{{"a", "b", "c"}}).empty());
    EXPECT_EQ(b.ask(2, set_of("c", "")).size(), 1U);
    EXPECT_EQ(b.ask(2, set_of("a", "")).size(), 1U);
    b.ask(2, Erase{"a"});
    EXPECT_EQ(b.ask(2, set_of("b", "")).size(), 1U) << "a is gone again";
    const StoreAnswers answers = b.ask(2, set_of("a", ""));
    ASSERT_EQ(answers.size(), 2U);
    EXPECT_EQ(answers[0].client, 1U);
    EXPECT_EQ(answers[0].reply, StoreReply(Done{}));
}

TEST(Store, WaitForExistingKeysOrNoneReturnsAtOnce) {
    Bench b;
    b.reply(set_of("a", ""));
    EXPECT_EQ(b.reply(Wait{{"a", "a"}}), StoreReply(Done{}));
    EXPECT_EQ(b.reply(Wait{{}}), StoreReply(Done{}));
}

TEST(Store, TimeoutNamesTheMissingKeyAndTheWait) {
    Bench b;
    b.reply(set_of("b", ""));
    b.ask(1, Wait{{"a", "b", "c", "d", "e"}}, 5s);
    b.ask(1, Get{"lonely"}, 3s);
    EXPECT_EQ(b.store.next_deadline(), t0 + 3s);
    EXPECT_TRUE(b.store.expire(t0 + 3s - 1ns).empty());
    EXPECT_EQ(b.store.expire(t0 + 3s).at(0).reply,
              StoreReply(Failure{Errc::Timeout, "key 'lonely' not set within 3 s"}));
    EXPECT_EQ(b.store.expire(t0 + 5s).at(0).reply,
              StoreReply(Failure{Errc::Timeout, "keys 'a', 'c', 'd' and 1 more not set within 5 s"}));
    EXPECT_TRUE(b.ask(2, set_of("lonely", ""))[0].client == 2U) << "who timed out is not answered again";
}

TEST(Store, BarrierReleasesAllClientsWithTheLast) {
    Bench b;
    EXPECT_TRUE(b.ask(1, Barrier{"b", 3}).empty());
    EXPECT_TRUE(b.ask(2, Barrier{"b", 3}).empty());
    const StoreAnswers answers = b.ask(3, Barrier{"b", 3});
    ASSERT_EQ(answers.size(), 3U);
    for (const StoreAnswer& answer : answers) EXPECT_EQ(answer.reply, StoreReply(Done{}));
    EXPECT_TRUE(b.ask(1, Barrier{"b", 3}).empty()) << "the name can be used again";
    EXPECT_EQ(b.store.waiters(), 1U);
}

TEST(Store, BarrierOfOneDoesNotWait) {
    Bench b;
    EXPECT_EQ(b.reply(Barrier{"b", 1}), StoreReply(Done{}));
}

TEST(Store, BarrierRefusesADifferentCountNamingBoth) {
    Bench b;
    b.ask(1, Barrier{"b", 4});
    const StoreReply refused = b.reply(Barrier{"b", 3}, 2);
    EXPECT_EQ(code(refused), Errc::Mismatch);
    EXPECT_EQ(what(refused), "barrier 'b': 3 participants asked for, the 1 already inside said 4");
    EXPECT_EQ(code(b.reply(Barrier{"b", 4}, 1)), Errc::Mismatch) << "nobody is two participants";
    EXPECT_EQ(code(b.reply(Barrier{"other", 0}, 2)), Errc::InvalidArgument);
}

TEST(Store, BarrierTimeoutReportsHowManyArrivedAndForgetsThem) {
    Bench b;
    b.ask(1, Barrier{"b", 4}, 5s);
    b.ask(2, Barrier{"b", 4}, 5s);
    const StoreAnswers late = b.store.expire(t0 + 5s);
    ASSERT_EQ(late.size(), 2U);
    for (const StoreAnswer& answer : late)
        EXPECT_EQ(what(answer.reply), "barrier 'b': 2 of 4 arrived within 5 s");
    EXPECT_TRUE(b.ask(3, Barrier{"b", 2}).empty()) << "a new barrier, with its own count";
}

TEST(Store, AClientDoesNotMeetItsOwnExpiredRequest) {
    Bench b;
    b.ask(1, Barrier{"b", 2}, 5s);
    b.now = t0 + 5s;
    const StoreAnswers answers = b.ask(1, Barrier{"b", 2}, 5s);
    ASSERT_EQ(answers.size(), 1U);
    EXPECT_EQ(answers[0].request, 1U);
    EXPECT_EQ(code(answers[0].reply), Errc::Timeout);
    EXPECT_EQ(b.store.waiters(), 1U);
}

TEST(Store, DisconnectRemovesAClientFromWaitsAndBarriers) {
    Bench b;
    b.ask(1, Barrier{"b", 2});
    b.ask(1, Get{"k"}, 5s);
    b.ask(2, Get{"k"});
    b.store.disconnect(1);
    b.store.disconnect(99);
    EXPECT_EQ(b.store.waiters(), 1U);
    EXPECT_EQ(b.store.next_deadline(), kNever);
    EXPECT_TRUE(b.ask(3, Barrier{"b", 2}).empty()) << "the one that left does not count";
    const StoreAnswers answers = b.ask(3, set_of("k", ""));
    ASSERT_EQ(answers.size(), 2U);
    EXPECT_EQ(answers[0].client, 2U);
}

TEST(Store, ANewGenerationDropsKeysAndAnswersWaitingClients) {
    Bench b;
    b.reply(set_of("k", "v"));
    b.ask(1, Get{"never"}, 5s);
    b.ask(2, Barrier{"b", 2});
    const StoreAnswers answers = b.store.begin_generation(1);
    ASSERT_EQ(answers.size(), 2U);
    for (const StoreAnswer& answer : answers)
        EXPECT_EQ(answer.reply, StoreReply(Failure{Errc::StaleGeneration, "generation 0 is over, now is 1"}));
    EXPECT_EQ(b.store.keys(), 0U);
    EXPECT_EQ(b.store.bytes(), 0U);
    EXPECT_EQ(b.store.waiters(), 0U);
    EXPECT_EQ(b.store.next_deadline(), kNever);
}

TEST(Store, AHostThatJoinsLateGetsItsOrderAndReportsWhyItCannotTakePart) {
    Bench b;
    b.reply(set_of("start/order", "run this"));
    b.reply(set_of("k", "of generation 0"));
    b.store.begin_generation(1);
    EXPECT_EQ(b.store.keys(), 1U);
    EXPECT_EQ(b.store.bytes(), std::string("start/order").size() + std::string("run this").size());
    EXPECT_EQ(b.reply(Get{"start/order"}), value("run this"));
    EXPECT_EQ(b.reply(set_of("start/failed/3", "no such program")), StoreReply(Done{}));
    EXPECT_EQ(code(b.reply(Get{"k"})), Errc::StaleGeneration);
    EXPECT_EQ(code(b.reply(Erase{"start/order"})), Errc::StaleGeneration);
}

TEST(Store, AnOldGenerationCannotTouchTheNewOne) {
    Bench b;
    b.store.begin_generation(2);
    b.generation = 1;
    for (const StoreOp& op : std::initializer_list<StoreOp>{
             set_of("k", "poison"), Get{"k"}, TryGet{"k"}, Add{"k", 1}, Erase{"k"},
             CompareSet{"k", std::nullopt, Blob("poison")}, Wait{{"k"}}, Barrier{"b", 1}}) {
        EXPECT_EQ(code(b.reply(op)), Errc::StaleGeneration);
    }
    EXPECT_EQ(b.store.keys(), 0U);
    b.generation = 3;
    EXPECT_EQ(what(b.reply(TryGet{"k"})), "generation 3 has not begun, now is 2");
}

TEST(Store, AGenerationNeverGoesBack) {
    Bench b;
    b.store.begin_generation(5);
    b.generation = 5;
    b.reply(set_of("k", "v"));
    EXPECT_TRUE(b.store.begin_generation(5).empty());
    EXPECT_TRUE(b.store.begin_generation(4).empty());
    EXPECT_EQ(b.store.generation(), 5U);
    EXPECT_EQ(b.store.keys(), 1U);
}

TEST(Store, StaysWithinItsLimits) {
    StoreLimits limits;
    limits.key_bytes = 4;
    limits.value_bytes = 8;
    limits.keys = 2;
    limits.total_bytes = 12;
    limits.keys_per_wait = 2;
    limits.waiters_per_client = 2;
    Bench b(limits);
    EXPECT_EQ(code(b.reply(set_of("12345", ""))), Errc::InvalidArgument);
    EXPECT_EQ(code(b.reply(set_of("", ""))), Errc::InvalidArgument);
    EXPECT_EQ(code(b.reply(set_of("k", "123456789"))), Errc::Limit);
    EXPECT_EQ(b.reply(set_of("a", "12345678")), StoreReply(Done{}));
    EXPECT_EQ(code(b.reply(set_of("b", "123"))), Errc::Limit) << "1 + 8 + 1 + 3 bytes are more than 12";
    EXPECT_EQ(b.reply(set_of("b", "12")), StoreReply(Done{}));
    EXPECT_EQ(b.reply(set_of("a", "1234")), StoreReply(Done{})) << "replacing frees what was there";
    EXPECT_EQ(code(b.reply(set_of("c", ""))), Errc::Limit) << "two keys are there";
    EXPECT_EQ(code(b.reply(Wait{{"a", "b", "c"}})), Errc::Limit);
    b.ask(1, Get{"x"});
    b.ask(1, Barrier{"x", 2});
    EXPECT_EQ(code(b.reply(Get{"y"})), Errc::Limit);
    EXPECT_EQ(code(b.reply(Barrier{"y", 2})), Errc::Limit);
    EXPECT_TRUE(b.ask(2, Get{"y"}).empty()) << "the limit is per client";
}

TEST(Store, WaitsForManyKeysHaveLimitsAndAreFreedWithTheirClient) {
    StoreLimits limits;
    limits.waiting_bytes_per_client = 256 * 1024;
    limits.waiting_bytes = 512 * 1024;
    Bench b(limits);
    std::vector<std::string> keys;
    for (int i = 0; i < 4000; ++i) keys.push_back("key/" + std::to_string(i));
    const auto waits_of = [&](ClientId client) {
        int waits = 0;
        while (waits < 100 && b.ask(client, Wait{keys}).empty()) ++waits;
        return waits;
    };
    const int of_one = waits_of(1);
    EXPECT_GE(of_one, 1);
    EXPECT_LE(b.store.waiting_bytes(), limits.waiting_bytes_per_client);
    EXPECT_EQ(what(b.reply(Wait{keys}, 1)).find("this client waits for too much"), 0U);
    EXPECT_TRUE(b.ask(1, Get{"one small thing"}).empty()) << "what is left can be used";
    EXPECT_EQ(waits_of(2), of_one);
    EXPECT_LT(waits_of(3), of_one);
    EXPECT_LE(b.store.waiting_bytes(), limits.waiting_bytes);
    EXPECT_EQ(what(b.reply(Wait{keys}, 3)).find("all clients together wait for too much"), 0U);

    b.store.disconnect(1);
    EXPECT_EQ(waits_of(3), of_one) << "the room of who has left";
    for (const ClientId client : {2, 3}) b.store.disconnect(client);
    EXPECT_EQ(b.store.waiting_bytes(), 0U);
}

TEST(Store, WaitingBytesAreCountedUntilTheAnswer) {
    Bench b;
    b.ask(1, Wait{{"a", "b"}});
    b.ask(1, Get{"a"});
    b.ask(1, Barrier{"x", 2});
    b.ask(1, Get{"never"}, 1s);
    EXPECT_GT(b.store.waiting_bytes(), 0U);
    b.reply(set_of("b", ""), 2);
    b.ask(2, set_of("a", ""));
    b.ask(2, Barrier{"x", 2});
    EXPECT_GT(b.store.waiting_bytes(), 0U) << "one waits still";
    b.now += 2s;
    EXPECT_EQ(b.store.expire(b.now).size(), 1U);
    EXPECT_EQ(b.store.waiting_bytes(), 0U);
    b.ask(1, Wait{{"c"}});
    b.store.begin_generation(1);
    EXPECT_EQ(b.store.waiting_bytes(), 0U);
}

TEST(Store, WaitingForManyKeysInOrderIsNotQuadratic) {
    Bench b;
    std::vector<std::string> keys;
    for (int i = 0; i < 16384; ++i) keys.push_back(std::to_string(i));
    for (ClientId client = 1; client <= 8; ++client) b.ask(client, Wait{keys});
    std::size_t answered = 0;
    for (const std::string& key : keys) answered += b.ask(9, set_of(key, "")).size() - 1;
    EXPECT_EQ(answered, 8U);
}

constexpr std::size_t kFull = kRelayWindow;
constexpr ClientId kAgent = 7;

StoreAnswer answer_to(std::uint64_t client, std::uint32_t request, std::size_t bytes = 1) {
    return {{kAgent, client}, request, Value{Blob(std::string(bytes, 'v'))}};
}

/// The numbers of the requests that are answered when there is room for all.
std::vector<std::uint32_t> rest_of(HeldAnswers& held) {
    std::vector<std::uint32_t> requests;
    while (const std::optional<StoreAnswer> answer = held.next(0)) requests.push_back(answer->request);
    return requests;
}

TEST(HeldAnswers, PassWhileTheSessionHasRoom) {
    HeldAnswers held(100);
    EXPECT_TRUE(held.pass(answer_to(1, 1), kFull - 1));
    EXPECT_FALSE(held.next(0)) << "nothing was held";
}

TEST(HeldAnswers, WaitInOrderForRoom) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 2), 0)) << "behind the first, though there is room by now";
    EXPECT_FALSE(held.next(kFull));
    EXPECT_EQ(rest_of(held), (std::vector<std::uint32_t>{1, 2}));
    EXPECT_TRUE(held.pass(answer_to(1, 3), 0));
}

TEST(HeldAnswers, ToTheAgentItselfNeverWait) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1), kFull));
    EXPECT_TRUE(held.pass(answer_to(0, 2), kFull));
}

TEST(HeldAnswers, ToOneClientHaveALimitThatItIsToldOf) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1, 90), kFull));
    EXPECT_FALSE(held.pass(answer_to(1, 2, 11), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 3, 90), kFull)) << "another client's";
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
    const StoreReply refused = held.next(0)->reply;
    ASSERT_TRUE(std::holds_alternative<Failure>(refused));
    EXPECT_EQ(std::get<Failure>(refused).code, Errc::Limit);
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
}

TEST(HeldAnswers, ToADisconnectedClientAreDropped) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1, 90), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 2, 90), kFull));
    held.forget(1);
    EXPECT_FALSE(held.pass(answer_to(1, 3, 90), kFull)) << "one that has the number again begins at nothing";
    EXPECT_EQ(held.next(0)->request, 2U);
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
}

}  // namespace
}  // namespace ddprun::rdzv
