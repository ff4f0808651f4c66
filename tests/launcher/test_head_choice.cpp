#include "launcher/plan/head_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddprun {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

JobSpec two_nodes_at(const std::string& host) {
    JobSpec spec;
    spec.nodes = {2, 2};
    spec.rendezvous.endpoint = Endpoint{host, 29400};
    return spec;
}

const HostFacts kNode01{"node01", {"10.0.0.1", "127.0.0.1"}, {}};

std::string served(const JobSpec& spec, bool is_python = true) {
    const Result<TorchStoreChoice> choice = choose_torch_store(spec, is_python);
    return !choice ? choice.error().what : choice->is_served ? "served" : choice->why;
}

TEST(TorchStoreChoice, PythonProgramsGetItAndOthersMayListenAtMasterPort) {
    EXPECT_EQ(served({}), "served");
    EXPECT_EQ(served({}, false), "the program is not run by Python");
    JobSpec spec;
    spec.torch_store = TorchStoreUse::Off;
    EXPECT_EQ(served(spec), "--torch-store off");
    spec.torch_store = TorchStoreUse::On;
    EXPECT_EQ(served(spec, false), "served");
}

TEST(TorchStoreChoice, AnotherAddressOrPortOfTheUserStaysTheUsers) {
    JobSpec one;
    one.rendezvous.master_port = 29500;
    one.rendezvous.master_addr = "127.0.0.1";
    EXPECT_EQ(served(one), "served");
    one.rendezvous.master_addr = "node01";
    EXPECT_THAT(served(one), HasSubstr("listens on the loopback, and --master-addr is node01"));
    one.torch_store = TorchStoreUse::On;
    EXPECT_THAT(served(one), HasSubstr("--torch-store on: the controller"));

    JobSpec two = two_nodes_at("node01");
    EXPECT_EQ(served(two), "served");
    two.rendezvous.master_addr = "node01";
    two.rendezvous.master_port = 29400;
    EXPECT_EQ(served(two), "served");
    two.rendezvous.master_port = 29500;
    EXPECT_THAT(served(two), HasSubstr("another place than node01:29400"));
}

/// A head whose --iface has a separate address.
Result<HeadChoice> head_on(const std::string& address, const std::string& endpoint,
                           std::vector<std::string> endpoint_addresses) {
    JobSpec spec = two_nodes_at(endpoint);
    spec.rendezvous.is_host = true;
    spec.rendezvous.iface = "ib0";
    spec.rendezvous.listen_on = address;
    return choose_head(spec,
                       {"node01", {"10.0.0.1", "10.9.0.1", "127.0.0.1"}, std::move(endpoint_addresses)});
}

TEST(HeadOnAnInterface, ListensOnItsAddressOnly) {
    EXPECT_EQ(head_on("10.9.0.1", "10.9.0.1", {"10.9.0.1"})->endpoint, (Endpoint{"10.9.0.1", 29400}));
    EXPECT_EQ(head_on("10.9.0.1", "node01", {"10.0.0.1", "10.9.0.1"})->endpoint,
              (Endpoint{"10.9.0.1", 29400}))
        << "the others try all that a name has";
    EXPECT_EQ(head_on("10.9.0.1", "node01", {"127.0.1.1"})->endpoint, (Endpoint{"10.9.0.1", 29400}))
        << "others have another address for that name";
    EXPECT_EQ(head_on("", "node01", {"10.0.0.1"})->endpoint, (Endpoint{"", 29400}));
    EXPECT_EQ(own_endpoint({}, 29400), (Endpoint{"127.0.0.1", 29400}));
}

TEST(HeadOnAnInterface, IsRefusedIfOtherNodesWouldUseAnotherAddress) {
    const Result<HeadChoice> choice = head_on("10.9.0.1", "node01", {"10.0.0.1"});
    ASSERT_FALSE(choice);
    EXPECT_EQ(
        choice.error().what,
        "--iface=ib0 is 10.9.0.1 here, where the other nodes would not look: they know this host as node01 (10.0.0.1); "
        "let --rdzv-endpoint be 10.9.0.1");
    EXPECT_FALSE(head_on("10.9.0.1", "localhost", {"127.0.0.1"}));
}

TEST(TorchStoreChoice, WithTlsItIsNotOfferedToOtherHosts) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.tls = true;
    EXPECT_THAT(served(spec), HasSubstr("PyTorch's clients speak no TLS"));
    spec.torch_store = TorchStoreUse::On;
    EXPECT_THAT(served(spec), HasSubstr("--torch-store on: PyTorch's clients speak no TLS"));
    JobSpec one;
    one.rendezvous.tls = true;
    EXPECT_EQ(served(one), "served");
}

TEST(Head, OfOneNodeIsThatNode) {
    EXPECT_TRUE(choose_head({}, kNode01)->is_head);
    EXPECT_EQ(choose_head({}, kNode01)->endpoint, (Endpoint{"127.0.0.1", 0}));
}

TEST(Head, IsTheHostThatTheEndpointNames) {
    EXPECT_TRUE(choose_head(two_nodes_at("node01"), kNode01)->is_head);
    EXPECT_TRUE(choose_head(two_nodes_at("10.0.0.1"), kNode01)->contested)
        << "two of its processes may both think so";
    EXPECT_FALSE(choose_head(two_nodes_at("node02"), kNode01)->is_head);
    HostFacts behind_an_alias = kNode01;
    behind_an_alias.endpoint_addresses = {"10.0.0.1"};
    EXPECT_TRUE(choose_head(two_nodes_at("head.cluster"), behind_an_alias)->is_head);
}

TEST(Head, IsTheHostWhoseNameItsOwnHostsFileGivesALoopbackAddress) {
    HostFacts debian = kNode01;
    debian.endpoint_addresses = {"127.0.1.1"};  // belongs to no interface
    EXPECT_TRUE(choose_head(two_nodes_at("node01.cluster"), debian)->is_head);
    debian.endpoint_addresses = {"::1"};
    EXPECT_TRUE(choose_head(two_nodes_at("node01.cluster"), debian)->is_head);
}

TEST(Head, OfC10dIsTheEndpointsHostForAnyNodeRank) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.backend = "c10d";
    spec.rendezvous.node_rank = 1;
    EXPECT_TRUE(choose_head(spec, kNode01)->is_head);
    spec.rendezvous.endpoint->host = "node02";
    spec.rendezvous.node_rank = 0;
    HostFacts resolving = kNode01;
    resolving.endpoint_addresses = {"10.0.0.2"};
    EXPECT_FALSE(choose_head(spec, resolving)->is_head);
    EXPECT_TRUE(choose_head(spec, kNode01)->is_head) << "the name tells nothing";
}

TEST(Head, OfStaticFollowsTheNodeRankForAnyHostName) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.node_rank = 1;
    EXPECT_FALSE(choose_head(spec, kNode01)->is_head);
    spec.rendezvous.endpoint->host = "node02";
    spec.rendezvous.node_rank = 0;
    EXPECT_TRUE(choose_head(spec, kNode01)->is_head);
    EXPECT_EQ(choose_head(spec, kNode01)->why, "node rank 0");
    HostFacts resolving = kNode01;
    resolving.endpoint_addresses = {"10.0.0.2"};
    EXPECT_THAT(choose_head(spec, resolving)->why, HasSubstr("though node02 is not this host"));
}

TEST(Head, IsHostOverridesBothRules) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.node_rank = 0;
    spec.rendezvous.is_host = false;
    EXPECT_FALSE(choose_head(spec, kNode01)->is_head);
    spec.rendezvous.node_rank = 1;
    spec.rendezvous.is_host = true;
    EXPECT_TRUE(choose_head(spec, kNode01)->is_head);
    EXPECT_EQ(choose_head(spec, kNode01)->endpoint, (Endpoint{"", 29400}))
        << "it listens, on all its addresses";
}

TEST(Head, OfSeveralNodesNeedsAnEndpoint) {
    JobSpec spec;
    spec.nodes = {2, 2};
    EXPECT_THAT(choose_head(spec, kNode01).error().what, HasSubstr("--rdzv-endpoint"));
}

TEST(MasterHost, IsTheUsersIfGiven) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.local_addr = "10.1.1.1";
    spec.rendezvous.master_addr = "10.2.2.2";
    EXPECT_EQ(master_host(spec, true, {"10.1.1.1"}), "10.2.2.2");
}

TEST(MasterHost, OfThisNodeIsItsLocalAddressElseTheEndpoint) {
    JobSpec spec = two_nodes_at("node01");
    EXPECT_EQ(master_host(spec, true, {"127.0.0.1"}), "node01")
        << "we reach ourselves by the loopback, others do not";
    spec.rendezvous.local_addr = "10.1.1.1";
    EXPECT_EQ(master_host(spec, true, {"10.1.1.1"}), "10.1.1.1");
    EXPECT_EQ(master_host({}, true, {"127.0.0.1"}), "127.0.0.1");
}

TEST(MasterHost, OfAnotherNodeIsTheAddressThatItSent) {
    JobSpec spec = two_nodes_at("node01");
    spec.rendezvous.local_addr = "10.1.1.1";
    EXPECT_EQ(master_host(spec, false, {"10.0.0.9"}), "10.0.0.9");
}

TEST(ChooseMaster, IsTheControllersPortIfItServesPyTorchsStore) {
    const MasterChoice master = choose_master(two_nodes_at("10.0.0.1"), true, 29400, false, true, {});
    EXPECT_EQ(master.host, "10.0.0.1");
    EXPECT_EQ(master.port, 29400);
}

TEST(ChooseMaster, IsASeparatePortForAnotherStore) {
    JobSpec spec = two_nodes_at("10.0.0.1");
    EXPECT_EQ(choose_master(spec, false, 29400, false, true, {}).port, 0) << "reserved for each generation";
    EXPECT_EQ(choose_master(spec, false, 29400, false, false, {"10.0.0.2"}).host, "10.0.0.2");
    spec.rendezvous.master_port = 29500;
    EXPECT_EQ(choose_master(spec, false, 29400, false, true, {}).port, 0) << "the controller listens there";
    EXPECT_EQ(choose_master(spec, false, 29400, true, true, {}).port, 29500)
        << "the nodes have met elsewhere";
    JobSpec one;
    one.rendezvous.master_port = 29500;
    EXPECT_EQ(choose_master(one, false, 0, false, true, {}).port, 29500);
}

TEST(LocalAddress, IsAnAddressOfThisHost) {
    const std::vector<std::string> own = {"127.0.0.1", "10.0.0.1", "fe80::1%eth0", "::1"};
    for (const char* address : {"10.0.0.1", "127.0.0.7", "fe80::1", "fe80::1%eth0", "node01", "localhost"}) {
        EXPECT_TRUE(check_local_address(address, own)) << address;
    }
    EXPECT_EQ(
        check_local_address("10.99.99.99", own).error().what,
        "--local-addr=10.99.99.99: no address of this host (it has 10.0.0.1, fe80::1%eth0); leave it out, or name an interface by --iface");
    EXPECT_THAT(check_local_address("2001:db8::1", {"127.0.0.1"}).error().what,
                HasSubstr("(it has the loopback only)"));
}

TEST(HeartbeatsOf, CountsAsTorchrunDoes) {
    RendezvousSpec rdzv;
    rdzv.keep_alive_interval = seconds(2);
    EXPECT_EQ(heartbeats_of(rdzv).interval, seconds(2));
    EXPECT_EQ(heartbeats_of(rdzv).timeout, seconds(6));
    rdzv.keep_alive_attempts = 5;
    EXPECT_EQ(heartbeats_of(rdzv).timeout, seconds(10));
}

TEST(HeartbeatsOf, IsDdprunsDefaultWithoutOptions) {
    EXPECT_EQ(heartbeats_of({}).timeout, seconds(3));
    EXPECT_EQ(heartbeats_of({}).interval, milliseconds(500));
}

TEST(HeartbeatsOf, HasOneLimitThatOverridesTorchrunsOptions) {
    RendezvousSpec rdzv;
    rdzv.keep_alive_interval = seconds(2);
    rdzv.heartbeat_timeout = seconds(12);
    EXPECT_EQ(heartbeats_of(rdzv).timeout, seconds(12));
    EXPECT_EQ(heartbeats_of(rdzv).interval, seconds(2));
}

TEST(HeartbeatsOf, HasTorchrunsIntervalWhereOnlyAttemptsAreGiven) {
    RendezvousSpec rdzv;
    rdzv.keep_alive_attempts = 4;
    EXPECT_EQ(heartbeats_of(rdzv).timeout, seconds(20));
}

TEST(HeartbeatsOf, BeatsTwiceWithinASingleAttempt) {
    RendezvousSpec rdzv;
    rdzv.keep_alive_interval = seconds(1);
    rdzv.keep_alive_attempts = 1;
    EXPECT_EQ(heartbeats_of(rdzv).interval, milliseconds(500));
    EXPECT_EQ(heartbeats_of(rdzv).timeout, seconds(1));
}

}  // namespace
}  // namespace ddprun
