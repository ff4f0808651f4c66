// Training without GPUs on several hosts (tests/support/hosts.h), and the effects of the network.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "tests/support/environment_variable.h"
#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A ddprun on each host: one worker on the first, two on the second, and so on in turns.
class TrainHosts : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
    }
    [[nodiscard]] int workers_on(int host) const { return workers_ > 0 ? workers_ : 1 + host % 2; }
    static int workers_of(int hosts) { return hosts + hosts / 2; }

    void start(int hosts, std::vector<std::string> arguments, const std::vector<std::string>& options = {}) {
        if (!hosts_) hosts_ = std::make_unique<Hosts>(hosts);
        nodes_.clear();
        arguments.insert(arguments.begin(), {path_of("TRAIN"), "--checkpoint-dir", file("checkpoints")});
        for (int host = 0; host < hosts; ++host) {
            std::vector<std::string> words{"env",
                                           "DDPRUN_TOKEN=secret of the job",
                                           path_of("DDPRUN"),
                                           "--nnodes=" + least_ + std::to_string(hosts),
                                           "--nproc-per-node=" + std::to_string(workers_on(host)),
                                           "--node-rank=" + std::to_string(host),
                                           "--master-addr=node00",
                                           "--master-port=29400"};
            words.insert(words.end(), options.begin(), options.end());
            words.insert(words.end(), arguments.begin(), arguments.end());
            nodes_.push_back(std::make_unique<Program>(hosts_->command(host, words)));
            std::erase(words, "--node-rank=" + std::to_string(host));
            spare_ = words;
        }
    }
    void start_endless(const std::vector<std::string>& options = {}) {
        start(2, {"--epochs", "100000"}, options);
        ASSERT_TRUE(node(0).wait_for_output(" 2/100000"));
    }
    Program& node(int host) { return *nodes_[static_cast<std::size_t>(host)]; }
    [[nodiscard]] std::string file(const std::string& name) const { return hosts_->shared() + "/" + name; }
    /// Sends a signal to the process of a rank.
    void signal_rank(int host, int rank, const std::string& signal) {
        const Outcome sent = run(hosts_->command(
            host,
            {"sh", "-c",
             "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = train ] && grep -qz '^RANK=" +
                 std::to_string(rank) + "$' $p/environ && kill -" + signal + " ${p#/proc/}; done; true"}));
        EXPECT_EQ(sent.status, 0) << sent.err;
    }

    /// True once none of this host's workers is left.
    bool workers_end(int host) {
        const auto count = [&] {
            return run(hosts_->command(host, {"sh", "-c", "cat /proc/[0-9]*/comm | grep -cx train; true"}))
                .out;
        };
        for (const auto until = std::chrono::steady_clock::now() + 60s;
             std::chrono::steady_clock::now() < until;) {
            if (count() == "0\n") return true;
        }
        return false;
    }
    /// The loss of the last epoch.
    static double loss_in(const std::string& output) {
        const std::size_t at = output.rfind("  loss ");
        return at == std::string::npos ? NAN : std::strtod(output.c_str() + at + 7, nullptr);
    }

    int workers_ = 0;                 ///< on each host; 0: as above
    std::string least_;               ///< "1:" for a job that may shrink
    std::vector<std::string> spare_;  ///< the command of one more host
    std::unique_ptr<Hosts> hosts_;
    std::vector<std::unique_ptr<Program>> nodes_;
};

TEST_F(TrainHosts, TwoThreeAndFiveHostsOfDifferentSizesTrainOneModel) {
    for (const int hosts : {2, 3, 5}) {
        hosts_.reset();
        std::string bits[2];
        for (std::string& parameters : bits) {
            start(hosts, {"--epochs", "2"});
            for (int host = 1; host < hosts; ++host) {
                const Outcome outcome = node(host).wait();
                ASSERT_EQ(outcome.status, 0) << outcome.err;
            }
            const Outcome head = node(0).wait();
            ASSERT_EQ(head.status, 0) << head.err;
            const std::string equal =
                "parameters are bitwise equal on " + std::to_string(workers_of(hosts)) + " workers, sha256 ";
            ASSERT_THAT(head.out,
                        AllOf(HasSubstr("between " + std::to_string(hosts) + " nodes"), HasSubstr(equal)));
            parameters = head.out.substr(head.out.find(equal) + equal.size(), 64);
        }
        EXPECT_EQ(bits[0], bits[1]) << hosts << " hosts, from run to run";
    }
}

TEST_F(TrainHosts, TwoHostsOfTwoWorkersLearnWhatOneHostOfFourDoes) {
    double losses[2];
    for (const int hosts : {1, 2}) {
        hosts_.reset();
        workers_ = 4 / hosts;
        start(hosts, {"--epochs", "4"});
        if (hosts == 2) {
            EXPECT_EQ(node(1).wait().status, 0);
        }
        const Outcome head = node(0).wait();
        ASSERT_EQ(head.status, 0) << head.err;
        ASSERT_THAT(head.out, HasSubstr("bitwise equal on 4 workers"));
        losses[hosts - 1] = loss_in(head.out);
    }
    // Compare the printed digits: sums go node by node, so floats are rounded differently.
    EXPECT_NEAR(losses[0], losses[1], 0.0002);
    EXPECT_LT(losses[1], 2.0) << "of ten classes: it has learnt";
}

TEST_F(TrainHosts, DelayAndFramesThatOvertakeEachOtherChangeNoBit) {
    std::vector<std::string> bits;
    for (const Hosts::Switch made_of : {Hosts::Switch::Bridge, Hosts::Switch::Slow}) {
        hosts_.reset();
        hosts_ = std::make_unique<Hosts>(2, made_of);
        start(2, {"--epochs", "1", "--batch-size", "128"});
        const Outcome other = node(1).wait(), head = node(0).wait();
        ASSERT_EQ(other.status, 0) << other.err;
        ASSERT_EQ(head.status, 0) << head.err;
        const std::size_t at = head.out.find("sha256 ");
        ASSERT_NE(at, std::string::npos) << head.out;
        bits.push_back(head.out.substr(at, 64));
    }
    EXPECT_EQ(bits[0], bits[1]);
}

TEST_F(TrainHosts, AnotherProviderOfLibfabricChangesNoBit) {
    std::vector<std::string> bits;
    hosts_ = std::make_unique<Hosts>(2);
    for (const char* provider : {"tcp", "udp;ofi_rxd"}) {
        const ddp::testing::Variable chosen("FI_PROVIDER", provider);
        start(2, {"--epochs", "1", "--batch-size", "128"});
        const Outcome other = node(1).wait(), head = node(0).wait();
        ASSERT_EQ(other.status, 0) << other.err;
        ASSERT_EQ(head.status, 0) << head.err;
        EXPECT_THAT(head.out, HasSubstr(", " + std::string(provider))) << "backend cpu says it";
        bits.push_back(head.out.substr(head.out.find("sha256 "), 64));
    }
    EXPECT_EQ(bits[0], bits[1]);
}

TEST_F(TrainHosts, AProviderThatReachesNoOtherHostIsReportedInOneLineWithTheRemedy) {
    hosts_ = std::make_unique<Hosts>(2);
    for (const char* provider : {"shm", "nosuch"}) {
        const ddp::testing::Variable chosen("FI_PROVIDER", provider);
        start(2, {"--epochs", "1"});
        const Outcome other = node(1).wait(), head = node(0).wait();
        EXPECT_NE(head.status, 0);
        EXPECT_THAT(head.err + other.err,
                    AllOf(HasSubstr("libfabric has no provider '" + std::string(provider) +
                                    "' with reliable tagged messages to other hosts"),
                          HasSubstr("set FI_PROVIDER")));
    }
}

TEST_F(TrainHosts, AKilledRankIsReplacedAndChangesNoBit) {
    std::string digests[2];
    for (const bool kills : {false, true}) {
        start(2, {"--epochs", "150"});
        ASSERT_TRUE(node(0).wait_for_output(" 5/150"));
        if (kills) {
            signal_rank(1, 2, "KILL");
            EXPECT_TRUE(node(0).wait_for_output("rank 2 is back"));
            signal_rank(0, 0, "KILL");
        }
        EXPECT_EQ(node(1).wait().status, 0);
        const Outcome head = node(0).wait();
        ASSERT_EQ(head.status, 0) << head.err;
        EXPECT_EQ(kills, head.err.find("2 ranks go on in place, rank 0 starts again") != std::string::npos);
        digests[kills ? 1 : 0] = head.out.substr(head.out.find("sha256 "), 71);
    }
    EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(TrainHosts, ALostHostIsReplacedByASpareInPlaceAndChangesNoBit) {
    workers_ = 2;
    hosts_ = std::make_unique<Hosts>(3);
    std::string digests[2];
    for (const bool is_lost : {false, true}) {
        start(2, {"--epochs", "150"});
        ASSERT_TRUE(node(0).wait_for_output(" 2/150"));
        if (is_lost) {
            nodes_.push_back(std::make_unique<Program>(hosts_->command(2, spare_)));
            ASSERT_TRUE(node(2).wait_for_output("a spare"));
            node(1).signal(SIGKILL);
            EXPECT_TRUE(node(0).wait_for_output("ranks 2, 3 are back"));
        }
        const Outcome head = node(0).wait();
        ASSERT_EQ(head.status, 0) << head.err;
        digests[is_lost ? 1 : 0] = head.out.substr(head.out.find("sha256 "), 71);
    }
    EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(TrainHosts, WithoutASpareTheRanksOfALostHostAreMissingAndTheOthersGoOnInPlace) {
    workers_ = 1;
    least_ = "1:";
    start(2, {"--epochs", "60"});
    ASSERT_TRUE(node(0).wait_for_output("between 2 nodes"));
    ASSERT_TRUE(node(0).wait_for_output(" 5/60"));
    node(1).signal(SIGKILL);
    const Outcome head = node(0).wait();
    EXPECT_EQ(head.status, 0) << head.err;
    EXPECT_THAT(head.err, HasSubstr("] recovered after "));
    EXPECT_THAT(head.out, HasSubstr("bitwise equal on 1 worker, sha256"));
}

TEST_F(TrainHosts, AKilledRankEndsTheWorkersOfBothHosts) {
    start_endless({"--recover=restart"});
    signal_rank(1, 2, "KILL");
    const Outcome head = node(0).wait(), other = node(1).wait();
    EXPECT_EQ(head.status, 128 + SIGKILL);
    EXPECT_EQ(other.status, 128 + SIGKILL);
    EXPECT_THAT(head.err, HasSubstr("root cause: rank 2 on node01, signal 9"));
}

TEST_F(TrainHosts, SigtermSavesACheckpointThatBothHostsGoOnFrom) {
    for (const bool resumes : {false, true}) {
        start(2, resumes ? std::vector<std::string>{"--epochs", "100000", "--resume"}
                         : std::vector<std::string>{"--epochs", "100000"});
        ASSERT_TRUE(node(0).wait_for_output(resumes ? "train: resuming from /" : " 2/100000"));
        for (const int host : {0, 1}) node(host).signal(SIGTERM);
        const Outcome head = node(0).wait(), other = node(1).wait();
        EXPECT_EQ(head.status, 75) << head.err;
        EXPECT_EQ(other.status, 75) << other.err;
        EXPECT_THAT(head.out, HasSubstr(": saved /"));
    }
}

TEST_F(TrainHosts, ACrashedRankIsReportedWithItsSignalByBothHosts) {
    start_endless({"--recover=restart"});
    signal_rank(1, 2, "SEGV");
    const Outcome head = node(0).wait(), other = node(1).wait();
    EXPECT_EQ(head.status, 128 + SIGSEGV);
    EXPECT_EQ(other.status, 128 + SIGSEGV);
    EXPECT_THAT(head.err, AllOf(HasSubstr("root cause: rank 2 on node01, signal 11"),
                                HasSubstr("SIGSEGV (invalid memory access)")));
}

TEST_F(TrainHosts, AKilledDdprunEndsItsWorkersAndTheJobThatNeedsThem) {
    start_endless();
    node(1).signal(SIGKILL);
    const Outcome head = node(0).wait();
    EXPECT_EQ(head.status, 69) << head.err;
    EXPECT_THAT(head.err, HasSubstr("node01"));
    EXPECT_TRUE(workers_end(0));
    EXPECT_TRUE(workers_end(1));
}

TEST_F(TrainHosts, AJobThatMayShrinkGoesOnFromItsCheckpointWhenTheDdprunOfAHostIsKilled) {
    least_ = "1:";
    start(2, {"--epochs", "100000", "--checkpoint-every", "1"}, {"--max-restarts=1", "--recover=restart"});
    ASSERT_TRUE(node(0).wait_for_output("between 2 nodes"));
    ASSERT_TRUE(node(0).wait_for_output(" 3/100000"));
    node(1).signal(SIGKILL);
    ASSERT_TRUE(node(0).wait_for_output("train: resuming from /"));
    EXPECT_TRUE(workers_end(1));
    node(0).signal(SIGTERM);
    const Outcome head = node(0).wait();
    EXPECT_EQ(head.status, 75) << head.err;
    EXPECT_THAT(head.err, HasSubstr("node01"));
    EXPECT_TRUE(workers_end(0));
}

TEST_F(TrainHosts, ADamagedCheckpointIsNamedWithTheHostThatReadIt) {
    start(2, {"--epochs", "1"});
    for (const int host : {1, 0}) ASSERT_EQ(node(host).wait().status, 0);
    ASSERT_EQ(
        run({"sh", "-c",
             "for f in " + file("checkpoints") + "/step-*/model.safetensors; do truncate -s 1000 $f; done"})
            .status,
        0);
    start(2, {"--epochs", "2", "--resume"});
    const Outcome other = node(1).wait(), head = node(0).wait();
    EXPECT_EQ(head.status, 65);
    EXPECT_EQ(other.status, 65);
    EXPECT_THAT(head.err, AllOf(HasSubstr("/model.safetensors: truncated"),
                                HasSubstr("root cause: rank 0 on node00, exit code 65")));
}

TEST_F(TrainHosts, ACutCableEndsTheWorkersOfBothHosts) {
    start_endless({"--heartbeat-timeout=1s"});
    hosts_->cut_cable(1);
    const Outcome head = node(0).wait(), other = node(1).wait();
    EXPECT_EQ(head.status, 69) << head.err;
    EXPECT_EQ(other.status, 69) << other.err;
    EXPECT_THAT(head.err, HasSubstr("node01"));
}

TEST_F(TrainHosts, AStoppedRankIsNamedByTheHangDetector) {
    start_endless({"--hang-timeout=2s", "--recover=restart"});
    signal_rank(1, 1, "STOP");
    const Outcome head = node(0).wait();
    node(1).wait();
    EXPECT_NE(head.status, 0);
    EXPECT_THAT(head.err, HasSubstr("rank 1"));
}

TEST_F(TrainHosts, AStrangerAtEveryPortDoesNotDisturbTheJob) {
    start_endless();
    const Outcome stranger = run(hosts_->command(1, {"python3", "-c", R"(
import os, socket
ports = {int(line.split()[1].split(':')[1], 16) for line in open('/proc/net/tcp') if line.split()[3] == '0A'}
assert len(ports) >= 2  # of the workers
for port in ports:
    for junk in (b'', b'\0' * 64, os.urandom(100000)):
        try:
            with socket.create_connection(('node01', port), timeout=2) as c: c.sendall(junk)
        except OSError: pass
print('talked to', len(ports)))"}));
    EXPECT_THAT(stranger.out, HasSubstr("talked to")) << stranger.err;
    ASSERT_TRUE(node(0).wait_for_output(" 60/100000"));
    node(0).signal(SIGTERM);
    node(1).signal(SIGTERM);
    const Outcome head = node(0).wait(), other = node(1).wait();
    EXPECT_THAT(head.err, testing::Not(HasSubstr("root cause")));
}

}  // namespace
}  // namespace ddprun::test
