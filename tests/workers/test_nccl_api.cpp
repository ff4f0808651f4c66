#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "tests/support/temporary_directory.h"
#include "tests/workers/nccl_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::string> kRequired = {
    "ncclGetVersion",    "ncclGetUniqueId",  "ncclCommInitRankConfig", "ncclCommGetAsyncError",
    "ncclCommAbort",     "ncclCommFinalize", "ncclCommDestroy",        "ncclAllReduce",
    "ncclBroadcast",     "ncclReduce",       "ncclAllGather",          "ncclReduceScatter",
    "ncclSend",          "ncclRecv",         "ncclGroupStart",         "ncclGroupEnd",
    "ncclGetErrorString"};

TEST(NcclTable, NamesAMissingRequiredEntryPointWithTheVersionNeeded) {
    for (const std::string& name : kRequired) {
        const auto api = nccl::api_from(fake_without({name}));
        ASSERT_FALSE(api) << name;
        EXPECT_THAT(api.error().what, AllOf(HasSubstr("lacks " + name + ": NCCL 2.14 or newer is needed")));
    }
    EXPECT_TRUE(nccl::api_from(fake_library()));
}

TEST(NcclTable, NeedsNoOptionalEntryPoint) {
    std::set<std::string> asked;
    SharedLibrary library = fake_library();
    library.resolve = [&, all = library.resolve](const char* name) -> void* {
        asked.insert(name);
        return std::find(kRequired.begin(), kRequired.end(), name) != kRequired.end() ? all(name) : nullptr;
    };
    const auto api = nccl::api_from(library);
    ASSERT_TRUE(api);
    EXPECT_EQ(asked.size(), kRequired.size() + 12);
    EXPECT_EQ(api->comm_init_rank_scalable, nullptr);
    EXPECT_EQ(api->describe(), "NCCL 2.28.9");
    EXPECT_EQ(api->explain(nccl::Code::RemoteError, nullptr),
              "remote process exited or there was a network error (ncclRemoteError)");
}

TEST(NcclTable, DoesNotAllocateWithoutTheFunctionThatFrees) {
    EXPECT_EQ(nccl::api_from(fake_without({"ncclMemFree"}))->mem_alloc, nullptr);
}

TEST(NcclTable, NamesAMissingLibraryWithTheVariableToSet) {
    const ddprun::test::TemporaryDirectory empty;
    const std::string missing = empty.file("libnccl.so.2");
    ::setenv("DDP_NCCL_LIBRARY", missing.c_str(), 1);
    const auto api = nccl::load_api();
    ::unsetenv("DDP_NCCL_LIBRARY");
    ASSERT_FALSE(api);
    EXPECT_THAT(api.error().what, AllOf(HasSubstr("DDP_NCCL_LIBRARY"), HasSubstr(missing)));
}

TEST(NcclIds, OneRootServes128RanksWhenNcclSupportsSeveral) {
    EXPECT_EQ(nccl::root_count(1, true), 1);
    EXPECT_EQ(nccl::root_count(128, true), 1);
    EXPECT_EQ(nccl::root_count(129, true), 2);
    EXPECT_EQ(nccl::root_count(1024, true), 8);
    EXPECT_EQ(nccl::root_count(1024, false), 1);
}

TEST(NcclIds, KeysHoldGenerationCommunicatorAndRoot) {
    std::vector<std::string> put, got;
    BootstrapStore bootstrap;
    bootstrap.put = [&](const std::string& key, const std::string& value) {
        EXPECT_EQ(value.size(), 128u);
        put.push_back(key);
    };
    bootstrap.get = [&](const std::string& key, ddprun::TimePoint) {
        got.push_back(key);
        return std::string(128, static_cast<char>('a' + got.size()));
    };
    const auto ids = nccl::exchange_ids(*nccl::api_from(fake_library()), bootstrap,
                                        {.rank = 128,
                                         .ranks = 300,
                                         .generation = 7,
                                         .communicator = 2,
                                         .deadline = ddprun::kNever,
                                         .throw_if_lost = [] {}});
    EXPECT_THAT(put, ElementsAre("nccl/7/2/1"));
    EXPECT_THAT(got, ElementsAre("nccl/7/2/0", "nccl/7/2/2"));
    EXPECT_EQ(ids.size(), 3u);
    EXPECT_EQ(ids[0].internal[5], 'b');
    EXPECT_EQ(ids[2].internal[5], 'c');
}

}  // namespace
