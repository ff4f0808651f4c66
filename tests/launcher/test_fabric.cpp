#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "launcher/machine/fabric/fabric.h"
#include "launcher/machine/fabric/network.h"
#include "launcher/node/worker_start.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

EnvironmentLookup variables(std::map<std::string, std::string> set = {}) {
    return [set](std::string_view name) -> std::optional<std::string> {
        const auto found = set.find(std::string(name));
        return found == set.end() ? std::nullopt : std::optional(found->second);
    };
}

NetworkInterface interface(const std::string& name, bool is_virtual = false) {
    NetworkInterface one;
    one.name = name;
    one.up = true;
    one.loopback = name == "lo";
    one.is_virtual = is_virtual;
    one.addresses = {"10.0.0.1"};
    return one;
}

NetworkFacts ethernet() {
    NetworkFacts network;
    network.interfaces = {interface("eth0"), interface("lo", true)};
    return network;
}
NetworkFacts slingshot() {
    NetworkFacts network = ethernet();
    network.interfaces.push_back(interface("hsn0"));
    network.cxi_devices = {"cxi0"};
    return network;
}
NetworkFacts infiniband() {
    NetworkFacts network = ethernet();
    network.ports = {{"mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand", "mlx5_core"},
                     {"mlx5_1", 1, "DOWN", "", "InfiniBand", "mlx5_core"}};
    return network;
}
NetworkFacts efa() {
    NetworkFacts network = ethernet();
    network.ports = {{"rdmap0s6", 1, "ACTIVE", "", "Unspecified", "efa"}};
    return network;
}

std::vector<std::string> names_of(const std::vector<FabricSetting>& settings) {
    std::vector<std::string> names;
    for (const FabricSetting& one : settings) names.push_back(one.name);
    return names;
}
std::string value_of(const FabricProfile& profile, const std::string& name) {
    for (const FabricSetting& one : profile.settings) {
        if (one.name == name) return one.value;
    }
    return "unset";
}

TEST(Fabric, FollowsTheNodesDevices) {
    const auto found = [](const NetworkFacts& network) { return choose_fabric(std::nullopt, network); };
    EXPECT_EQ(found(ethernet()).fabric, Fabric::Ethernet);
    EXPECT_EQ(found(slingshot()).fabric, Fabric::Slingshot);
    EXPECT_EQ(found(infiniband()).fabric, Fabric::Infiniband);
    EXPECT_EQ(found(efa()).fabric, Fabric::Efa);
    EXPECT_EQ(found(slingshot()).why, "cxi0, hsn0");
    EXPECT_EQ(found(infiniband()).why, "mlx5_0") << "the other port is down";
    EXPECT_EQ(found(efa()).why, "rdmap0s6");
}

TEST(Fabric, IsSlingshotByTheInterfacesNameWhereTheDeviceIsHidden) {
    NetworkFacts in_a_container = ethernet();
    in_a_container.interfaces.push_back(interface("hsn0"));
    EXPECT_EQ(choose_fabric(std::nullopt, in_a_container).fabric, Fabric::Slingshot);
}

TEST(Fabric, PortsThatAreDownOrCarryEthernetAreNoInfiniband) {
    NetworkFacts network = infiniband();
    network.ports[0].state = "DOWN";
    EXPECT_EQ(choose_fabric(std::nullopt, network).fabric, Fabric::Ethernet);
    network.ports[0] = {"mlx5_0", 1, "ACTIVE", "", "Ethernet", "mlx5_core"};
    EXPECT_EQ(choose_fabric(std::nullopt, network).fabric, Fabric::Ethernet);
    EXPECT_THAT(choose_fabric(std::nullopt, network).settings, IsEmpty())
        << "whether it is used is NCCL's own choice";
}

TEST(Fabric, SlingshotGetsItsBlockWithAReasonForEach) {
    const FabricProfile profile = choose_fabric(std::nullopt, slingshot());
    EXPECT_EQ(value_of(profile, "NCCL_SOCKET_IFNAME"), "hsn");
    EXPECT_EQ(value_of(profile, "FI_CXI_OPTIMIZED_MRS"), "false");
    EXPECT_EQ(value_of(profile, "NCCL_NET_GDR_LEVEL"), "PHB");
    for (const FabricSetting& one : profile.settings) EXPECT_FALSE(one.reason.empty()) << one.name;
}

TEST(Fabric, NeverSetsVariablesThatAreTheSchedulersOrUnknownToNcclOrEndTheJob) {
    for (const Fabric one :
         {Fabric::Slingshot, Fabric::Infiniband, Fabric::Efa, Fabric::Ethernet, Fabric::None}) {
        for (const NetworkFacts& network : {ethernet(), slingshot(), infiniband(), efa()}) {
            const std::vector<std::string> names = names_of(choose_fabric(one, network).settings);
            for (const char* never :
                 {"NCCL_TIMEOUT", "CUDA_VISIBLE_DEVICES", "NCCL_NET", "NCCL_SHM_DISABLE"}) {
                EXPECT_THAT(names, Not(Contains(never))) << name_of(one);
            }
        }
    }
}

TEST(Fabric, KeepsTheUsersVariablesEvenIfEmpty) {
    const FabricProfile profile = choose_fabric(std::nullopt, slingshot());
    const EnvironmentLookup user = variables({{"NCCL_SOCKET_IFNAME", "hsn1"}, {"NCCL_CROSS_NIC", ""}});
    const std::vector<std::string> names = names_of(unset_settings(profile, user));
    EXPECT_THAT(names, AllOf(Contains("NCCL_IB_DISABLE"), Not(Contains("NCCL_SOCKET_IFNAME")),
                             Not(Contains("NCCL_CROSS_NIC"))));
    const std::string line = describe_fabric(profile, user);
    EXPECT_THAT(line, HasSubstr("slingshot (cxi0, hsn0): NCCL_IB_DISABLE=1 "));
    EXPECT_THAT(line, HasSubstr("; as you set them: NCCL_SOCKET_IFNAME NCCL_CROSS_NIC"));
    EXPECT_THAT(render_fabric(profile, user), AllOf(HasSubstr("\n  NCCL_SOCKET_IFNAME: as you set it\n"),
                                                    HasSubstr("\n  NCCL_IB_DISABLE=1  (")));
}

TEST(Fabric, OfTheUserOverridesTheDevices) {
    const FabricProfile named = choose_fabric(Fabric::Efa, slingshot());
    EXPECT_EQ(named.fabric, Fabric::Efa);
    EXPECT_EQ(named.why, "--fabric efa");
    EXPECT_THAT(choose_fabric(Fabric::None, slingshot()).settings, IsEmpty());
    EXPECT_EQ(value_of(choose_fabric(Fabric::Ethernet, infiniband()), "NCCL_IB_DISABLE"), "1")
        << "TCP was asked for";
    EXPECT_THAT(choose_fabric(Fabric::Ethernet, ethernet()).settings, IsEmpty());
}

TEST(Fabric, EthernetKeepsNcclFromBridgesThatLeadNowhere) {
    EXPECT_THAT(choose_fabric(std::nullopt, ethernet()).settings, IsEmpty()) << "NCCL finds eth0 itself";
    NetworkFacts network = ethernet();
    network.interfaces.push_back(interface("docker0", true));
    EXPECT_THAT(choose_fabric(std::nullopt, network).settings, IsEmpty()) << "NCCL leaves docker0 out itself";
    network.interfaces.push_back(interface("br-1f", true));
    EXPECT_EQ(value_of(choose_fabric(std::nullopt, network), "NCCL_SOCKET_IFNAME"), "=eth0");
    network.interfaces.erase(network.interfaces.begin());
    EXPECT_THAT(choose_fabric(std::nullopt, network).settings, IsEmpty())
        << "in a container all interfaces are virtual";
}

TEST(Fabric, NamesGloosInterfaceWhenTheHostsOwnNameIsALoopbackAddress) {
    EXPECT_EQ(value_of(choose_fabric(std::nullopt, ethernet()), "GLOO_SOCKET_IFNAME"), "unset")
        << "gloo finds it by the name";
    NetworkFacts network = ethernet();
    network.own_name_at = "127.0.1.1";
    EXPECT_EQ(value_of(choose_fabric(std::nullopt, network), "GLOO_SOCKET_IFNAME"), "eth0");
    EXPECT_THAT(choose_fabric(Fabric::None, network).settings, IsEmpty());
    network.interfaces.push_back(interface("hsn0"));
    EXPECT_EQ(value_of(choose_fabric(std::nullopt, network), "GLOO_SOCKET_IFNAME"), "hsn0");
}

TEST(Fabric, GlooUsesTheInterfaceThatReachesTheOtherNodesUnlessTheHostsNameDoes) {
    const std::vector<InterfaceAddress> own{{"lo", "127.0.0.1", true, true},
                                            {"eth0", "10.91.0.1", false, true},
                                            {"eth0", "fd00:91::1", false, true},
                                            {"ib0", "10.92.0.1", false, true}};
    const auto gloos = [&](const std::string& reached, const std::vector<std::string>& by_name,
                           FabricProfile profile = choose_fabric(std::nullopt, ethernet())) {
        reach_by(profile, own, reached, by_name);
        return value_of(profile, "GLOO_SOCKET_IFNAME");
    };
    EXPECT_EQ(gloos("10.91.0.1", {"172.31.9.9", "10.91.0.1"}), "unset") << "gloo finds it by the name";
    EXPECT_EQ(gloos("10.91.0.1", {"fd00:91::1"}), "unset") << "another address of the same interface";
    EXPECT_EQ(gloos("10.92.0.1", {"10.91.0.1", "10.92.0.1"}), "ib0") << "gloo takes the first";
    EXPECT_EQ(gloos("10.91.0.1", {"172.31.9.9"}), "eth0") << "an address of nobody";
    EXPECT_EQ(gloos("10.91.0.1", {}), "eth0") << "the name does not resolve, or not in time";
    EXPECT_EQ(gloos("127.0.0.1", {}), "unset") << "all nodes are on this host";
    EXPECT_EQ(gloos("10.93.0.1", {}), "unset") << "behind a translation of addresses";
    EXPECT_EQ(gloos("", {}), "unset");

    NetworkFacts network = ethernet();
    network.own_name_at = "127.0.1.1";
    EXPECT_EQ(gloos("10.92.0.1", {"127.0.1.1"}, choose_fabric(std::nullopt, network)), "ib0")
        << "known, in place of the first interface with a device";
    FabricProfile chosen = choose_fabric(std::nullopt, ethernet());
    use_interface(chosen, "eth1");
    EXPECT_EQ(gloos("10.92.0.1", {}, chosen), "eth1") << "--iface";
    EXPECT_EQ(gloos("10.92.0.1", {}, choose_fabric(Fabric::None, ethernet())), "unset");
}

TEST(Fabric, UsesTheInterfaceOfIfaceForGlooAndNccl) {
    FabricProfile profile = choose_fabric(std::nullopt, ethernet());
    use_interface(profile, "eth1");
    EXPECT_EQ(value_of(profile, "GLOO_SOCKET_IFNAME"), "eth1");
    EXPECT_EQ(value_of(profile, "NCCL_SOCKET_IFNAME"), "=eth1");
    profile = choose_fabric(std::nullopt, slingshot());
    use_interface(profile, "eth1");
    EXPECT_EQ(value_of(profile, "NCCL_SOCKET_IFNAME"), "hsn")
        << "ddprun's own connections may go over another network";
    FabricProfile none;
    use_interface(none, "eth1");
    EXPECT_THAT(none.settings, IsEmpty()) << "--fabric none";
}

TEST(LoopbackOfName, IsThatOfTheFirstLineWithTheName) {
    EXPECT_EQ(
        loopback_of_name("127.0.0.1 localhost\n127.0.1.1\tnode01.site node01  # Debian's\n10.0.0.1 node01\n",
                         "node01"),
        "127.0.1.1");
    EXPECT_EQ(loopback_of_name("10.0.0.1 node01\n127.0.1.1 node01\n", "node01"), "");
    EXPECT_EQ(loopback_of_name("127.0.0.1 localhost # node01\n\n#\n127.0.1.1\n", "node01"), "");
    EXPECT_EQ(loopback_of_name("::1 node01", "node01"), "::1");
}

TEST(Fabric, InfinibandBesideOtherActivePortsIsNamedToNccl) {
    EXPECT_THAT(choose_fabric(std::nullopt, infiniband()).settings, IsEmpty());
    NetworkFacts network = infiniband();
    network.ports.push_back({"mlx5_9", 1, "ACTIVE", "", "Ethernet", "mlx5_core"});
    EXPECT_EQ(value_of(choose_fabric(std::nullopt, network), "NCCL_IB_HCA"), "=mlx5_0");
}

TEST(Fabric, IsChosenForSeveralNodesOrWhenNamed) {
    JobSpec spec;
    EXPECT_FALSE(wants_fabric(spec));
    spec.fabric = Fabric::Infiniband;
    EXPECT_TRUE(wants_fabric(spec));
    spec.nodes = {1, 4};
    spec.fabric.reset();
    EXPECT_TRUE(wants_fabric(spec));
    spec.outer_rank = OuterRank{.local_rank = 1, .local_size = 4, .node_rank = 0, .nodes = 1};
    EXPECT_FALSE(wants_fabric(spec)) << "four ddpruns of mpiexec on one host";
    spec.outer_rank->nodes = 2;
    EXPECT_TRUE(wants_fabric(spec));
    spec.fabric = Fabric::None;
    EXPECT_FALSE(wants_fabric(spec));
}

TEST(Fabric, IsReportedInOneLineForAllNodesOrAsDiffering) {
    const auto line = [](const std::vector<NodeFabric>& nodes, const std::string& own) {
        return judge_fabrics(nodes, own).line;
    };
    EXPECT_EQ(line({{"a", "slingshot"}, {"b", "slingshot"}}, "slingshot (cxi0): X=1"),
              "fabric slingshot (cxi0): X=1");
    EXPECT_EQ(line({{"a", "ethernet"}, {"b", "ethernet"}}, "ethernet (eth0)"), "") << "as everywhere";
    EXPECT_EQ(line({{"a", "ethernet"}}, "ethernet (eth0): NCCL_SOCKET_IFNAME==eth0"),
              "fabric ethernet (eth0): NCCL_SOCKET_IFNAME==eth0");
    EXPECT_EQ(line({{"a", "none"}, {"b", "none"}}, "none (--fabric none)"), "");
    EXPECT_EQ(line({{"a", ""}, {"b", ""}}, "none"), "");
    const FabricVerdict differs = judge_fabrics({{"a", "ib"}, {"b", "ethernet"}, {"c", "ib"}}, "ib");
    EXPECT_TRUE(differs.differs);
    EXPECT_THAT(differs.line, HasSubstr("ethernet on b; ib on a, c; NCCL may find no way"));
    EXPECT_FALSE(judge_fabrics({{"a", "ib"}, {"b", ""}}, "ib").differs) << "an older ddprun does not say";
}

// ---- NCCL's network

TEST(Transport, IsFoundInNcclsLog) {
    EXPECT_EQ(network_in("node:1:2 [0] NCCL INFO Using network AWS Libfabric\r"), "AWS Libfabric");
    EXPECT_EQ(network_in("node:1:2 [0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.4.0"), std::nullopt);
    EXPECT_EQ(network_in("I am Using network Socket"), std::nullopt);
    EXPECT_EQ(network_in("NCCL INFO Using network "), std::nullopt);
}

TEST(Transport, IsJudgedByTheFabric) {
    const auto fits = [](Fabric fabric, const char* network) {
        return judge_transport(fabric, network).as_meant;
    };
    for (const char* plug_in : {"AWS Libfabric", "Libfabric", "OFI"}) {
        EXPECT_TRUE(fits(Fabric::Slingshot, plug_in)) << plug_in;
        EXPECT_TRUE(fits(Fabric::Efa, plug_in)) << plug_in;
    }
    for (const char* network : {"IB", "IBext_v8", "UCX"})
        EXPECT_TRUE(fits(Fabric::Infiniband, network)) << network;
    EXPECT_FALSE(fits(Fabric::Slingshot, "Socket"));
    EXPECT_FALSE(fits(Fabric::Slingshot, "IB"));
    EXPECT_FALSE(fits(Fabric::Infiniband, "Socket"));
    EXPECT_TRUE(fits(Fabric::Ethernet, "Socket"));
    EXPECT_THAT(judge_transport(Fabric::Efa, "Socket").line,
                AllOf(HasSubstr("network Socket, not the node's fabric (efa)"), HasSubstr("aws-ofi-nccl")));
}

TEST(Transport, IsAskedForUnlessItIsEthernetOrTheUserDirectsNcclsLog) {
    FabricProfile profile;
    EXPECT_FALSE(asks_for_network(profile, variables()));
    profile.fabric = Fabric::Ethernet;
    EXPECT_FALSE(asks_for_network(profile, variables())) << "any network will do";
    profile.fabric = Fabric::Slingshot;
    EXPECT_TRUE(asks_for_network(profile, variables()));
    for (const char* own : {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"})
        EXPECT_FALSE(asks_for_network(profile, variables({{own, "x"}}))) << own;
}

/// Writes to the file of NCCL_DEBUG_FILE, as a worker's NCCL does.
void write_to(const std::string& path, const std::string& text) {
    std::ofstream file(path);
    ASSERT_TRUE(file) << path;
    file << text << std::flush;
}

TEST(NcclWords, FindsTheNetworkOnceInPiecesAndAmongLongLines) {
    const auto loop = *os::EventLoop::create({});
    std::vector<std::string> found;
    const auto words = *NcclWords::open(*loop, [&](const std::string& network) { found.push_back(network); });
    const auto turn = [&] { ASSERT_TRUE(loop->run_once(MonotonicClock::now())); };
    write_to(words->path(), std::string(10'000, 'x') + "\nnode NCCL INFO Using net");
    turn();
    EXPECT_THAT(found, IsEmpty());
    write_to(words->path(), "work IB\nnode NCCL INFO Using network Socket\n");
    turn();
    EXPECT_THAT(found, ElementsAre("IB"));
}

TEST(NcclWords, AnEndedWriterDoesNotEndTheSearch) {
    const auto loop = *os::EventLoop::create({});
    const auto words = *NcclWords::open(*loop, nullptr);
    write_to(words->path(), "NCCL INFO Using network IB\n");
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    const std::uint64_t before = loop->wakeups();
    bool rang = false;
    loop->call_after(std::chrono::milliseconds(1), [&] { rang = true; });
    while (!rang) ASSERT_TRUE(loop->run_once(kNever));
    EXPECT_LE(loop->wakeups() - before, 3u) << "a loop that is woken by a pipe at its end spins";
}

TEST(FabricDevices, AreReadFromSys) {
    const test::TemporaryDirectory sys;
    const auto write = [&](const std::string& file, const std::string& text) {
        const std::filesystem::path path = sys.file("class/" + file);
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text << '\n';
    };
    write("infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
    write("infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
    write("infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
    write("infiniband/rdmap0s6/ports/1/state", "4: ACTIVE");
    write("cxi/cxi0/device/fru/part", "x");
    std::filesystem::create_directories(sys.file("class/infiniband/rdmap0s6/device"));
    std::filesystem::create_symlink("../../../bus/pci/drivers/efa",
                                    sys.file("class/infiniband/rdmap0s6/device/driver"));
    NetworkFacts facts;
    read_fabric_devices(sys.path(), facts);
    ASSERT_EQ(facts.ports.size(), 2u);
    EXPECT_EQ(facts.ports[0].layer, "InfiniBand");
    EXPECT_EQ(facts.ports[0].state, "ACTIVE");
    EXPECT_EQ(facts.ports[1].driver, "efa");
    EXPECT_THAT(facts.cxi_devices, ElementsAre("cxi0"));
    EXPECT_EQ(choose_fabric(std::nullopt, facts).fabric, Fabric::Slingshot);
}

}  // namespace
}  // namespace ddprun
