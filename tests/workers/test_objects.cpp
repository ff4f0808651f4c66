#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "ddp/objects.h"
#include "ddp/testing.h"

namespace {

using namespace ddp;
using ddp::testing::run_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A type of the user.
struct Shard {
    std::string file;
    std::vector<int> samples;
    bool operator==(const Shard&) const = default;
};
void to_json(nlohmann::json& json, const Shard& shard) {
    json = {{"file", shard.file}, {"samples", shard.samples}};
}
void from_json(const nlohmann::json& json, Shard& shard) {
    json.at("file").get_to(shard.file);
    json.at("samples").get_to(shard.samples);
}

Shard shard_of(int rank) {
    return {"part-" + std::to_string(rank), std::vector<int>(static_cast<std::size_t>(rank), rank)};
}

template <class Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const InvalidInput& error) {
        return error.what();
    }
    return "no error";
}

TEST(Objects, AreGatheredByRank) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
        run_ranks(ranks, [ranks](ProcessGroup& group) {
            const std::vector<Shard> all = all_gather_object(group, shard_of(group.rank()));
            ASSERT_EQ(all.size(), static_cast<std::size_t>(ranks));
            for (int r = 0; r < ranks; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], shard_of(r));
            const std::vector<double> numbers = gather_object(group, 0.1 * group.rank(), ranks - 1);
            EXPECT_EQ(numbers.size(), group.rank() == ranks - 1 ? all.size() : 0);
            if (!numbers.empty()) {
                EXPECT_EQ(numbers.back(), 0.1 * (ranks - 1)) << "to the last bit";
            }
        });
    }
}

TEST(Objects, ReachAllRanksFromTheRootOrOneRankEach) {
    run_ranks(3, [](ProcessGroup& group) {
        const std::map<std::string, std::string> settings{{"lr", group.rank() == 2 ? "0.1" : "mine"}};
        EXPECT_EQ(broadcast_object(group, settings, 2).at("lr"), "0.1");
        std::vector<Shard> shards;
        for (int r = 0; group.rank() == 1 && r < 3; ++r) shards.push_back(shard_of(r));
        EXPECT_EQ(scatter_object(group, shards, 1), shard_of(group.rank()));
    });
}

TEST(Objects, ThatCannotBeSentAreRefusedOnAllRanksAndTheGroupStaysUsable) {
    run_ranks(3, [](ProcessGroup& group) {
        const std::string text(group.rank() == 1 ? kMostObjectBytes : 3, 'x');
        EXPECT_THAT(
            error_of([&] { all_gather_object(group, text); }),
            AllOf(HasSubstr("all_gather_object: the object of rank 1: "), HasSubstr("at most 67108864 go")));
        EXPECT_THAT(error_of([&] { scatter_object(group, std::vector<int>(2), 0); }),
                    HasSubstr("scatter_object: the object of rank 0: 2 of them for 3 ranks"));
        EXPECT_THAT(all_gather_object(group, group.rank()), ElementsAre(0, 1, 2));
    });
}

TEST(Objects, RefuseARootThatIsNoRankAtTheCall) {
    run_ranks(2, [](ProcessGroup& group) {
        for (const int root : {-1, 2, 7}) {
            const std::string why = ": root " + std::to_string(root) + " is not a rank of 0-1";
            EXPECT_EQ(error_of([&] { broadcast_object(group, 1, root); }), "broadcast_object" + why);
            EXPECT_EQ(error_of([&] { gather_object(group, 1, root); }), "gather_object" + why);
            EXPECT_EQ(error_of([&] {
                          scatter_object(group, std::vector{1, 2}, root);
                      }),
                      "scatter_object" + why);
        }
        EXPECT_THAT(all_gather_object(group, group.rank()), ElementsAre(0, 1));
    });
}

TEST(Objects, OfAnotherTypeAreAnErrorThatNamesTheirRank) {
    run_ranks(2, [](ProcessGroup& group) {
        const std::string error = error_of([&] {
            if (group.rank() == 0) all_gather_object(group, std::string("a text"));
            else all_gather_object(group, 7);
        });
        EXPECT_THAT(error, HasSubstr("the object of rank " + std::to_string(1 - group.rank()) + ": "));
        EXPECT_THAT(all_gather_object(group, group.rank()), ElementsAre(0, 1));
    });
}

}  // namespace
