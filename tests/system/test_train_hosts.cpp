// Training without GPUs on several hosts (tests/support/hosts.h), and what its network does to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

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
    static int workers_on(int host) { return 1 + host % 2; }
    static int workers_of(int hosts) { return hosts + hosts / 2; }

    void start(int hosts, std::vector<std::string> arguments, const std::vector<std::string>& options = {}) {
        if (!hosts_) hosts_ = std::make_unique<Hosts>(hosts);
        nodes_.clear();
        arguments.insert(arguments.begin(), {path_of("TRAIN"), "--checkpoint-dir", file("checkpoints")});
        for (int host = 0; host < hosts; ++host) {
            std::vector<std::string> words{"env", "DDPRUN_TOKEN=secret of the job", path_of("DDPRUN"), "--nnodes=" + std::to_string(hosts),
                                           "--nproc-per-node=" + std::to_string(workers_on(host)), "--node-rank=" + std::to_string(host),
                                           "--master-addr=node00", "--master-port=29400"};
            words.insert(words.end(), options.begin(), options.end());
            words.insert(words.end(), arguments.begin(), arguments.end());
            nodes_.push_back(std::make_unique<Program>(hosts_->command(host, words)));
        }
    }
    void start_endless(const std::vector<std::string>& options = {}) {
        start(2, {"--epochs", "100000"}, options);
        ASSERT_TRUE(node(0).wait_for_output(" 2/100000"));
    }
    Program& node(int host) { return *nodes_[static_cast<std::size_t>(host)]; }
    [[nodiscard]] std::string file(const std::string& name) const { return hosts_->shared() + "/" + name; }
    /// To the process of a rank.
    void signal_rank(int host, int rank, const std::string& signal) {
        const Outcome sent = run(hosts_->command(host, {"sh", "-c", "for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = train ] && grep -qz '^RANK=" +
                                                                        std::to_string(rank) + "$' $p/environ && kill -" + signal + " ${p#/proc/}; done; true"}));
        EXPECT_EQ(sent.status, 0) << sent.err;
    }

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
            const std::string equal = "parameters are bitwise equal on " + std::to_string(workers_of(hosts)) + " workers, sha256 ";
            ASSERT_THAT(head.out, AllOf(HasSubstr("between " + std::to_string(hosts) + " nodes"), HasSubstr(equal)));
            parameters = head.out.substr(head.out.find(equal) + equal.size(), 64);
        }
        EXPECT_EQ(bits[0], bits[1]) << hosts << " hosts, from run to run";
    }
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

TEST_F(TrainHosts, AProviderThatReachesNoOtherHostIsOneLineWithTheRemedy) {
    hosts_ = std::make_unique<Hosts>(2);
    for (const char* provider : {"shm", "nosuch"}) {
        const ddp::testing::Variable chosen("FI_PROVIDER", provider);
        start(2, {"--epochs", "1"});
        const Outcome other = node(1).wait(), head = node(0).wait();
        EXPECT_NE(head.status, 0);
        EXPECT_THAT(head.err + other.err, AllOf(HasSubstr("libfabric has no provider '" + std::string(provider) + "' with reliable tagged messages to other hosts"),
                                                HasSubstr("set FI_PROVIDER")));
    }
}

TEST_F(TrainHosts, AKilledRankEndsTheWorkersOfBothHosts) {
    start_endless();
    signal_rank(1, 2, "KILL");
    const Outcome head = node(0).wait(), other = node(1).wait();
    EXPECT_EQ(head.status, 128 + SIGKILL);
    EXPECT_EQ(other.status, 128 + SIGKILL);
    EXPECT_THAT(head.err, HasSubstr("root cause: rank 2 on node01, signal 9"));
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
    start_endless({"--hang-timeout=2s"});
    signal_rank(1, 1, "STOP");
    const Outcome head = node(0).wait();
    node(1).wait();
    EXPECT_NE(head.status, 0);
    EXPECT_THAT(head.err, HasSubstr("rank 1"));
}

TEST_F(TrainHosts, AStrangerWhoTalksToEveryPortDisturbsNobody) {
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
