// The effects of a fabric, with the fake NCCL, which logs its network, in workers over fakes of CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RunOptions with_fakes(std::vector<std::string> environment) {
    environment.insert(environment.end(), {"DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY"),
                                           "FAKE_CUDA_DEVICES=2", "DDPRUN_TOKEN=secret of the job"});
    return with_environment(std::move(environment));
}

std::vector<std::string> all_reduce(std::vector<std::string> options) {
    options.insert(options.begin(), path_of("DDPRUN"));
    options.insert(options.end(), {path_of("OVER_FAKES") + "/allreduce-check", "--device", "cuda",
                                   "--backend", "nccl", "--seconds", "0.1", "--bytes", "64KiB"});
    return options;
}

TEST(FabricOfAJob, ANcclThatTakesSocketsOnSlingshotIsReportedWithoutItsLog) {
    const Outcome outcome = run(all_reduce({"--nproc-per-node=2", "--fabric=slingshot"}), with_fakes({}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "NCCL uses the network Socket, not the node's fabric (slingshot)"), 1)
        << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("all sums right"), Not(HasSubstr("NCCL INFO"))));
}

TEST(FabricOfAJob, TheRightNetworkIsLoggedWithoutAWarning) {
    const Outcome outcome = run(all_reduce({"--nproc-per-node=2", "--fabric=slingshot"}),
                                with_fakes({"FAKE_NCCL_NETWORK=AWS Libfabric"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("NCCL uses the network AWS Libfabric\n"),
                                   Not(HasSubstr("not the node's fabric"))));
}

TEST(FabricOfAJob, AUserWhoDirectsNcclsLogGetsIt) {
    const Outcome outcome =
        run(all_reduce({"--nproc-per-node=2", "--fabric=slingshot"}), with_fakes({"NCCL_DEBUG=INFO"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "NCCL INFO Using network Socket"), 2);
    EXPECT_THAT(outcome.err, Not(HasSubstr("NCCL uses")));
}

TEST(FabricOfAJob, EachOfTwoNodesReadsItsOwnNccl) {
    const ReservedPort port;
    std::vector<std::unique_ptr<Program>> nodes;
    for (const char* node : {"0", "1"}) {
        nodes.push_back(std::make_unique<Program>(
            all_reduce({"--nnodes=2", "--master-addr=127.0.0.1", "--master-port=" + port.number(),
                        std::string("--node-rank=") + node, "--fabric=ib"}),
            with_fakes({*node == '1' ? "FAKE_NCCL_NETWORK=Socket" : "FAKE_NCCL_NETWORK=IB"})));
    }
    const Outcome zero = nodes[0]->wait(), one = nodes[1]->wait();
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_THAT(zero.err,
                AllOf(HasSubstr("fabric ib (--fabric ib)"), HasSubstr("NCCL uses the network IB\n")));
    EXPECT_THAT(one.err,
                AllOf(HasSubstr("network Socket, not the node's fabric (ib)"), HasSubstr("libibverbs")));
}

}  // namespace
}  // namespace ddprun::test
