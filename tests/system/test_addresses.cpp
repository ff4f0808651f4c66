// The addresses by which nodes find each other: names with several addresses, even wrong ones, and IPv6
// alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <memory>

#include "tests/support/hosts.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
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
    /// Puts lines at the beginning of a host's own /etc/hosts.
    void say_first(int host, const std::string& lines) {
        on(host, "printf '" + lines +
                     "' >/tmp/names; cat /etc/hosts >>/tmp/names; mount --bind /tmp/names /etc/hosts");
    }
    /// The words of one ddprun of a job, started by hand, behind those that start it.
    static std::vector<std::string> words(std::vector<std::string> starter, std::vector<std::string> options,
                                          const std::vector<std::string>& acts) {
        const std::vector<std::string> common{"--nproc-per-node=1", "--rdzv-backend=c10d",
                                              "--rdzv-conf=join_timeout=20"};
        options.insert(options.begin(), common.begin(), common.end());
        const std::vector<std::string> job = ddprun_probe(options, acts);
        starter.insert(starter.begin(), {"env", "DDPRUN_TOKEN=secret of the job"});
        starter.insert(starter.end(), job.begin(), job.end());
        return starter;
    }
    std::unique_ptr<Program> start(int host, std::vector<std::string> options,
                                   const std::vector<std::string>& acts) {
        return std::make_unique<Program>(hosts_->command(host, words({}, std::move(options), acts)));
    }
    /// A job of both hosts at this endpoint, whose workers print their MASTER_ADDR.
    void expect_job_at(const std::string& endpoint, const std::string& master) {
        std::vector<std::unique_ptr<Program>> nodes;
        for (int host : {0, 1})
            nodes.push_back(
                start(host, {"--nnodes=2", "--rdzv-endpoint=" + endpoint}, {"env", "MASTER_ADDR"}));
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

TEST_F(Addresses, AWrongFirstAddressCostsNoTimeout) {
    say_first(1, "10.77.0.3 meet\\n10.77.0.1 meet\\n");
    on(1, "ip neighbour add 10.77.0.3 lladdr 02:00:00:00:00:99 dev eth0");  // no host; a nearer address than
                                                                            // the right one
    say_first(0, "10.77.0.1 meet\\n");
    const auto begun = std::chrono::steady_clock::now();
    expect_job_at("meet:29400", "meet");
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5))
        << "what one dead address was given before";
}

TEST_F(Addresses, AWrongFirstAddressCostsNoTimeoutWhenTheHeadComesLater) {
    say_first(1, "10.77.0.3 meet\\n10.77.0.1 meet\\n");
    on(1, "ip neighbour add 10.77.0.3 lladdr 02:00:00:00:00:99 dev eth0");
    say_first(0, "10.77.0.1 meet\\n");
    const auto begun = std::chrono::steady_clock::now();
    const std::vector<std::string> options{"--nnodes=2", "--rdzv-endpoint=meet:29400"};
    const std::unique_ptr<Program> node = start(1, options, {"exit", "0"});
    Program head(
        hosts_->command(0, words({"sh", "-c", "sleep 0.3; exec \"$0\" \"$@\""}, options, {"exit", "0"})));
    EXPECT_EQ(node->wait().status, 0);
    EXPECT_EQ(head.wait().status, 0);
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
}

TEST_F(Addresses, AWorkerWhoseNameServerIsSilentNamesTheHostAfterItsTimeout) {
    Program server(
        hosts_->command(1, {"python3", "-c",
                            "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                            "s.bind(('127.0.0.1', 53))\nprint('up', flush=True)\nwhile True: s.recv(512)"}));
    ASSERT_TRUE(server.wait_for_output("up"));
    on(1, "printf 'nameserver 127.0.0.1\noptions timeout:30\n' >/tmp/silent");
    const std::string worker =
        "[ $RANK = 0 ] && exec \"$0\" lag; mount --bind /dev/null /etc/hosts; "
        "mount --bind /tmp/silent /etc/resolv.conf; exec \"$0\" join";
    std::vector<std::unique_ptr<Program>> nodes;
    for (int host : {0, 1}) {
        nodes.push_back(std::make_unique<Program>(hosts_->command(
            host, {"env", "DDPRUN_TOKEN=secret of the job", path_of("DDPRUN"), "--nnodes=2",
                   "--rdzv-endpoint=node00:29400", "sh", "-c", worker, path_of("DDP_PROBE")})));
    }
    EXPECT_THAT(nodes[1]->wait().err,
                HasSubstr("rank 1: looking up MASTER_ADDR=node00: the resolver has not answered"));
}

TEST_F(Addresses, Ipv6AloneSuffices) {
    for (int host : {0, 1}) {
        on(host,
           "echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6 2>/dev/null || true; ip -6 address add fd77::" +
               std::to_string(host + 1) + "/64 dev eth0 nodad; ip -4 address flush dev eth0");
    }
    expect_job_at("[fd77::1]:29400", "fd77::1");
}

TEST_F(Addresses, TwoJobsOnTheSameHostsDoNotMeetEvenWhenOneLosesItsHead) {
    const std::vector<std::string> acts{"env",        "MASTER_ADDR", "say",  "running",
                                        "generation", "1",           "hold", "end"};
    const auto job_of = [&](int head) {
        std::vector<std::unique_ptr<Program>> nodes;
        for (int host : {head, 1 - head})
            nodes.push_back(
                start(host, {"--nnodes=1:2", "--rdzv-endpoint=" + Hosts::name(head) + ":29400"}, acts));
        return nodes;
    };
    const auto one = job_of(0), two = job_of(1);
    for (const auto* job : {&one, &two}) {
        ASSERT_TRUE((*job)[0]->wait_for_output("is the standby"));
        for (const auto& node : *job) ASSERT_TRUE(node->wait_for_output("running\n"));
    }
    one[0]->signal(SIGKILL);
    const Outcome survivor = one[1]->wait();
    EXPECT_EQ(survivor.status, 0) << survivor.err;
    EXPECT_THAT(survivor.err, AllOf(HasSubstr("this node is the head from now on; 1 node is here"),
                                    HasSubstr("no others can come: listen")));
    for (const auto& node : two) node->signal(SIGTERM);
    for (const auto& node : two) {
        const Outcome outcome = node->wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        EXPECT_EQ(occurrences(outcome.out, "running"), 1) << "undisturbed: " << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("MASTER_ADDR=node01\n"));
    }
}

/// Hosts with a second network beside that of their names.
class TwoNetworks : public Addresses {
  protected:
    void SetUp() override {
        Addresses::SetUp();
        for (int host : {0, 1}) {
            if (hosts_) on(host, "ip address add 10.99.0." + std::to_string(host + 1) + "/24 dev eth0");
        }
    }
};

TEST_F(TwoNetworks, AJobUsesTheNetworkOfIfaceAndIsNotReachableByTheOther) {
    const std::vector<std::string> options{"--nnodes=1:2", "--iface=10.99.0.0/24",
                                           "--rdzv-endpoint=10.99.0.1:29400", "--rdzv-id=two"};
    const auto head =
        start(0, options, {"env", "MASTER_ADDR", "say", "running", "generation", "1", "hold", "end"});
    const auto other =
        start(1, options, {"env", "MASTER_ADDR", "say", "running", "generation", "1", "hold", "end"});
    ASSERT_TRUE(head->wait_for_output("is the standby"));
    ASSERT_TRUE(other->wait_for_output("running\n"));
    on(1, "ss -Htln 2>/dev/null | grep -v 10.99.0.2 | grep -q . && exit 1; exit 0");  // the standby's port
    EXPECT_NE(run(hosts_->command(1, {"bash", "-c", "exec 3<>/dev/tcp/10.77.0.1/29400"})).status, 0);
    EXPECT_EQ(run(hosts_->command(1, {"bash", "-c", "exec 3<>/dev/tcp/10.99.0.1/29400"})).status, 0);

    head->signal(SIGKILL);  // the standby is found on that network, too
    const Outcome after = other->wait();
    EXPECT_EQ(after.status, 0) << after.err;
    EXPECT_THAT(after.err, AllOf(HasSubstr("reach node01 at 10.99.0.2 (--iface=10.99.0.0/24)"),
                                 HasSubstr("others can come with --rdzv-endpoint 10.99.0.2:29400")));
    EXPECT_THAT(after.out, AllOf(HasSubstr("MASTER_ADDR=10.99.0.1\n"), HasSubstr("MASTER_ADDR=10.99.0.2\n")));
}

TEST_F(TwoNetworks, AnEndpointOutsideIfaceIsRefusedWithTheRemedy) {
    const Outcome head =
        start(0, {"--nnodes=2", "--iface=10.99.0.0/24", "--rdzv-endpoint=10.77.0.1:29400"}, {})->wait();
    EXPECT_EQ(head.status, 64) << head.err;
    EXPECT_THAT(head.err, HasSubstr("let --rdzv-endpoint be 10.99.0.1"));
    const Outcome nowhere =
        start(1, {"--nnodes=2", "--iface=ib0", "--rdzv-endpoint=10.77.0.1:29400"}, {})->wait();
    EXPECT_EQ(nowhere.status, 64) << nowhere.err;
    EXPECT_THAT(nowhere.err,
                AllOf(HasSubstr("--iface: this host has no address on ib0"), HasSubstr("eth0 10.77.0.2")));
}

}  // namespace
}  // namespace ddprun::test
