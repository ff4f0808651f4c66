// The decisions of agents as PMIx servers of their workers, and of the head for all of them; no libpmix.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "env/io/file.h"
#include "launcher/guard/job_directory.h"
#include "launcher/node/pmix/exchange.h"
#include "launcher/node/pmix/job_facts.h"
#include "launcher/node/pmix/wish.h"
#include "rendezvous/wire/protocol_limits.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// ---- fences

constexpr rdzv::AgentId kFirst = 11, kSecond = 12, kThird = 13;

/// Three nodes with two ranks each, in generation 4.
PmixExchange three_nodes() {
    PmixExchange exchange;
    exchange.begin("c0ffee", 4,
                   {{kFirst, "node00", 0, 2}, {kSecond, "node01", 2, 2}, {kThird, "node02", 4, 2}});
    return exchange;
}

rdzv::FenceEntered fence(const std::string& ranks, const std::string& data, std::uint64_t generation = 4) {
    return {generation, ranks, rdzv::Blob(data)};
}

std::vector<rdzv::AgentId> receivers(const PmixExchange::Messages& messages) {
    std::vector<rdzv::AgentId> agents;
    for (const auto& [agent, message] : messages) agents.push_back(agent);
    return agents;
}

/// True when all messages are equal.
rdzv::FenceOver over(const PmixExchange::Messages& messages) {
    if (messages.empty()) return {0, "nothing was said", "nothing was said", {}};
    for (const auto& [agent, message] : messages) EXPECT_EQ(message, messages.front().message);
    return std::get<rdzv::FenceOver>(messages.front().message);
}

rdzv::ModexReply reply_in(const PmixExchange::Messages& messages) {
    return std::get<rdzv::ModexReply>(messages.front().message);
}

TEST(PmixFence, IsCompleteWhenTheLastNodeEntersAndGivesEverybodyAllParts) {
    PmixExchange exchange = three_nodes();
    EXPECT_THAT(exchange.entered(kThird, fence("0-5", "c")), IsEmpty());
    EXPECT_THAT(exchange.entered(kFirst, fence("0-5", "a")), IsEmpty());
    EXPECT_EQ(exchange.missing("0-5"), "node01 (ranks 2-3)");
    const PmixExchange::Messages last = exchange.entered(kSecond, fence("0-5", "b"));
    EXPECT_THAT(receivers(last), ElementsAre(kFirst, kSecond, kThird));
    EXPECT_EQ(over(last), (rdzv::FenceOver{4, "0-5", "", rdzv::Blob("abc")}));
    EXPECT_EQ(exchange.missing("0-5"), "");
}

TEST(PmixFence, OfSomeRanksWaitsForTheirNodesOnly) {
    PmixExchange exchange = three_nodes();
    EXPECT_THAT(exchange.entered(kFirst, fence("1, 4", "a")), IsEmpty());
    const PmixExchange::Messages last = exchange.entered(kThird, fence("1, 4", "c"));
    EXPECT_THAT(receivers(last), ElementsAre(kFirst, kThird));
    EXPECT_EQ(over(last).failure, "");
}

TEST(PmixFence, OfTheSameRanksCanFollowAnother) {
    PmixExchange exchange = three_nodes();
    for (const char* round : {"x", "y"}) {
        exchange.entered(kFirst, fence("0-5", round));
        exchange.entered(kSecond, fence("0-5", round));
        EXPECT_EQ(over(exchange.entered(kThird, fence("0-5", round))).data,
                  rdzv::Blob(std::string(3, *round)));
    }
}

TEST(PmixFence, IsIndependentOfAFenceOfOtherRanks) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-3", "whole"));
    exchange.entered(kFirst, fence("0, 2", "part"));
    EXPECT_EQ(over(exchange.entered(kSecond, fence("0, 2", "!"))).data, rdzv::Blob("part!"));
    EXPECT_EQ(exchange.missing("0-3"), "node01 (ranks 2-3)");
}

TEST(PmixFence, FailsAtOnceForAllInsideWhenARankThatItWaitsForEnds) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-5", "a"));
    exchange.entered(kSecond, fence("0-5", "b"));
    const PmixExchange::Messages said = exchange.rank_ended(4, 5);
    EXPECT_THAT(receivers(said), ElementsAre(kFirst, kSecond));
    EXPECT_EQ(over(said).failure, "rank 5 has ended");
    EXPECT_EQ(over(said).data.size(), 0U);
}

TEST(PmixFence, FailsOnEntryWhenARankOfItHasEnded) {
    PmixExchange exchange = three_nodes();
    EXPECT_THAT(exchange.rank_ended(4, 5), IsEmpty());
    const PmixExchange::Messages said = exchange.entered(kFirst, fence("0-5", "a"));
    EXPECT_THAT(receivers(said), ElementsAre(kFirst));
    EXPECT_EQ(over(said).failure, "rank 5 has ended");
}

TEST(PmixFence, FailsWhenANodeEntersWithoutARankOfItsOwnThatHasEnded) {
    PmixExchange exchange;
    exchange.begin("c0ffee", 5, {{kFirst, "node00", 0, 2}, {kSecond, "node01", 2, 2}});
    exchange.rank_ended(5, 1);
    EXPECT_EQ(over(exchange.entered(kFirst, fence("0-3", "a", 5))).failure, "rank 1 has ended");
}

TEST(PmixFence, GoesOnWithoutARankThatEndedOutsideIt) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-4", "a"));
    EXPECT_THAT(exchange.rank_ended(4, 5), IsEmpty());
    exchange.entered(kSecond, fence("0-4", "b"));
    EXPECT_EQ(over(exchange.entered(kThird, fence("0-4", "c"))).failure, "");
}

TEST(PmixFence, GoesOnWhenARankEndsAfterItsPartArrived) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kThird, fence("0-5", "c"));
    EXPECT_THAT(exchange.rank_ended(4, 5), IsEmpty());
    exchange.entered(kFirst, fence("0-5", "a"));
    EXPECT_EQ(over(exchange.entered(kSecond, fence("0-5", "b"))).failure, "");
}

TEST(PmixFence, FailsWhenANodeThatItWaitsForIsLostAndSendsTheLostNodeNothing) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-5", "a"));
    exchange.entered(kSecond, fence("0-3", "b"));
    exchange.entered(kSecond, fence("0-5", "b"));
    const PmixExchange::Messages said = exchange.node_lost(kThird);
    EXPECT_THAT(receivers(said), ElementsAre(kFirst, kSecond));
    EXPECT_EQ(over(said).failure, "node02 (ranks 4-5) is lost");
    EXPECT_EQ(exchange.missing("0-3"), "node00 (ranks 0-1)");
}

TEST(PmixFence, IsRefusedForAnOldGenerationAndChangesNothing) {
    PmixExchange exchange = three_nodes();
    EXPECT_EQ(over(exchange.entered(kFirst, fence("0-5", "a", 3))),
              (rdzv::FenceOver{3, "0-5", "generation 3 is over", {}}));
    EXPECT_EQ(exchange.missing("0-5"), "");
    EXPECT_THAT(exchange.rank_ended(3, 5), IsEmpty());
    exchange.entered(kFirst, fence("0-5", "a"));
    exchange.entered(kSecond, fence("0-5", "b"));
    EXPECT_EQ(over(exchange.entered(kThird, fence("0-5", "c"))).failure, "");
}

TEST(PmixFence, IsForgottenWithItsGeneration) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-5", "old"));
    exchange.rank_ended(4, 3);
    exchange.begin("c0ffee", 5,
                   {{kFirst, "node00", 0, 2}, {kSecond, "node01", 2, 2}, {kThird, "node02", 4, 2}});
    exchange.entered(kFirst, fence("0-5", "a", 5));
    exchange.entered(kSecond, fence("0-5", "b", 5));
    EXPECT_EQ(over(exchange.entered(kThird, fence("0-5", "c", 5))),
              (rdzv::FenceOver{5, "0-5", "", rdzv::Blob("abc")}));
}

TEST(PmixFence, RefusesASecondEntryOfANode) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-5", "a"));
    const PmixExchange::Messages said = exchange.entered(kFirst, fence("0-5", "again"));
    EXPECT_THAT(receivers(said), ElementsAre(kFirst));
    EXPECT_THAT(over(said).failure, HasSubstr("already"));
    EXPECT_EQ(exchange.missing("0-5"), "node01 (ranks 2-3), node02 (ranks 4-5)");
}

TEST(PmixFence, IsRefusedWithoutRanks) {
    PmixExchange exchange = three_nodes();
    for (const char* ranks : {"", "x", "3-1", "0,0", "0-", "-1", "4, 2", "99999999999", "0-5,"}) {
        EXPECT_THAT(over(exchange.entered(kFirst, fence(ranks, ""))).failure, HasSubstr("no ranks")) << ranks;
    }
}

TEST(PmixFence, IsRefusedToAStranger) {
    PmixExchange exchange = three_nodes();
    EXPECT_THAT(over(exchange.entered(99, fence("0-5", ""))).failure, HasSubstr("is over"));
    EXPECT_THAT(over(exchange.entered(kThird, fence("0-3", ""))).failure, HasSubstr("no part"));
}

TEST(PmixFence, FailsForAllWhenAPartIsTooLarge) {
    PmixExchange exchange = three_nodes();
    exchange.entered(kFirst, fence("0-5", "a"));
    const PmixExchange::Messages said =
        exchange.entered(kSecond, fence("0-5", std::string(rdzv::kFencePartBytes + 1, 'b')));
    EXPECT_THAT(receivers(said), ElementsAre(kFirst, kSecond));
    EXPECT_EQ(over(said).failure, "node01 (ranks 2-3) brings more than 16 MiB");
}

TEST(PmixFence, FailsWhenAllPartsTogetherAreTooLarge) {
    PmixExchange exchange;
    std::vector<PmixExchange::Node> nodes;
    for (rdzv::AgentId i = 0; i < 5; ++i) nodes.push_back({i + 1, "node", static_cast<int>(i), 1});
    exchange.begin("c0ffee", 1, nodes);
    PmixExchange::Messages said;
    for (rdzv::AgentId i = 0; i < 5; ++i)
        said = exchange.entered(i + 1, fence("0-4", std::string(rdzv::kFencePartBytes, 'x'), 1));
    EXPECT_EQ(receivers(said).size(), 5U);
    EXPECT_EQ(over(said).failure, "all nodes together bring 80 MiB, more than 64 MiB");
}

TEST(PmixFence, IsRefusedWhenTooManyAreOpen) {
    PmixExchange exchange;
    exchange.begin("c0ffee", 1, {{kFirst, "node00", 0, 2000}, {kSecond, "node01", 2000, 2000}});
    for (std::size_t i = 0; i < rdzv::kOpenFences; ++i) {
        EXPECT_THAT(exchange.entered(kFirst, fence(std::to_string(i) + ", 2000", "", 1)), IsEmpty());
    }
    EXPECT_THAT(over(exchange.entered(kFirst, fence("1999, 2000", "", 1))).failure,
                HasSubstr("1024 fences are open"));
}

// ---- direct modex

TEST(PmixModex, GoesToTheNodeOfTheRankAndBackToTheAsker) {
    PmixExchange exchange = three_nodes();
    const PmixExchange::Messages asked = exchange.asked(kFirst, {4, 70, 3});
    ASSERT_THAT(receivers(asked), ElementsAre(kSecond));
    const auto request = std::get<rdzv::ModexRequest>(asked.front().message);
    EXPECT_EQ(request.rank, 3);
    const PmixExchange::Messages back =
        exchange.answered(kSecond, {4, request.number, true, rdzv::Blob("card")});
    ASSERT_THAT(receivers(back), ElementsAre(kFirst));
    EXPECT_EQ(reply_in(back), (rdzv::ModexReply{4, 70, true, rdzv::Blob("card")}));
    EXPECT_THAT(exchange.answered(kSecond, {4, request.number, true, {}}), IsEmpty()) << "answered twice";
}

TEST(PmixModex, SameNumbersOfTwoNodesAreTwoRequests) {
    PmixExchange exchange = three_nodes();
    const auto one = std::get<rdzv::ModexRequest>(exchange.asked(kFirst, {4, 1, 4}).front().message);
    const auto other = std::get<rdzv::ModexRequest>(exchange.asked(kSecond, {4, 1, 4}).front().message);
    EXPECT_NE(one.number, other.number);
    EXPECT_THAT(receivers(exchange.answered(kThird, {4, other.number, true, {}})), ElementsAre(kSecond));
    EXPECT_THAT(receivers(exchange.answered(kThird, {4, one.number, true, {}})), ElementsAre(kFirst));
}

TEST(PmixModex, IsAnsweredByTheNodeOfTheRankOnly) {
    PmixExchange exchange = three_nodes();
    const auto request = std::get<rdzv::ModexRequest>(exchange.asked(kFirst, {4, 1, 4}).front().message);
    EXPECT_THAT(exchange.answered(kSecond, {4, request.number, true, rdzv::Blob("forged")}), IsEmpty());
    EXPECT_THAT(receivers(exchange.answered(kThird, {4, request.number, true, {}})), ElementsAre(kFirst));
}

TEST(PmixModex, IsRefusedForAnEndedRankOrALostNode) {
    PmixExchange exchange = three_nodes();
    exchange.asked(kFirst, {4, 1, 4});
    const PmixExchange::Messages ended = exchange.rank_ended(4, 4);
    ASSERT_THAT(receivers(ended), ElementsAre(kFirst));
    EXPECT_EQ(reply_in(ended), (rdzv::ModexReply{4, 1, false, {}}));
    EXPECT_FALSE(reply_in(exchange.asked(kFirst, {4, 2, 4})).found) << "asked after its end";
    exchange.asked(kFirst, {4, 3, 5});
    EXPECT_EQ(reply_in(exchange.node_lost(kThird)), (rdzv::ModexReply{4, 3, false, {}}));
    EXPECT_FALSE(reply_in(exchange.asked(kFirst, {4, 4, 5})).found) << "asked after the loss";
}

TEST(PmixModex, IsRefusedAtOnceForNoRankOrAnOldGeneration) {
    PmixExchange exchange = three_nodes();
    for (const rdzv::ModexRequest& request :
         {rdzv::ModexRequest{4, 1, 6}, rdzv::ModexRequest{4, 1, -1}, rdzv::ModexRequest{3, 1, 4}}) {
        const PmixExchange::Messages said = exchange.asked(kFirst, request);
        ASSERT_THAT(receivers(said), ElementsAre(kFirst));
        EXPECT_EQ(reply_in(said), (rdzv::ModexReply{request.generation, 1, false, {}}));
    }
}

// ---- the namespace of a job

rdzv::StartGeneration order_of(int group_rank, int first_rank, int local, int world) {
    rdzv::StartGeneration order;
    order.generation = 2;
    order.group_rank = group_rank;
    order.first_rank = first_rank;
    order.local_world_size = local;
    order.world_size = world;
    order.restart_count = 1;
    return order;
}

PmixValue value_of(const std::vector<PmixFact>& facts, std::string_view key) {
    for (const PmixFact& fact : facts) {
        if (fact.key == key) return fact.value;
    }
    ADD_FAILURE() << key << " is not there";
    return false;
}

TEST(PmixWorld, IsDecodedAsItWasEncoded) {
    const std::vector<PmixNode> nodes = {{"node00", 4}, {"a name with blanks", 1}};
    EXPECT_EQ(*decode_nodes(encode_nodes(nodes)), nodes);
    for (const char* text : {"node00", "node00 ", "node00 x", "node00 0", "node00 70000", " -1"})
        EXPECT_FALSE(decode_nodes(text)) << text;
}

TEST(PmixJob, ListsTheNodesAndTheirRanks) {
    const Result<PmixJob> job = describe_job(
        order_of(1, 2, 1, 5), {{"node00", 2}, {"node01", 1}, {"node02", 2}}, "c0ffee", "/dev/shm/x");
    ASSERT_TRUE(job);
    EXPECT_EQ(job->name_space, "ddprun.c0ffee.2");
    EXPECT_EQ(value_of(job->facts, pmix_key::kNodeMap), PmixValue(std::string("node00,node01,node02")));
    EXPECT_EQ(value_of(job->facts, pmix_key::kProcMap), PmixValue(std::string("0,1;2;3,4")));
    EXPECT_EQ(value_of(job->facts, pmix_key::kJobSize), PmixValue(std::uint32_t{5}));
    EXPECT_EQ(value_of(job->facts, pmix_key::kLocalSize), PmixValue(std::uint32_t{1}));
    EXPECT_EQ(value_of(job->facts, pmix_key::kLocalPeers), PmixValue(std::string("2")));
    EXPECT_EQ(value_of(job->facts, pmix_key::kLocalLeader), PmixValue(PmixRank{2}));
    EXPECT_EQ(value_of(job->facts, pmix_key::kNodes), PmixValue(std::uint32_t{3}));
    EXPECT_EQ(value_of(job->facts, pmix_key::kJobDirectory), PmixValue(std::string("/dev/shm/x")));
    ASSERT_EQ(job->ranks.size(), 5U);
    EXPECT_EQ(value_of(job->ranks[4], pmix_key::kRank), PmixValue(PmixRank{4}));
    EXPECT_EQ(value_of(job->ranks[4], pmix_key::kLocalRank), PmixValue(std::uint16_t{1}));
    EXPECT_EQ(value_of(job->ranks[4], pmix_key::kNodeId), PmixValue(std::uint32_t{2}));
    EXPECT_EQ(value_of(job->ranks[4], pmix_key::kHostName), PmixValue(std::string("node02")));
    EXPECT_EQ(value_of(job->ranks[4], pmix_key::kReincarnation), PmixValue(std::uint32_t{1}));
}

TEST(PmixJob, EachGenerationHasANamespaceOfItsOwnThatAllNodesShare) {
    const std::vector<PmixNode> nodes = {{"node00", 2}, {"node01", 2}};
    rdzv::StartGeneration zero = order_of(0, 0, 2, 4), one = order_of(1, 2, 2, 4);
    EXPECT_EQ(describe_job(zero, nodes, "c0ffee", "/x")->name_space,
              describe_job(one, nodes, "c0ffee", "/y")->name_space);
    one.generation = 3;
    EXPECT_NE(describe_job(zero, nodes, "c0ffee", "/x")->name_space,
              describe_job(one, nodes, "c0ffee", "/x")->name_space);
}

TEST(PmixJob, GivesTwoNodesOfOneHostTwoNamesAndOursTheHosts) {
    const std::vector<PmixNode> nodes = {{"laptop", 1}, {"laptop", 1}, {"laptop", 1}};
    const auto names_at = [&](int node) {
        return value_of(describe_job(order_of(node, node, 1, 3), nodes, "c0ffee", "/x")->facts,
                        pmix_key::kNodeMap);
    };
    EXPECT_EQ(names_at(0), PmixValue(std::string("laptop,laptop~1,laptop~2")));
    EXPECT_EQ(names_at(1), PmixValue(std::string("laptop~0,laptop,laptop~2")));
}

TEST(PmixJob, RefusesOrdersThatContradictTheWorld) {
    const std::vector<PmixNode> nodes = {{"node00", 2}, {"node01", 2}};
    for (const rdzv::StartGeneration& wrong :
         {order_of(2, 2, 2, 4), order_of(-1, 0, 2, 4), order_of(1, 1, 2, 4), order_of(1, 2, 3, 4),
          order_of(1, 2, 2, 5)}) {
        EXPECT_FALSE(describe_job(wrong, nodes, "c0ffee", "/x"));
    }
}

// ---- the decision on a server

TEST(PmixWish, IsTrueForAProgramLinkedWithAnMpiThatNeedsPmix) {
    for (const char* library : {"libmpi.so.40", "libmpi_mpifh.so.40", "libmpi_cxx.so.40", "libpmix.so.2"}) {
        EXPECT_TRUE(decide_pmix(PmixUse::Auto, {"libc.so.6", library}, false).wanted) << library;
    }
    EXPECT_EQ(decide_pmix(PmixUse::Auto, {"libmpi.so.40"}, false).why,
              "the program is linked with libmpi.so.40");
    for (const char* library : {"libc.so.6", "libmpich.so.12", "libmpifr.so.1", "mylibmpi.so.40"}) {
        EXPECT_FALSE(decide_pmix(PmixUse::Auto, {library}, false).wanted) << library;
    }
}

TEST(PmixWish, WarnsAboutMpichAndItsRelativesWithTheRemedy) {
    for (const char* library : {"libmpich.so.12", "libmpi.so.12", "libmpifort.so.12", "libmpi_cray.so.12",
                                "libmpi_gnu_112.so.12"}) {
        const PmixWish wish = decide_pmix(PmixUse::Auto, {"libc.so.6", library}, false);
        EXPECT_FALSE(wish.wanted) << library;
        EXPECT_THAT(wish.warning,
                    AllOf(HasSubstr(library),
                          HasSubstr("rank 0 of 1; say mpiexec -n RANKS ddprun --per-rank --pass-mpi-env")));
    }
    EXPECT_EQ(decide_pmix(PmixUse::Auto, {"libmpi.so.40"}, false).warning, "");
    EXPECT_EQ(decide_pmix(PmixUse::Auto, {"libmpich.so.12"}, true).warning, "")
        << "--pass-mpi-env: its own launcher serves it";
    EXPECT_EQ(decide_pmix(PmixUse::Off, {"libmpich.so.12"}, false).warning, "") << "the user has decided";
}

TEST(LoadedMpi, IsNamedWithTheRemedy) {
    const std::string others =
        "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n7f01-7f02 rw-p 00000000 00:00 0 [heap]\n7f-80 rw-p 00 00:00 0 \n";
    EXPECT_EQ(explain_loaded_mpi(others), "");
    EXPECT_THAT(explain_loaded_mpi(others + "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libmpi.so.40.30.4\n"),
                AllOf(HasSubstr("has loaded libmpi.so.40.30.4"), HasSubstr("say --pmix on")));
    EXPECT_THAT(explain_loaded_mpi(others + "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libmpich.so.12.2.1\n"),
                HasSubstr("mpiexec -n RANKS"));
}

TEST(PmixWish, FollowsTheOption) {
    EXPECT_TRUE(decide_pmix(PmixUse::On, {}, false).wanted);
    EXPECT_FALSE(decide_pmix(PmixUse::Off, {"libmpi.so.40"}, false).wanted);
    EXPECT_FALSE(decide_pmix(PmixUse::Auto, {"libmpi.so.40"}, true).wanted)
        << "the launcher around us has one";
}

TEST(NeededLibraries, AreThoseOfThisProgram) {
    EXPECT_THAT(needed_libraries_of("/proc/self/exe"), Contains("libc.so.6"));
}

TEST(NeededLibraries, AreEmptyForAFileThatIsNoProgram) {
    const test::TemporaryDirectory directory;
    std::ofstream(directory.file("script")) << "#!/bin/sh\n";
    std::ofstream(directory.file("empty"));
    for (const std::string& path : {directory.file("script"), directory.file("empty"), directory.path(),
                                    directory.file("missing"), std::string("/dev/null")}) {
        EXPECT_THAT(needed_libraries_of(path), IsEmpty()) << path;
    }
}

TEST(NeededLibraries, OfADamagedFileAreReadWithinItsBounds) {
    const Result<std::string> whole = read_file("/proc/self/exe", std::size_t{1} << 30);
    ASSERT_TRUE(whole);
    // Cut the file anywhere in its headers, and invert each of their bytes.
    for (std::size_t size = 0; size < 1024; ++size) (void)needed_libraries(std::string(*whole, 0, size));
    std::string damaged = *whole;
    for (std::size_t at = 0; at < 1024; ++at) {
        damaged[at] = static_cast<char>(~damaged[at]);
        (void)needed_libraries(damaged);
        damaged[at] = (*whole)[at];
    }
    EXPECT_EQ(needed_libraries(damaged), needed_libraries_of("/proc/self/exe"));
}

// ---- the directory

constexpr const char* kJobId = "0123456789abcdef";

TEST(JobDirectory, IsRemovedWithItsContentAndNothingElse) {
    const test::TemporaryDirectory place;
    std::ofstream(place.file("others")) << "stays";
    {
        const auto made = JobDirectory::create(place.file(job_directory_name(kJobId)));
        ASSERT_TRUE(made) << made.error().what;
        std::filesystem::create_directories((*made)->path() + "/a/b");
        std::filesystem::create_symlink(place.file("others"), (*made)->path() + "/link");
        struct stat status {};
        ASSERT_EQ(::stat((*made)->path().c_str(), &status), 0);
        EXPECT_EQ(status.st_mode & 0777, ::geteuid() == 0 ? 0711U : 0700U)
            << "root's workers can change their user";
    }
    EXPECT_FALSE(std::filesystem::exists(place.file(job_directory_name(kJobId))));
    EXPECT_TRUE(std::filesystem::exists(place.file("others")));
}

TEST(JobDirectory, IsRemovedWhenAbandonedAndKeptWhenInUse) {
    const test::TemporaryDirectory place;
    const auto used = JobDirectory::create(place.file(job_directory_name(kJobId)));
    ASSERT_TRUE(used);
    const std::string abandoned = job_directory_name("fedcba9876543210");
    std::filesystem::create_directories(place.file(abandoned) + "/0");
    for (const char* name : {"ddprun-job-short", "ddprun-job-0123456789ABCDEF", "another"})
        std::filesystem::create_directory(place.file(name));
    EXPECT_THAT(remove_abandoned_job_directories(place.path()), ElementsAre(abandoned));
    EXPECT_FALSE(std::filesystem::exists(place.file(abandoned)));
    for (const char* name : {"ddprun-job-short", "ddprun-job-0123456789ABCDEF", "another"})
        EXPECT_TRUE(std::filesystem::exists(place.file(name))) << name;
    EXPECT_TRUE(std::filesystem::exists((*used)->path()));
}

TEST(JobDirectory, IsRemovedWhenItIsAnOldDraft) {
    const test::TemporaryDirectory place;
    const std::string old = job_directory_name("fedcba9876543210") + ".new",
                      fresh = job_directory_name(kJobId) + ".new";
    for (const std::string& name : {old, fresh}) std::filesystem::create_directory(place.file(name));
    std::filesystem::last_write_time(place.file(old),
                                     std::filesystem::file_time_type::clock::now() - std::chrono::minutes(2));
    EXPECT_THAT(remove_abandoned_job_directories(place.path()), ElementsAre(old));
    EXPECT_TRUE(std::filesystem::exists(place.file(fresh))) << "somebody may be about to lock it";
}

TEST(JobDirectory, NamesThePathThatCannotBeMade) {
    const test::TemporaryDirectory place;
    const auto made = JobDirectory::create(place.file("none/ddprun-job-1"));
    ASSERT_FALSE(made);
    EXPECT_THAT(made.error().what, HasSubstr(place.file("none/ddprun-job-1")));
}

}  // namespace
}  // namespace ddprun
