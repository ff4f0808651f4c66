#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "rendezvous/client/relay_state.h"
#include "rendezvous/serve/store.h"
#include "tests/rendezvous/store_values.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;
using namespace store_op;
using ::testing::HasSubstr;

constexpr ClientId kRelayAgent = 9;

StoreRequest relayed(StoreOp op, std::optional<Duration> timeout = std::nullopt) {
    return {0, timeout, std::move(op)};
}

/// A relay, a store, and the connection between them, which holds messages until the test delivers them.
struct Way {
    void ask(std::uint64_t client, StoreOp op, std::optional<Duration> timeout = std::nullopt) {
        take(relay.ask(client, ++asked[client], relayed(std::move(op), timeout), now));
    }
    void take(RelayState::Actions actions) {
        for (auto& one : actions.forward) there.push_back(std::move(one));
        for (auto& one : actions.told) told[one.client].push_back(one.reply);
    }
    /// Delivers the next request, or all of them, to the store.
    void hear() {
        RelayState::Forward next = std::move(there.front());
        there.pop_front();
        const StoreClientId client{kRelayAgent, next.request.client};
        for (StoreAnswer& answer : store.apply(client, next.number, std::move(next.request), now))
            back.push_back(std::move(answer));
        for (StoreAnswer& answer : store.expire(now)) back.push_back(std::move(answer));
    }
    void hear_all() {
        while (!there.empty()) hear();
    }
    /// Delivers the store's next answer.
    void arrive() {
        const StoreAnswer next = std::move(back.front());
        back.pop_front();
        take(relay.answer(next.request, next.reply, now));
    }
    void settle() {
        while (!there.empty() || !back.empty()) {
            hear_all();
            while (!back.empty()) arrive();
        }
    }
    void leave(std::uint64_t client) {
        std::erase_if(there, [&](const auto& one) {
            return one.request.client == client;
        });  // arrives before the message of its end, for no client
        store.disconnect({kRelayAgent, client});
        take(relay.leave(client, now));
    }
    void pass(Duration span) {
        now += span;
        for (StoreAnswer& answer : store.expire(now)) back.push_back(std::move(answer));
        take(relay.expire(now));
    }
    /// The client's last answer; a Failure "nothing" if there is none.
    [[nodiscard]] StoreReply last(std::uint64_t client) const {
        const auto mine = told.find(client);
        return mine == told.end() || mine->second.empty() ? StoreReply(Failure{Errc::System, "nothing"})
                                                          : mine->second.back();
    }
    [[nodiscard]] std::string failure(std::uint64_t client) const {
        const StoreReply reply = last(client);
        const auto* failed = std::get_if<Failure>(&reply);
        return failed == nullptr ? "no failure" : failed->what;
    }

    RelayState relay;
    Store store;
    TimePoint now = t0;
    std::deque<RelayState::Forward> there;
    std::deque<StoreAnswer> back;
    std::map<std::uint64_t, std::uint32_t> asked;
    std::map<std::uint64_t, std::vector<StoreReply>> told;
};

TEST(RelayState, GivesEachClientItsOwnAnswers) {
    Way way;
    way.ask(1, Add{"n", 1});
    way.ask(2, Add{"n", 10});
    way.ask(1, set_of("k", "v"));
    way.settle();
    EXPECT_EQ(way.told[1], (std::vector<StoreReply>{Sum{1}, Done{}}));
    EXPECT_EQ(way.told[2], (std::vector<StoreReply>{Sum{11}}));
    EXPECT_EQ(way.relay.under_way(), 0U);
}

TEST(RelayState, SendsOneFurtherRequestForAllClientsWithTheSameRead) {
    Way way;
    for (std::uint64_t client = 1; client <= 64; ++client) way.ask(client, Get{"id"});
    EXPECT_EQ(way.there.size(), 1U);
    way.hear_all();
    way.ask(99, set_of("id", "v"));
    way.hear();
    way.arrive();
    EXPECT_EQ(way.last(1), value("v"));
    EXPECT_EQ(way.there.size(), 1U) << "63 of them with one question";
    way.settle();
    for (std::uint64_t client = 1; client <= 64; ++client) EXPECT_EQ(way.last(client), value("v"));
}

TEST(RelayState, NeverAnswersWithAValueFromBeforeTheRequest) {
    Way way;
    way.ask(99, set_of("k", "old"));
    way.ask(1, Get{"k"});
    way.ask(2, TryGet{"k"});
    way.hear_all();
    way.ask(99, set_of("k", "new"));
    way.hear_all();
    way.ask(3, Get{"k"});  // after the change of the value, before the first answer arrives
    way.ask(4, TryGet{"k"});
    way.settle();
    EXPECT_EQ(way.last(1), value("old"));
    EXPECT_EQ(way.last(2), value("old"));
    EXPECT_EQ(way.last(3), value("new"));
    EXPECT_EQ(way.last(4), value("new"));
}

TEST(RelayState, SharesOnlyWaitsForTheSameKeys) {
    Way way;
    way.ask(1, Wait{{"a", "b"}});
    way.ask(2, Wait{{"a", "b"}});
    EXPECT_EQ(way.there.size(), 1U);
    way.ask(3, Wait{{"ab"}});
    way.ask(4, Wait{{"a"}});
    way.ask(5, Get{"a"});
    EXPECT_EQ(way.there.size(), 4U);
    way.ask(9, set_of("a", ""));
    way.ask(9, set_of("b", ""));
    way.settle();
    EXPECT_EQ(way.last(1), StoreReply(Done{}));
    EXPECT_EQ(way.last(2), StoreReply(Done{}));
    EXPECT_EQ(way.told[3].size(), 0U);
}

TEST(RelayState, KeepsTheOrderOfAClientsRequests) {
    Way way;
    way.ask(1, Get{"k"});
    way.ask(2, Get{"k"});             // waits behind the other client's
    way.ask(2, set_of("k", "by 2"));  // must not overtake
    ASSERT_EQ(way.there.size(), 3U);
    EXPECT_TRUE(std::holds_alternative<Get>(way.there[1].request.op));
    way.settle();
    EXPECT_EQ(way.told[2], (std::vector<StoreReply>{value("by 2"), Done{}}));
}

TEST(RelayState, EachClientHasItsOwnTimeout) {
    Way way;
    way.ask(1, Get{"k"}, 10s);
    way.ask(2, Get{"k"}, 1s);
    way.ask(3, Get{"k"});
    way.hear_all();
    way.pass(1s);
    way.settle();
    EXPECT_THAT(way.failure(2), HasSubstr("key 'k' not set within 1 s"));
    EXPECT_EQ(way.told.contains(1) || way.told.contains(3), false);
    way.pass(9s);
    way.settle();
    EXPECT_THAT(way.failure(1), HasSubstr("key 'k' not set within 10 s"));
    way.ask(9, set_of("k", "v"));
    way.settle();
    EXPECT_EQ(way.last(3), value("v"));
}

TEST(RelayState, AClientThatTimesOutBehindOthersIsToldWhatTheStoreKnows) {
    Way way;
    way.ask(9, set_of("k", "v"));
    way.ask(1, Get{"k"});
    way.ask(2, Get{"k"}, 1ms);
    way.hear_all();  // the answers are still under way
    way.pass(1ms);
    way.settle();
    EXPECT_EQ(way.last(2), value("v")) << "it was there all the time";
}

TEST(RelayState, ATimeoutOfTheFirstClientLeavesTheOthersWaiting) {
    Way way;
    way.ask(1, Get{"k"}, 1s);
    way.ask(2, Get{"k"}, 5s);
    way.ask(3, Get{"k"}, 3s);
    way.hear_all();
    way.pass(1s);
    way.settle();
    EXPECT_THAT(way.failure(1), HasSubstr("within 1 s"));
    way.pass(2s);
    way.settle();
    EXPECT_THAT(way.failure(3), HasSubstr("within 3 s"));
    way.ask(9, set_of("k", "v"));
    way.settle();
    EXPECT_EQ(way.last(2), value("v"));
}

TEST(RelayState, NothingWaitsForAClientThatIsGone) {
    Way way;
    way.ask(1, Get{"k"});
    way.ask(2, Get{"k"});
    way.ask(3, Get{"k"});
    way.hear_all();
    way.leave(1);  // the relay asked the store as this client
    way.leave(3);
    way.ask(9, set_of("k", "v"));
    way.settle();
    EXPECT_EQ(way.last(2), value("v"));
    EXPECT_EQ(way.told.contains(1) || way.told.contains(3), false);
    EXPECT_EQ(way.relay.under_way(), 0U);
    EXPECT_EQ(way.store.waiters(), 0U);
}

TEST(RelayState, ARelayedClientCountsOnceInABarrier) {
    Way way;
    way.ask(1, Barrier{"b", 3});
    way.ask(2, Barrier{"b", 3});
    way.settle();
    way.leave(2);
    way.ask(3, Barrier{"b", 3});
    way.settle();
    EXPECT_FALSE(way.told.contains(1)) << "two of three are inside";
    way.ask(4, Barrier{"b", 3});
    way.settle();
    EXPECT_EQ(way.last(1), StoreReply(Done{}));
    EXPECT_EQ(way.last(4), StoreReply(Done{}));
}

TEST(RelayState, ALostSessionEndsAllRequests) {
    Way way;
    way.ask(1, Get{"k"}, 1s);
    way.ask(2, Get{"k"}, 2s);
    way.ask(3, Add{"n", 1});
    way.take(way.relay.lose({Errc::Closed, "the head is lost"}));
    for (const std::uint64_t client : {1, 2, 3}) EXPECT_EQ(way.failure(client), "the head is lost");
    EXPECT_EQ(way.relay.under_way(), 0U);
    EXPECT_EQ(way.relay.next_deadline(), kNever);
    way.hear_all();
    while (!way.back.empty()) way.arrive();
    EXPECT_EQ(way.told[3].size(), 1U) << "nobody is answered twice";
}

/// In any order of events each request is answered once, no read returns a value older than one that was
/// acknowledged before the request, and nothing is left.
TEST(RelayState, AnswersOnceAndNeverWithOldValuesInAnyOrderOfEvents) {
    for (unsigned seed = 1; seed <= 2000; ++seed) {
        std::mt19937 random(seed);
        const auto pick = [&](unsigned count) { return static_cast<std::uint64_t>(random() % count); };
        Way way;
        std::map<std::uint64_t, int> oldest;  // the oldest value that the client's read may return
        int written = 0, acknowledged = 0;
        constexpr std::uint64_t kWriter = 100;
        way.ask(kWriter, set_of("k", "0"));
        way.settle();
        for (int step = 0; step < 60; ++step) {
            switch (pick(6)) {
                case 0:
                case 1: {
                    const std::uint64_t reader = 1 + pick(4);
                    if (way.asked[reader] != way.told[reader].size()) break;
                    oldest[reader] = acknowledged;
                    if (pick(2) == 0) way.ask(reader, TryGet{"k"});
                    else
                        way.ask(reader, Get{"k"}, pick(2) == 0 ? std::optional<Duration>(1ms) : std::nullopt);
                    break;
                }
                case 2:
                    if (way.asked[kWriter] == way.told[kWriter].size())
                        way.ask(kWriter, set_of("k", std::to_string(++written)));
                    break;
                case 3:
                    if (!way.there.empty()) way.hear();
                    break;
                case 4:
                    if (!way.back.empty()) way.arrive();
                    break;
                default: way.pass(1ms);
            }
            if (way.asked[kWriter] == way.told[kWriter].size()) acknowledged = written;
            for (std::uint64_t reader = 1; reader <= 4; ++reader) {
                if (way.told[reader].empty()) continue;
                const StoreReply last = way.last(reader);
                ASSERT_TRUE(std::holds_alternative<Value>(last))
                    << "seed " << seed << ": " << way.failure(reader);
                if (way.asked[reader] != way.told[reader].size()) continue;
                ASSERT_GE(std::stoi(std::string(std::get<Value>(last).value.view())), oldest[reader])
                    << "seed " << seed;
            }
        }
        way.settle();
        for (const auto& [client, count] : way.asked)
            ASSERT_EQ(way.told[client].size(), count) << "seed " << seed << " client " << client;
        ASSERT_EQ(way.relay.under_way(), 0U);
        ASSERT_EQ(way.relay.next_deadline(), kNever);
    }
}

}  // namespace
}  // namespace ddprun::rdzv
