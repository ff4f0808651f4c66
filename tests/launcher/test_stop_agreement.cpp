#include "launcher/head/stop_agreement.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "env/segment.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{1000s};

/// An agreement of two nodes, before any answer.
struct OfTwo {
    StopAgreement state;
    StopActions tell(const StopEvent& event, Duration after = 0s) {
        return step(state, event, kStart + after);
    }
    StopActions notice(Duration time = 30s) { return tell(stop_event::Noticed{{0, 1}, time}); }
    StopActions answer(int node, std::uint64_t step, std::uint64_t highest, bool listens = true) {
        return tell(stop_event::Answered{node, step, listens, highest});
    }
};

TEST(StopAgreement, StopsAfterTheStepThatFollowsTheHighest) {
    OfTwo job;
    EXPECT_EQ(job.notice().propose, 0u) << "first it asks how far the ranks are";
    EXPECT_FALSE(job.answer(0, 0, 7).propose) << "the other node has not answered";
    EXPECT_EQ(job.answer(1, 0, 9).propose, 10u);
    EXPECT_FALSE(job.answer(0, 10, 8).decide);
    const StopActions last = job.answer(1, 10, 9);
    ASSERT_TRUE(last.decide);
    EXPECT_EQ(last.decide->step, 10u);
    EXPECT_EQ(job.state.phase, StopAgreement::Phase::Closed);
}

TEST(StopAgreement, ProposesAgainWithTwiceTheMarginWhenARankHasPassedTheStep) {
    OfTwo job;
    job.notice();
    job.answer(0, 0, 7);
    job.answer(1, 0, 9);
    EXPECT_FALSE(job.answer(0, 10, 12).decide);
    EXPECT_EQ(job.answer(1, 10, 9).propose, 14u);
    job.answer(0, 14, 14);
    EXPECT_EQ(job.answer(1, 14, 9).propose, 18u);
}

TEST(StopAgreement, IgnoresTheAnswerToAnEarlierProposal) {
    OfTwo job;
    job.notice();
    job.answer(0, 0, 7);
    job.answer(1, 0, 9);
    EXPECT_FALSE(job.answer(0, 0, 7).decide);
    EXPECT_FALSE(job.answer(1, 10, 9).decide) << "node 0 has not answered the proposal";
}

TEST(StopAgreement, EndsAtOnceWhenARankDoesNotListen) {
    OfTwo job;
    job.notice();
    const StopActions first = job.answer(0, 0, 7, false);
    ASSERT_TRUE(first.decide);
    EXPECT_EQ(first.decide->step, 0u);
    EXPECT_EQ(first.decide->why, "") << "a program without should_stop() is nothing to complain about";
}

TEST(StopAgreement, IsNotTriedWhenTheTimeIsNear) {
    OfTwo job;
    const StopActions first = job.notice(900ms);
    EXPECT_FALSE(first.propose);
    ASSERT_TRUE(first.decide);
    EXPECT_EQ(first.decide->step, 0u);
}

TEST(StopAgreement, EndsAfterAQuarterOfTheTimeOrThreeSeconds) {
    OfTwo near, far;
    near.notice(2s);
    EXPECT_EQ(near.state.deadline, kStart + 500ms);
    EXPECT_FALSE(near.tell(stop_event::TimerFired{}, 499ms).decide);
    const StopActions late = near.tell(stop_event::TimerFired{}, 500ms);
    ASSERT_TRUE(late.decide);
    EXPECT_EQ(late.decide->step, 0u);
    far.notice(1h);
    EXPECT_EQ(far.state.deadline, kStart + 3s);
}

TEST(StopAgreement, EndsWhenAWorkerFailsOrANodeIsLost) {
    OfTwo job;
    job.notice();
    job.answer(0, 0, 7);
    job.answer(1, 0, 9);
    const StopActions broken = job.tell(stop_event::Broken{"node node01 is lost"});
    ASSERT_TRUE(broken.decide);
    EXPECT_EQ(broken.decide->step, 0u);
    EXPECT_EQ(broken.decide->why, "node node01 is lost");
    EXPECT_FALSE(job.tell(stop_event::Broken{"again"}).decide);
    EXPECT_FALSE(job.answer(1, 10, 9).decide);
}

/// Ranks in loops, two on each of two nodes, and messages between nodes and head that take their time.
/// One act of anybody at a time, in a random order.
class Loops {
  public:
    Loops(std::uint64_t seed, bool is_coupled) : random_(seed), is_coupled_(is_coupled) {}

    /// The steps after which the ranks stopped; empty: they did not all stop.
    std::set<std::uint64_t> drain() {
        const int before = below(2000);
        for (int i = 0; i < before; ++i) move(random_() % kRanks);
        take(step(agreement_, stop_event::Noticed{{0, 1}, 30s}, kStart));
        for (int acts = 0; acts < 100'000 && !have_all_stopped(); ++acts) {
            if (below(20) == 0) deliver();
            else move(random_() % kRanks);
        }
        std::set<std::uint64_t> steps;
        for (const Rank& rank : ranks_) steps.insert(rank.has_stopped ? rank.step : UINT64_MAX);
        return steps;
    }

  private:
    static constexpr std::size_t kRanks = 4;
    struct Rank {
        std::uint64_t step = 0, asked = 0, stop = 0;
        bool has_stopped = false, is_asking = false;
    };
    struct Message {
        std::size_t node;
        std::uint64_t step;
        enum { Proposal, Decision, Written } kind;
    };

    int below(int limit) { return static_cast<int>(random_() % static_cast<std::uint64_t>(limit)); }
    bool have_all_stopped() const {
        return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.has_stopped; });
    }
    /// One act of a rank: it finishes a step and stores it, or looks for a stop.
    void move(std::size_t number) {
        Rank& rank = ranks_[number];
        if (rank.has_stopped) return;
        if (!rank.is_asking) {
            const bool waits = is_coupled_ && std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& one) {
                                   return one.step < rank.step || (one.has_stopped && one.step <= rank.step);
                               });
            if (waits) return;  // in a collective
            ++rank.step;
            rank.asked = rank.step + 1;
            rank.is_asking = true;
            return;
        }
        if (rank.stop == 0 || step_of_stop(rank.stop) > rank.step) rank.is_asking = false;
        else if (stop_is_agreed(rank.stop)) rank.has_stopped = true;
    }
    void take(const StopActions& actions) {
        for (const std::size_t node : {0u, 1u}) {
            if (actions.propose) under_way_.push_back({node, *actions.propose, Message::Proposal});
            if (actions.decide) under_way_.push_back({node, actions.decide->step, Message::Decision});
        }
    }
    /// An act of an agent: to write what a message says, or, in a later act, to read its ranks and answer.
    void deliver() {
        if (under_way_.empty()) return;
        const auto one = under_way_.begin() + below(static_cast<int>(under_way_.size()));
        const Message message = *one;
        under_way_.erase(one);
        std::uint64_t highest = 0;
        bool listens = true;
        for (std::size_t i = 2 * message.node; i < 2 * message.node + 2; ++i) {
            Rank& rank = ranks_[i];
            if (message.kind == Message::Proposal && message.step > 0)
                rank.stop = stop_word(message.step, false);
            if (message.kind == Message::Decision)
                rank.stop = message.step == 0 ? 0 : stop_word(message.step, true);
            listens = listens && rank.asked > 0;
            highest = std::max(highest, rank.asked - (rank.asked > 0 ? 1 : 0));
        }
        if (message.kind == Message::Proposal)
            under_way_.push_back({message.node, message.step, Message::Written});
        if (message.kind == Message::Written)
            take(step(agreement_,
                      stop_event::Answered{static_cast<int>(message.node), message.step, listens, highest},
                      kStart));
    }

    std::mt19937_64 random_;
    bool is_coupled_;
    std::array<Rank, kRanks> ranks_{};
    std::vector<Message> under_way_;
    StopAgreement agreement_;
};

TEST(StopAgreement, StopsAllRanksAfterTheSameStepInAnyOrderOfEvents) {
    for (std::uint64_t seed = 1; seed <= 500; ++seed) {
        for (const bool is_coupled : {true, false}) {
            const std::set<std::uint64_t> steps = Loops(seed, is_coupled).drain();
            // Ranks that have not begun do not listen, and go on.
            if (steps == std::set{UINT64_MAX}) continue;
            ASSERT_EQ(steps.size(), 1u) << "seed " << seed << (is_coupled ? ", coupled" : "");
        }
    }
}

}  // namespace
}  // namespace ddprun
