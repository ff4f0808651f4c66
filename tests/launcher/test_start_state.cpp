// The start of hosts: when one begins, when one counts as failed, and when its starter is killed.
#include "launcher/start/start_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using namespace start_event;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Duration kTimeout = 60s;

/// The start of nodes 1 to `others`: by ssh each, or by one srun.
struct Hosts {
    explicit Hosts(int others, bool by_one = false) {
        std::vector<StarterCommand> commands;
        for (int node = 1; node <= others && !by_one; ++node) commands.push_back({{"ssh"}, {node}});
        std::vector<int> all(static_cast<std::size_t>(others));
        std::iota(all.begin(), all.end(), 1);
        if (by_one) commands.push_back({{"srun"}, all});
        state = begin_start(std::move(commands), kTimeout);
    }
    StartActions feed(const StartEvent& event) {
        StartActions actions = step(state, event, now);
        while (actions.begin) {
            begun.push_back(*actions.begin);
            actions = step(state, Begun{*actions.begin, outcome}, now);
        }
        return actions;
    }
    [[nodiscard]] std::vector<std::string> failures() const {
        std::vector<std::string> lines;
        for (const auto& [node, why] : state.failures)
            lines.push_back("h" + std::to_string(node) + ": " + why);
        return lines;
    }
    StartState state;
    TimePoint now{1h};
    Status outcome;                  ///< of each starter that begins
    std::vector<std::size_t> begun;  ///< the starters that began, in their order
};

TEST(StartState, TwentyThousandHostsAreStartedAndEnd) {
    constexpr int kHosts = 20'000;
    Hosts hosts(kHosts);
    hosts.feed(TimePassed{});
    for (int node = 1; node < kHosts; ++node) hosts.feed(Joined{node});
    EXPECT_EQ(hosts.begun.size(), static_cast<std::size_t>(kHosts));
    EXPECT_TRUE(hosts.feed(Joined{kHosts}).settled);
    hosts.feed(Finish{10s});
    for (int node = 1; node < kHosts; ++node) hosts.feed(Ended{static_cast<std::size_t>(node - 1), 0});
    EXPECT_TRUE(hosts.feed(Ended{kHosts - 1, 0}).ended);
}

TEST(StartState, IsSettledWithoutFailuresWhenTheLastHostJoins) {
    Hosts hosts(2);
    EXPECT_FALSE(hosts.feed(TimePassed{}).settled);
    EXPECT_THAT(hosts.begun, ElementsAre(0u, 1u));
    EXPECT_FALSE(hosts.feed(Joined{2}).settled);
    EXPECT_TRUE(hosts.feed(Joined{1}).settled);
    EXPECT_THAT(hosts.failures(), IsEmpty());
    EXPECT_FALSE(hosts.feed(Ended{0, 0}).settled) << "a starter ends after its job has begun";
    EXPECT_THAT(hosts.failures(), IsEmpty());
}

TEST(StartState, AStarterThatFailsAtOnceIsReportedTwoSecondsLaterWithThoseThatFailByThen) {
    Hosts hosts(3);
    hosts.feed(TimePassed{});
    hosts.state.starters[1].words = "\nssh: Could not resolve hostname h2\n";
    EXPECT_FALSE(hosts.feed(Ended{1, 255}).settled);
    hosts.now += 1s;
    hosts.state.hosts[3].told = "no such program";
    EXPECT_FALSE(hosts.feed(TimePassed{}).settled);
    hosts.now += 999ms;
    EXPECT_FALSE(hosts.feed(TimePassed{}).settled);
    hosts.now += 1ms;
    EXPECT_TRUE(hosts.feed(TimePassed{}).settled);
    EXPECT_THAT(hosts.failures(),
                ElementsAre("h2: ssh: Could not resolve hostname h2", "h3: no such program"));
}

TEST(StartState, AHostThatHasToldWhyIsNotCountedAgainWhenItsStarterEnds) {
    Hosts hosts(2);
    hosts.feed(TimePassed{});
    hosts.state.hosts[2].told = "no GPU";
    hosts.feed(TimePassed{});
    EXPECT_FALSE(hosts.feed(Ended{1, 69}).settled) << "host 1 is still missing";
    EXPECT_THAT(hosts.failures(), ElementsAre("h2: no GPU"));
    EXPECT_TRUE(hosts.feed(Joined{1}).settled);
}

TEST(StartState, StartersThatCannotRunSettleTheStartAtOnce) {
    Hosts hosts(200);
    hosts.outcome = Error{Errc::NotFound, "ssh: not found in PATH", 0};
    EXPECT_TRUE(hosts.feed(TimePassed{}).settled);
    EXPECT_EQ(hosts.begun.size(), 200u);
    EXPECT_EQ(hosts.failures().back(), "h200: ssh: not found in PATH");
    EXPECT_TRUE(hosts.feed(Finish{10s}).ended) << "nothing runs";
}

TEST(StartState, AHostThatNeverJoinsFailsAfterTheTimeoutWithTheWordsOfItsStarter) {
    Hosts hosts(2);
    hosts.feed(TimePassed{});
    hosts.feed(Joined{1});
    hosts.now += kTimeout - 1ms;
    hosts.feed(TimePassed{});
    EXPECT_THAT(hosts.failures(), IsEmpty());
    hosts.now += 1ms;
    EXPECT_TRUE(hosts.feed(TimePassed{}).settled) << "no other host is missing";
    EXPECT_THAT(hosts.failures(),
                ElementsAre("h2: has not joined within 1 min (--start-timeout); ssh has said nothing"));
}

TEST(StartState, AtMost64StartAtATimeAndEachOfManyHostsHasItsTurn) {
    Hosts hosts(1500);
    hosts.feed(TimePassed{});
    EXPECT_EQ(hosts.begun.size(), kMostStarting);
    hosts.feed(Joined{8});
    EXPECT_EQ(hosts.begun.size(), kMostStarting + 1) << "one more for the one that has joined";
    for (int node = 1; node < 1500; ++node) EXPECT_FALSE(hosts.feed(Joined{node}).settled);
    EXPECT_TRUE(hosts.feed(Joined{1500}).settled);
    EXPECT_EQ(hosts.begun.size(), 1500u);
    EXPECT_TRUE(std::ranges::is_sorted(hosts.begun));
}

TEST(StartState, TheTimeoutCountsFromTheLastStarterThatBegan) {
    Hosts hosts(66);
    hosts.feed(TimePassed{});
    hosts.now += kTimeout - 1s;
    hosts.feed(Joined{1});
    hosts.now += kTimeout - 1ms;
    hosts.feed(TimePassed{});
    EXPECT_THAT(hosts.failures(), IsEmpty()) << "the second wave began with the join";
    hosts.now += 1ms;
    EXPECT_TRUE(hosts.feed(TimePassed{}).settled);
    EXPECT_EQ(hosts.failures().size(), 65u);
    EXPECT_EQ(hosts.failures().back(),
              "h66: has not joined within 1 min (--start-timeout); "
              "still queued behind 64 others");
}

TEST(StartState, AHostThatJoinsAfterItsStarterEndedHasFailed) {
    Hosts hosts(2);
    hosts.feed(TimePassed{});
    hosts.feed(Ended{0, std::nullopt});
    hosts.feed(Joined{1});
    EXPECT_TRUE(hosts.feed(Joined{2}).settled);
    EXPECT_THAT(hosts.failures(), ElementsAre("h1: ssh ended and said nothing"));
}

TEST(StartState, AllHostsOfAStarterThatEndsBeforeTheLastJoinsFailThoseThatHaveJoinedToo) {
    Hosts hosts(3, true);
    hosts.feed(TimePassed{});
    hosts.feed(Joined{1});
    hosts.state.hosts[2].told = "the program differs";
    EXPECT_TRUE(hosts.feed(Ended{0, 1}).settled);
    const std::string ended = "srun ended with exit code 1 and said nothing";
    EXPECT_THAT(hosts.failures(), ElementsAre("h1: " + ended, "h2: the program differs", "h3: " + ended));
}

TEST(StartState, AStopWhileHostsAreMissingBeginsNoOtherStarterAndKillsTheRestAfterTwoSeconds) {
    Hosts hosts(66);
    hosts.feed(TimePassed{});
    hosts.feed(Finish{10s});
    hosts.feed(Joined{1});
    EXPECT_EQ(hosts.begun.size(), kMostStarting);
    hosts.feed(Ended{0, 0});
    EXPECT_THAT(hosts.failures(), IsEmpty());
    hosts.now += 2s;
    const StartActions actions = hosts.feed(TimePassed{});
    EXPECT_EQ(actions.kill.size(), kMostStarting - 1);
    EXPECT_TRUE(actions.ended);
    EXPECT_FALSE(hosts.feed(Ended{1, 137}).ended) << "told once";
}

TEST(StartState, GivesLastLinesTheWholeTimeoutAfterTheJobExceptForASilentHost) {
    Hosts hosts(3);
    hosts.feed(TimePassed{});
    for (int node = 1; node <= 3; ++node) hosts.feed(Joined{node});
    hosts.feed(FellSilent{2});
    hosts.feed(FellSilent{3});
    hosts.feed(Joined{3});
    EXPECT_THAT(hosts.feed(Finish{10s}).kill, ElementsAre(1u)) << "the third has come back";
    hosts.feed(Ended{2, 0});
    hosts.now += 9s;
    EXPECT_THAT(hosts.feed(TimePassed{}).kill, IsEmpty());
    EXPECT_TRUE(hosts.feed(Ended{0, 0}).ended);
}

}  // namespace
}  // namespace ddprun
