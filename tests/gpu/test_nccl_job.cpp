#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <regex>

#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

Outcome run_job(const std::vector<std::string>& options, const std::vector<std::string>& arguments,
                std::vector<std::string> environment = {}) {
    std::vector<std::string> command{path_of("DDPRUN")};
    command.insert(command.end(), options.begin(), options.end());
    command.push_back(path_of("NCCL_WORKER"));
    command.insert(command.end(), arguments.begin(), arguments.end());
    environment.push_back("DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY"));
    return run(command, with_environment(std::move(environment)));
}

int count(const std::string& text, const std::string& piece) {
    int n = 0;
    for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
    return n;
}

/// Milliseconds in every "<words> at <ms>".
std::vector<long> times_of(const std::string& text, const std::string& words) {
    std::vector<long> times;
    const std::regex pattern(words + " at ([0-9]+)");
    for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) {
        times.push_back(std::stol((*at)[1]));
    }
    return times;
}

TEST(NcclJob, RanksJoinThroughTheStoreOfTheLauncher) {
    const Outcome outcome = run_job({"--nproc-per-node=4"}, {"10"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, "life 0 sum 46"), 4) << outcome.out;
    EXPECT_THAT(outcome.out, HasSubstr("rank 0 on device 0); backend nccl (asked for)"));
}

TEST(NcclJob, EverySurvivorLearnsOfADeadRankWithinTheGracePeriod) {
    const Outcome outcome = run_job({"--nproc-per-node=4"}, {"100000", "2", "50"});
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    const std::vector<long> killed = times_of(outcome.out, "killed"), heard = times_of(outcome.out, "heard");
    ASSERT_EQ(killed.size(), 1u) << outcome.out;
    ASSERT_EQ(heard.size(), 3u) << outcome.out;
    for (const long at : heard) EXPECT_LT(at - killed[0], 5000);
    // Rank 2 dies before #53, while another rank may still be leaving #52.
    for (const int rank : {0, 1, 3}) {
        EXPECT_THAT(outcome.out, ContainsRegex("rank " + std::to_string(rank) +
                                               ": all_reduce #5[23] \\(1 float32, 4 B, sum\\): "
                                               "rank 2 was lost, the launcher ended generation"));
    }
    EXPECT_THAT(outcome.err, HasSubstr("root cause: rank 2"));
}

TEST(NcclJob, ARestartUsesTheKeysOfItsOwnGeneration) {
    const Outcome outcome = run_job({"--nproc-per-node=3", "--max-restarts=1"}, {"60", "1", "30"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, "life 1 sum 183"), 3) << outcome.out;
}

TEST(NcclJob, TheReportHasTheLastErrorsOfNcclAndCuda) {
    const Outcome nccl = run_job({"--nproc-per-node=2"}, {"10"}, {"FAKE_NCCL=1:4:async:3"});
    EXPECT_EQ(nccl.status, 1) << nccl.err;
    EXPECT_THAT(nccl.err,
                AllOf(HasSubstr("error report  | the training step failed"), HasSubstr("last NCCL error: "),
                      HasSubstr("(ncclInternalError): the fake's last words")));
    const Outcome cuda = run_job({"--nproc-per-node=2"}, {"10"}, {"FAKE_NCCL=1:4:cuda:719"});
    EXPECT_EQ(cuda.status, 1) << cuda.err;
    EXPECT_THAT(cuda.err,
                AllOf(HasSubstr("last CUDA error: rank 1: all_reduce #"), HasSubstr("(CUDA error 719)")));
}

TEST(NcclJob, AMissingLibraryIsNamed) {
    const TemporaryDirectory empty;
    const std::string missing = empty.file("libnccl.so");
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=1", path_of("NCCL_WORKER"), "1"},
                                with_environment({"DDP_NCCL_LIBRARY=" + missing}));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("backend nccl: loading NCCL"), HasSubstr(missing)));
}

TEST(NcclJob, MoreWorkersThanDevicesFailBeforeAnyRankWaits) {
    const Outcome outcome = run_job({"--nproc-per-node=2"}, {"1"}, {"FAKE_CUDA_DEVICES=1"});
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, HasSubstr("rank 1: local rank 1 needs CUDA device 1, 1 device is visible"));
    EXPECT_LT(outcome.took.count(), 5000);
}

// Several ranks on one device.

TEST(StagedJob, AutoChoosesItForRanksThatShareADeviceWithAnOldNccl) {
    const Outcome outcome =
        run_job({"--nproc-per-node=4"}, {"10"}, {"WORKER_BACKEND=auto", "FAKE_CUDA_DEVICES=1"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, "life 0 sum 46"), 4) << outcome.out;
    EXPECT_THAT(outcome.out,
                HasSubstr("backend staged (auto: ranks 0-3 share GPU 0000:01:00.0, and NCCL 2.28.9 "
                          "takes one rank per GPU (2.30 and newer take more))"));
    EXPECT_EQ(count(outcome.err, "ddp: backend staged (auto: "), 1) << outcome.err;
}

TEST(StagedJob, EverySurvivorLearnsOfADeadRankWithinTheGracePeriod) {
    const Outcome outcome = run_job({"--nproc-per-node=4"}, {"100000", "2", "50"},
                                    {"WORKER_BACKEND=staged", "FAKE_CUDA_DEVICES=1"});
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    const std::vector<long> killed = times_of(outcome.out, "killed"), heard = times_of(outcome.out, "heard");
    ASSERT_EQ(killed.size(), 1u) << outcome.out;
    ASSERT_EQ(heard.size(), 3u) << outcome.out;
    for (const long at : heard) EXPECT_LT(at - killed[0], 5000);
    EXPECT_THAT(outcome.out, AnyOf(HasSubstr("rank 0: all_reduce #5"),
                                   HasSubstr("rank 0: all_reduce: waiting for the device: rank 2 was lost")));
    EXPECT_THAT(outcome.err, HasSubstr("root cause: rank 2"));
}

TEST(StagedJob, AutoPrefersAnNcclThatAcceptsRanksThatShareADevice) {
    const std::vector<std::string> newer{"FAKE_CUDA_DEVICES=1", "FAKE_NCCL_VERSION=23007",
                                         "WORKER_BACKEND=auto"};
    const Outcome outcome = run_job({"--nproc-per-node=2"}, {"10"}, newer);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("backend nccl (auto: ranks 0-1 share GPU 0000:01:00.0, which this "
                                "NCCL takes)"),
                      HasSubstr("NCCL_MULTI_RANK_GPU_ENABLE=1")));

    std::vector<std::string> forbidden = newer;
    forbidden.push_back("NCCL_MULTI_RANK_GPU_ENABLE=0");
    EXPECT_THAT(run_job({"--nproc-per-node=2"}, {"10"}, forbidden).out,
                HasSubstr("staged (auto: ranks 0-1 share GPU 0000:01:00.0, and NCCL_MULTI_RANK_GPU_ENABLE=0 "
                          "forbids NCCL that)"));
}

TEST(NcclJob, RanksThatShareADeviceAreRefusedWithTheRemedy) {
    const Outcome outcome =
        run_job({"--nproc-per-node=2", "--", "env", "CUDA_VISIBLE_DEVICES=0"}, {"1"},
                {"FAKE_CUDA_DEVICES=1", "FAKE_NCCL_VERSION=23007", "NCCL_MULTI_RANK_GPU_ENABLE=0"});
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out,
                HasSubstr("backend nccl: ranks 0-1 share GPU 0000:01:00.0, and "
                          "NCCL_MULTI_RANK_GPU_ENABLE=0 forbids NCCL that: take backend staged, or "
                          "fewer ranks"));
}

// Without ddprun: ids go over the CPU group of the node.

Outcome run_without_launcher(const std::string& world, const std::string& local) {
    const ReservedPort port;
    const std::string script =
        "for r in 0 1 2; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=" + world + " LOCAL_WORLD_SIZE=" + local +
        " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port.number() + " \"$NCCL_WORKER\" 10 & done; wait";
    return run({"sh", "-c", script}, with_environment({"DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY"),
                                                       "NCCL_SOCKET_IFNAME=ib7"}));
}

TEST(NcclJob, RanksOfOneNodeJoinWithoutDdprun) {
    const Outcome outcome = run_without_launcher("3", "3");
    EXPECT_EQ(count(outcome.out, "life 0 sum 33"), 3) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("ddp: backend nccl (asked for): nccl (NCCL 2.28.9, CUDA runtime 13.0, driver "
                          "13.1, rank 0 on device 0); GPUs of this node: rank 0 0000:01:00.0, rank 1 "
                          "0000:02:00.0, rank 2 0000:03:00.0; NCCL_SOCKET_IFNAME=ib7\n"));
}

TEST(NcclJob, RanksOfSeveralNodesAreReferredToDdprun) {
    const Outcome outcome = run_without_launcher("6", "3");
    EXPECT_EQ(count(outcome.out, "there is none: start the program with ddprun"), 3) << outcome.out;
}

}  // namespace
}  // namespace ddprun::test
