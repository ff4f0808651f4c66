// By which addresses nodes find each other: names that several addresses stand behind, also wrong ones, and IPv6 alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

class Addresses : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = Hosts::why_not()) GTEST_SKIP() << *reason;
        hosts_ = std::make_unique<Hosts>(2);
    }
    void on(int host, const std::string& script) {
        const Outcome outcome = run(hosts_->command(host, {"sh", "-ec", script}));
        ASSERT_EQ(outcome.status, 0) << outcome.err;
    }
    /// The first words of a host's /etc/hosts, which becomes its own.
    void say_first(int host, const std::string& lines) {
        on(host, "printf '" + lines + "' >/tmp/names; cat /etc/hosts >>/tmp/names; mount --bind /tmp/names /etc/hosts");
    }
    /// A job of both hosts at this endpoint, whose workers say their MASTER_ADDR.
    void expect_job_at(const std::string& endpoint, const std::string& master) {
        std::vector<std::unique_ptr<Program>> nodes;
        for (int host : {0, 1}) {
            std::vector<std::string> command{"env", "DDPRUN_TOKEN=secret of the job"};
            const std::vector<std::string> job = ddprun_probe({"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" + endpoint,
                                                               "--rdzv-conf=join_timeout=20"}, {"env", "MASTER_ADDR"});
            command.insert(command.end(), job.begin(), job.end());
            nodes.push_back(std::make_unique<Program>(hosts_->command(host, command)));
        }
        for (const auto& node : nodes) {
            const Outcome outcome = node->wait();
            EXPECT_EQ(outcome.status, 0) << outcome.err;
            EXPECT_THAT(outcome.out, HasSubstr("MASTER_ADDR=" + master + "\n")) << outcome.err;
        }
    }

    std::unique_ptr<Hosts> hosts_;
};

TEST_F(Addresses, TheHeadsOwnNameMayBeALoopbackAddressThere) {
    say_first(0, "127.0.1.1 node00\\n");  // as Debian's installer writes it
    expect_job_at("node00:29400", "node00");
}

TEST_F(Addresses, AWrongFirstAddressCostsNoTimeOut) {
    say_first(1, "10.77.0.3 meet\\n10.77.0.1 meet\\n");
    on(1, "ip neighbour add 10.77.0.3 lladdr 02:00:00:00:00:99 dev eth0");  // nobody; and nearer to us than the right one
    say_first(0, "10.77.0.1 meet\\n");
    const auto begun = std::chrono::steady_clock::now();
    expect_job_at("meet:29400", "meet");
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5)) << "what one dead address was given before";
}

TEST_F(Addresses, Ipv6AloneIsEnough) {
    for (int host : {0, 1}) {
        on(host, "echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6 2>/dev/null || true; ip -6 address add fd77::" + std::to_string(host + 1) +
                     "/64 dev eth0 nodad; ip -4 address flush dev eth0");
    }
    expect_job_at("[fd77::1]:29400", "fd77::1");
}

}  // namespace
}  // namespace ddprun::test
