// Checks the rules of recovery in place by trying every order of events: three ranks, the last of them on a
// node of its own, three units, and two losses of a process or of this node at any instant. Each rule that a
// comment in workers/ddp/recovery/ calls necessary is left out once, and the check then has to find a run
// that goes wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "ddp/recovery/transfer.h"

namespace ddp {
namespace {

constexpr int kRanks = 3, kUnits = 3, kKills = 2;
constexpr std::int8_t kTorn = 100;  ///< content that belongs to no commit

/// Where a rank is. From Compute to Changed it is inside the unit that follows its last commit.
enum class At : std::uint8_t {
    Dead,
    Waiting,    ///< let go, or a new process: waits for a generation
    Receiving,  ///< the generation's ranks exchange state
    Compute,
    Preparing,  ///< half of the copy of its own state is written
    Prepared,
    Entered,  ///< inside the unit's last collective
    Passed,
    HalfChanged,
    Changed,
    Finished
};

struct Rank {
    At at = At::Compute;
    bool whole = false;
    std::int8_t commits = 0;
    // The number of units after which each kind of state is as it is now.
    std::int8_t committed = 0, moving = 0, own = 0;
    std::int8_t moving_copy = 0;
    std::int8_t entered = -1;  ///< the last unit whose collective it has entered in this generation
    // Kept memory, which outlives the process.
    std::int8_t kept_commits = 0;
    std::array<std::int8_t, 3> slots = {0, kTorn, kTorn};
    bool is_memory_new = false;  ///< its node was lost, and it has stored nothing since
};
constexpr std::uint32_t node_of(std::size_t rank) { return rank == kRanks - 1 ? 1 : 0; }

struct World {
    std::array<Rank, kRanks> ranks;
    std::uint8_t kills = kKills;
    bool is_aborted = false;
    std::int8_t start = 0;  ///< the commits with which this generation's bodies start
    std::uint8_t round = 0;
    std::array<std::array<std::int8_t, 2>, 2 * kRanks> transfers = {};  ///< from, to; of all rounds
    std::array<std::uint8_t, 2 *kRanks> rounds = {}, progress = {};     ///< progress: 0, 1 half, 2 done
    std::uint8_t transfer_count = 0;

    [[nodiscard]] std::string key() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};
static_assert(std::has_unique_object_representations_v<World>);

using Rounds = std::vector<TransferRound>;

/// The rules, each of which a test leaves out.
struct Rules {
    bool change_calls_no_collective = true;
    bool own_is_logged_before_the_collective = true;
    int slots = 3;
    bool receiver_is_whole_after_the_last_byte = true;
    bool moving_is_restored = true;
    bool replacement_logs_after_the_exchange = true;
    bool own_begins_again_on_a_new_node = true;
    bool first_unit_may_begin_again = true;
    Rounds (*plan)(std::span<const Holder>) = plan_transfers;
};

class Model {
  public:
    explicit Model(Rules rules) : rules_(rules) {}

    /// The first thing that goes wrong in any run; "" when nothing does.
    std::string check() {
        visit(World{});
        while (!open_.empty() && problem_.empty()) {
            const World world = open_.front();
            open_.pop_front();
            const std::size_t before = successors_;
            expand(world);
            if (successors_ == before && !is_over(world)) fail("nobody can go on");
        }
        return problem_;
    }
    [[nodiscard]] std::size_t states() const { return seen_.size(); }

  private:
    static bool is_over(const World& world) {
        return std::all_of(world.ranks.begin(), world.ranks.end(),
                           [](const Rank& rank) { return rank.at == At::Finished; });
    }

    void visit(const World& world) {
        ++successors_;
        if (seen_.insert(world.key()).second) open_.push_back(world);
    }
    void fail(const std::string& what) {
        if (problem_.empty()) problem_ = what;
    }

    void expand(const World& world) {
        if (is_over(world)) return;  // the launcher releases them
        for (std::size_t i = 0; i < kRanks; ++i) {
            advance(world, i);
            if (may_let_go(world, world.ranks[i])) {
                World next = world;
                next.ranks[i].at = At::Waiting;
                visit(next);
            }
            if (world.kills > 0 && world.ranks[i].at != At::Dead) {
                World next = world;
                --next.kills;
                next.ranks[i].at = At::Dead;
                next.is_aborted = true;
                visit(next);
                if (node_of(i) == 0) continue;
                next.ranks[i].kept_commits = 0;
                next.ranks[i].slots = {kTorn, kTorn, kTorn};
                next.ranks[i].is_memory_new = true;
                visit(next);
            }
        }
        transfer(world);
        if (std::all_of(world.ranks.begin(), world.ranks.end(),
                        [](const Rank& rank) { return rank.at == At::Waiting; }))
            exchange(world);
    }

    /// A survivor learns of the failure in a collective, which it enters or is in. The launcher's release is
    /// one too.
    [[nodiscard]] bool may_let_go(const World& world, const Rank& rank) const {
        if (!world.is_aborted) return false;
        if (rank.at == At::HalfChanged) return !rules_.change_calls_no_collective;
        return rank.at == At::Receiving || rank.at == At::Compute || rank.at == At::Prepared ||
               rank.at == At::Entered || rank.at == At::Finished;
    }

    [[nodiscard]] std::int8_t& slot(Rank& rank, int commits) const {
        return rank.slots[static_cast<std::size_t>(commits % rules_.slots)];
    }

    void advance(const World& world, std::size_t i) {
        World next = world;
        Rank& rank = next.ranks[i];
        const auto after = static_cast<std::int8_t>(rank.commits + 1);
        switch (rank.at) {
            case At::Dead: replace(next, rank); break;
            case At::Waiting:
            case At::Finished: return;
            case At::Receiving:
                if (world.round < rounds_of(world)) return;
                start_body(next, rank);
                break;
            case At::Compute:
                if (rank.commits == kUnits) {
                    rank.at = At::Finished;
                    break;
                }
                rank.own = after;
                rank.moving = after;
                if (rules_.own_is_logged_before_the_collective) slot(rank, after) = kTorn;
                rank.at = At::Preparing;
                break;
            case At::Preparing:
                if (rules_.own_is_logged_before_the_collective) slot(rank, after) = after;
                rank.is_memory_new = false;
                rank.at = At::Prepared;
                break;
            case At::Prepared:
                rank.entered = rank.commits;
                rank.at = At::Entered;
                break;
            case At::Entered:
                if (!all_have_entered(world, rank.commits)) return;
                rank.at = At::Passed;
                break;
            case At::Passed:
                rank.committed = kTorn;
                rank.at = At::HalfChanged;
                break;
            case At::HalfChanged:
                rank.committed = after;
                rank.at = At::Changed;
                break;
            case At::Changed: commit(rank, after); break;
        }
        visit(next);
    }

    void replace(const World&, Rank& rank) const {
        Rank process;
        process.at = At::Waiting;
        process.kept_commits = rank.kept_commits;
        process.slots = rank.slots;
        process.is_memory_new = rank.is_memory_new;
        if (!rules_.replacement_logs_after_the_exchange) slot(process, 0) = 0;
        rank = process;
    }

    static bool all_have_entered(const World& world, std::int8_t unit) {
        return std::all_of(world.ranks.begin(), world.ranks.end(),
                           [unit](const Rank& rank) { return rank.entered >= unit; });
    }

    void commit(Rank& rank, std::int8_t after) const {
        if (!rules_.own_is_logged_before_the_collective) slot(rank, after) = after;
        rank.commits = rank.kept_commits = rank.moving_copy = after;
        rank.whole = true;
        rank.at = At::Compute;
    }

    /// All ranks of a new generation tell what they have.
    void exchange(World next) {
        next.is_aborted = false;
        next.round = next.transfer_count = 0;
        next.transfers = {};
        next.rounds = next.progress = {};
        std::vector<Holder> holders;
        int most_kept = 0;
        for (std::size_t i = 0; i < kRanks; ++i) {
            Rank& rank = next.ranks[i];
            rank.entered = -1;
            rank.at = At::Receiving;
            most_kept = std::max<int>(most_kept, rank.kept_commits);
            holders.push_back({static_cast<std::uint64_t>(rank.commits), rank.whole, node_of(i)});
        }
        const bool anybody =
            std::any_of(holders.begin(), holders.end(), [](const Holder& one) { return one.is_whole; });
        if (!anybody && (most_kept > 1 || (most_kept > 0 && !rules_.first_unit_may_begin_again)))
            return fail("no rank has the whole state");
        const bool any_is_torn = std::any_of(next.ranks.begin(), next.ranks.end(),
                                             [](const Rank& rank) { return rank.committed == kTorn; });
        if (!anybody && any_is_torn) return visit(restarted());  // the launcher restarts all ranks
        anybody ? plan(next, holders) : begin_again(next);
        if (next.start + 1 < most_kept)
            fail("a unit is lost that all ranks had contributed to and committed");
        visit(next);
    }

    /// The end of a run that was recovered by a restart of all ranks.
    static World restarted() {
        World world;
        for (Rank& rank : world.ranks) rank.at = At::Finished;
        return world;
    }

    static void begin_again(World& world) {
        world.start = 0;
        for (Rank& rank : world.ranks) {
            rank.commits = rank.committed = rank.moving = rank.moving_copy = rank.kept_commits = 0;
            rank.slots[0] = 0;
        }
    }

    void plan(World& world, const std::vector<Holder>& holders) const {
        world.start = 0;
        for (const Holder& one : holders) {
            if (one.is_whole) world.start = std::max(world.start, static_cast<std::int8_t>(one.commits));
        }
        std::uint8_t round = 0;
        for (const TransferRound& transfers : rules_.plan(holders)) {
            for (const Transfer& one : transfers) {
                world.transfers[world.transfer_count] = {static_cast<std::int8_t>(one.from),
                                                         static_cast<std::int8_t>(one.to)};
                world.rounds[world.transfer_count++] = round;
            }
            ++round;
        }
    }

    static std::uint8_t rounds_of(const World& world) {
        return world.transfer_count == 0
                   ? std::uint8_t{0}
                   : static_cast<std::uint8_t>(world.rounds[world.transfer_count - 1U] + 1);
    }

    /// Each transfer of the round has two steps; between them the receiver's state is torn. The ranks meet
    /// between two rounds.
    void transfer(const World& world) {
        bool is_round_done = true;
        for (std::size_t i = 0; i < world.transfer_count; ++i) {
            if (world.rounds[i] != world.round || world.progress[i] == 2) continue;
            is_round_done = false;
            World next = world;
            const Rank& from = world.ranks[static_cast<std::size_t>(world.transfers[i][0])];
            Rank& to = next.ranks[static_cast<std::size_t>(world.transfers[i][1])];
            if (from.at != At::Receiving || to.at != At::Receiving) continue;
            if (++next.progress[i] == 1) {
                to.committed = to.moving_copy = kTorn;
                to.whole = false;
            } else {
                to.committed = from.committed;
                to.moving_copy = from.moving_copy;
            }
            if (next.progress[i] == (rules_.receiver_is_whole_after_the_last_byte ? 2 : 1)) {
                to.commits = to.kept_commits = from.commits;
                to.whole = true;
            }
            visit(next);
        }
        const bool all_meet = std::all_of(world.ranks.begin(), world.ranks.end(),
                                          [](const Rank& rank) { return rank.at == At::Receiving; });
        if (!is_round_done || !all_meet || world.round >= rounds_of(world)) return;
        World next = world;
        ++next.round;
        visit(next);
    }

    void start_body(const World& world, Rank& rank) {
        if (rank.is_memory_new && rules_.own_begins_again_on_a_new_node) {
            slot(rank, world.start) = world.start;  // the first values
            rank.is_memory_new = false;
        }
        rank.own = slot(rank, world.start);
        if (rules_.moving_is_restored) rank.moving = rank.moving_copy;
        rank.at = At::Compute;
        if (rank.own != world.start) fail("a rank's own state is lost");
        if (rank.committed != world.start || rank.commits != world.start)
            fail("a body starts with another commit's state");
        if (rank.moving != world.start) fail("a unit is repeated with moved state");
    }

    const Rules rules_;
    std::unordered_set<std::string> seen_;
    std::deque<World> open_;
    std::size_t successors_ = 0;
    std::string problem_;
};

/// The receivers in rounds of one, those for which `first` is true before the others.
template <class First>
Rounds one_by_one(std::span<const Holder> ranks, First first) {
    const Rounds planned = plan_transfers(ranks);
    if (planned.empty()) return {};
    const std::uint32_t source = planned.front().front().from;
    Rounds rounds;
    for (const bool wanted : {true, false}) {
        for (const TransferRound& round : planned) {
            for (const Transfer& one : round) {
                if (first(ranks[one.to]) == wanted) rounds.push_back({{source, one.to}});
            }
        }
    }
    return rounds;
}
Rounds older_receivers_first(std::span<const Holder> ranks) {
    return one_by_one(ranks, [](const Holder& one) { return one.is_whole; });
}
Rounds everybody_at_once(std::span<const Holder> ranks) {
    TransferRound all;
    for (const TransferRound& round : older_receivers_first(ranks)) all.push_back(round.front());
    return all.empty() ? Rounds{} : Rounds{all};
}

std::string problem_with(const Rules& rules) { return Model(rules).check(); }

TEST(RecoveryModel, EveryOrderOfTwoLossesEndsWithAllUnitsCommittedOnce) {
    Model model{Rules{}};
    EXPECT_EQ(model.check(), "");
    EXPECT_GT(model.states(), 100'000u) << "of all interleavings";
}

TEST(RecoveryModel, ACollectiveInsideTheChangeWouldLeaveASurvivorTorn) {
    EXPECT_NE(problem_with({.change_calls_no_collective = false}), "");
}

TEST(RecoveryModel, OwnStateSavedAtTheCommitWouldBeLost) {
    EXPECT_EQ(problem_with({.own_is_logged_before_the_collective = false}), "a rank's own state is lost");
}

TEST(RecoveryModel, TwoSlotsWouldLoseTheOwnStateOfTheUnitBefore) {
    EXPECT_EQ(problem_with({.slots = 2}), "a rank's own state is lost");
}

TEST(RecoveryModel, AReceiverThatCountsAsWholeAtItsFirstByteWouldGiveTornState) {
    EXPECT_EQ(problem_with({.receiver_is_whole_after_the_last_byte = false}),
              "a body starts with another commit's state");
}

TEST(RecoveryModel, AUnitRepeatedWithoutRestoringMovingStateWouldSkipSamples) {
    EXPECT_EQ(problem_with({.moving_is_restored = false}), "a unit is repeated with moved state");
}

TEST(RecoveryModel, AReplacementThatLogsItsInitialStateAtOnceWouldOverwriteItsPredecessors) {
    EXPECT_EQ(problem_with({.replacement_logs_after_the_exchange = false}), "a rank's own state is lost");
}

TEST(RecoveryModel, OwnStateThatWasLostWithItsNodeHasToBeginAgain) {
    EXPECT_EQ(problem_with({.own_begins_again_on_a_new_node = false}), "a rank's own state is lost");
}

TEST(RecoveryModel, TheFirstUnitBeginsAgainWhereTheOnlyRankThatCommittedItDied) {
    EXPECT_EQ(problem_with({.first_unit_may_begin_again = false}), "no rank has the whole state");
}

TEST(RecoveryModel, OlderReceiversFirstWouldLoseTheLastWholeCopy) {
    EXPECT_EQ(problem_with({.plan = older_receivers_first}), "no rank has the whole state");
}

TEST(RecoveryModel, AllReceiversAtOnceWouldLoseTheLastWholeCopy) {
    EXPECT_EQ(problem_with({.plan = everybody_at_once}), "no rank has the whole state");
}

}  // namespace
}  // namespace ddp
