// The layout of workers on clusters' machines, with their topologies by lscpu and nvidia-smi and the grants
// of their batch systems.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/core.h>

#include <filesystem>
#include <fstream>

#include "env/text.h"
#include "launcher/machine/grant.h"
#include "launcher/machine/machine.h"
#include "launcher/plan/binding.h"
#include "launcher/plan/plan.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

EnvironmentLookup lookup(std::map<std::string, std::string> set) {
    return [set](std::string_view name) -> std::optional<std::string> {
        const auto found = set.find(std::string(name));
        return found == set.end() ? std::nullopt : std::optional(found->second);
    };
}

/// One AMD socket: cores are numbered through the NUMA nodes, second threads after all of them.
Machine one_socket(int cores, int nodes, const std::vector<int>& gpu_nodes) {
    Machine machine;
    for (int cpu = 0; cpu < 2 * cores; ++cpu)
        machine.cpu_places.push_back(
            {cpu, cpu % cores / (cores / nodes), 0, cpu % cores, cpu % cores / 8 * 8});
    machine.cpus = machine.host_cpus = 2 * cores;
    for (int from = 0; from < nodes; ++from) {
        for (int to = 0; to < nodes; ++to)
            machine.numa_distances[from][to] = from == to ? 10 : from / 2 == to / 2 ? 11 : 12;
    }
    for (const int node : gpu_nodes) machine.gpu_places.push_back({std::to_string(machine.gpus++), "", node});
    return machine;
}
Machine polaris() { return one_socket(32, 4, {3, 2, 1, 0}); }
Machine derecho() { return one_socket(64, 4, {3, 2, 1, 0}); }
Machine derecho_with_eight_nodes() { return one_socket(64, 8, {7, 5, 3, 1}); }

/// Two sockets whose CPUs are numbered in turn, and the CPUs that a Slurm step may use.
Machine two_sockets(const std::vector<int>& usable) {
    Machine machine;
    for (const int cpu : usable) machine.cpu_places.push_back({cpu, cpu % 2, cpu % 2, cpu, cpu % 2});
    machine.cpus = static_cast<int>(usable.size());
    machine.host_cpus = 48;
    machine.numa_distances = {{0, {{0, 10}, {1, 21}}}, {1, {{0, 21}, {1, 10}}}};
    machine.grant = grant_of(
        lookup({{"SLURM_JOB_ID", "7"}, {"SLURM_CPUS_ON_NODE", std::to_string(usable.size())}}), "", "n1");
    return machine;
}

Bindings bound(const Machine& machine, int workers) {
    Result<Bindings> bindings = bind_workers(NumaBinding::Auto, machine, workers);
    EXPECT_TRUE(bindings);
    return bindings ? *bindings : Bindings{};
}
std::string cpus(const Machine& machine, int workers, std::size_t which) {
    return format_ranges(bound(machine, workers).workers[which].cpus);
}

// ---- topologies

TEST(Layout, PlacesEachWorkerAtItsGpuOnPolarisWhereGpusCountBackwards) {
    EXPECT_EQ(cpus(polaris(), 4, 0), "24-31, 56-63");
    EXPECT_EQ(cpus(polaris(), 4, 3), "0-7, 32-39");
    EXPECT_THAT(bound(polaris(), 4).workers[0].memory_nodes, ElementsAre(3));
    EXPECT_EQ(bound(polaris(), 4).workers[0].cores, 8);
}

TEST(Layout, GivesEachOfFourWorkersAQuarterOnDerechoAlsoWithEightNumaNodes) {
    EXPECT_EQ(cpus(derecho(), 4, 0), "48-63, 112-127");
    EXPECT_EQ(cpus(derecho_with_eight_nodes(), 4, 0), "48-63, 112-127")
        << "its GPU's node, and the near one that has no GPU";
    EXPECT_EQ(cpus(derecho_with_eight_nodes(), 4, 3), "0-15, 64-79");
    EXPECT_THAT(bound(derecho_with_eight_nodes(), 4).workers[0].memory_nodes, ElementsAre(6, 7));
    EXPECT_EQ(bound(derecho_with_eight_nodes(), 4).workers[2].cores, 16);
}

TEST(Layout, NodesThatAreEquallyNearToAllGpusAreSharedOutEvenly) {
    Machine machine = one_socket(64, 8, {0, 1, 2, 3});
    for (auto& [from, row] : machine.numa_distances) {
        for (auto& [to, distance] : row) distance = from == to ? 10 : 12;
    }
    for (std::size_t worker = 0; worker < 4; ++worker)
        EXPECT_EQ(bound(machine, 4).workers[worker].cores, 16) << worker;
    EXPECT_EQ(cpus(machine, 4, 1), "8-15, 40-47, 72-79, 104-111");
}

TEST(Layout, AddsNoNodeOfAnotherSocketToAGpus) {
    Machine machine = two_sockets({0, 1, 2, 3});
    machine.gpu_places = {{"0", "", 1}, {"1", "", 1}};
    machine.gpus = 2;
    EXPECT_EQ(cpus(machine, 2, 0), "1, 3");
    EXPECT_EQ(cpus(machine, 2, 1), "1, 3");
}

TEST(Layout, KeepsAWorkerAtItsGpusNodeWhenDistancesAreUnknown) {
    Machine machine = derecho_with_eight_nodes();
    machine.numa_distances.clear();
    EXPECT_EQ(cpus(machine, 4, 0), "56-63, 120-127");
}

TEST(Layout, OneWorkerStaysAtItsGpusNode) {
    Machine machine = derecho();
    machine.gpu_places.resize(1);
    machine.gpus = 1;
    EXPECT_EQ(cpus(machine, 1, 0), "48-63, 112-127");
}

TEST(Layout, GivesFewerWorkersThanNodesABlockOfNodesEachWithoutGpus) {
    Machine machine = derecho_with_eight_nodes();
    machine.gpu_places.clear();
    machine.gpus = 0;
    EXPECT_EQ(cpus(machine, 4, 1), "16-31, 80-95");
    EXPECT_EQ(cpus(machine, 2, 1), "32-63, 96-127");
    EXPECT_EQ(bound(machine, 3).why, "none: 3 workers do not divide over 8 NUMA nodes");
}

TEST(Layout, ASlurmStepsTenOddCoresAreSharedNotExceeded) {
    const Machine odd = two_sockets({1, 3, 5, 7, 9, 11, 13, 15, 17, 19});
    EXPECT_EQ(bound(odd, 2).why, "none: one NUMA node");
    EXPECT_EQ(bound(odd, 2).workers[1].cores, 5);
    const Machine both = two_sockets({0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    EXPECT_EQ(cpus(both, 2, 0), "0, 2, 4, 6, 8");
    EXPECT_EQ(cpus(both, 2, 1), "1, 3, 5, 7, 9");
}

TEST(Layout, UsesNoMemoryNodeThatIsNotOurs) {
    Machine machine = two_sockets({0, 1, 2, 3});
    ASSERT_THAT(bound(machine, 2).workers[1].memory_nodes, ElementsAre(1));
    machine.memory_nodes = std::set<int>{0};
    EXPECT_THAT(bound(machine, 2).workers[0].memory_nodes, ElementsAre(0));
    EXPECT_THAT(bound(machine, 2).workers[1].memory_nodes, IsEmpty());
    EXPECT_EQ(bound(machine, 2).workers[1].cpus.size(), 2u) << "its CPUs are used all the same";
}

TEST(MemoryNodes, AreThoseWithMemoryThatTheProcessMayUse) {
    const test::TemporaryDirectory sys;
    std::filesystem::create_directories(sys.file("devices/system/node"));
    EXPECT_EQ(read_memory_nodes(sys.path(), "Name:\tddprun\n"), std::nullopt);
    EXPECT_EQ(read_memory_nodes(sys.path(), "Name:\tddprun\nMems_allowed_list:\t0,2\n"),
              (std::set<int>{0, 2}));
    std::ofstream(sys.file("devices/system/node/has_memory")) << "0-1\n";
    EXPECT_EQ(read_memory_nodes(sys.path(), "Name:\tddprun\nMems_allowed_list:\t0,2\nvoluntary:\t1\n"),
              (std::set<int>{0}));
    EXPECT_EQ(read_memory_nodes(sys.path(), ""), (std::set<int>{0, 1}));
}

TEST(NumaDistances, AreReadFromSys) {
    const test::TemporaryDirectory sys;
    const auto write = [&](const std::string& file, const std::string& text) {
        const std::filesystem::path path = sys.file("devices/system/node/" + file);
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text << '\n';
    };
    write("online", "0,2");
    write("node0/distance", "10 21");
    write("node2/distance", "21 10");
    EXPECT_EQ(read_numa_distances(sys.path()),
              (std::map<int, std::map<int, int>>{{0, {{0, 10}, {2, 21}}}, {2, {{0, 21}, {2, 10}}}}));
    write("online", "0");
    EXPECT_THAT(read_numa_distances(sys.path()), IsEmpty());
}

// ---- the batch system's grant

TEST(Grant, HasTheChunksCpusAndThePresetThreadsOfPbs) {
    const std::map<std::string, std::string> job = {
        {"PBS_JOBID", "12.pbs"}, {"NCPUS", "64"}, {"OMP_NUM_THREADS", "64"}};
    const Grant grant = grant_of(lookup(job), "dec01.hsn.example\ndec01\ndec02\n\n", "dec01");
    EXPECT_EQ(grant, (Grant{"PBS", 64, 2, 64}));
    std::map<std::string, std::string> own = job;
    own["OMP_NUM_THREADS"] = "8";
    EXPECT_EQ(grant_of(lookup(own), "", "dec01"), (Grant{"PBS", 64, 1, std::nullopt}))
        << "the script's own export";
    own.erase("PBS_JOBID");
    EXPECT_EQ(grant_of(lookup(own), "", "dec01"), Grant{});
}

TEST(Grant, HasTheVariablesOfOtherSchedulers) {
    EXPECT_EQ(grant_of(lookup({{"SLURM_JOB_ID", "7"}, {"SLURM_CPUS_ON_NODE", "10"}}), "", "n1"),
              (Grant{"Slurm", 10, 1, std::nullopt}));
    EXPECT_EQ(grant_of(lookup({{"SLURM_JOB_ID", "7"}, {"SLURM_CPUS_ON_NODE", "many"}}), "", "n1"),
              (Grant{"Slurm", std::nullopt, 1, std::nullopt}));
    EXPECT_EQ(grant_of(lookup({{"LSB_JOBID", "7"}}), "", "n1").by, "LSF");
    EXPECT_EQ(grant_of(lookup({{"PBS_JOBID", "1"}, {"PBS_VERSION", "TORQUE-6.1"}, {"PBS_NUM_PPN", "4"}}),
                       "a\na\na\na\n", "a"),
              (Grant{"Torque", 4, 1, std::nullopt}));
}

TEST(Grant, OfAPartOfAHostBindsNoWorkerUnlessWeAreConfinedToIt) {
    Machine machine = derecho();
    machine.grant = {"PBS", 16, 1, std::nullopt};
    EXPECT_EQ(bound(machine, 4).why, "none: PBS gave 16 of 64 cores, and which ones is not known");
    EXPECT_EQ(bound(machine, 4).workers[0].cores, 4) << "a share of what was given";
    machine.grant.cpus = 64;
    EXPECT_EQ(cpus(machine, 4, 0), "48-63, 112-127") << "all cores of the host, though half its CPUs";
    machine.grant = {"PBS", 16, 4, 16};
    EXPECT_EQ(cpus(machine, 4, 0), "48-63, 112-127")
        << "four chunks, or mpiprocs=4:ompthreads=16: the whole host";
}

TEST(Grant, OfACpusetBindsWorkersWithinIt) {
    Machine machine = derecho();
    std::erase_if(machine.cpu_places, [](const Cpu& cpu) { return cpu.core % 16 >= 4; });
    machine.cpus = static_cast<int>(machine.cpu_places.size());
    machine.grant = {"PBS", 16, 1, std::nullopt};
    EXPECT_EQ(cpus(machine, 4, 0), "48-51, 112-115");
    EXPECT_EQ(bound(machine, 4).workers[0].cores, 4);
}

// ---- threads

std::optional<int> threads(const Machine& machine, int workers,
                           const std::map<std::string, std::string>& environment) {
    ResolvedProgram program;
    program.arguments = {"p"};
    rdzv::StartGeneration order;
    order.local_world_size = order.world_size = workers;
    const auto plan = plan_workers({}, program, machine, order, lookup(environment));
    EXPECT_TRUE(plan);
    return plan ? plan->front().env.omp_num_threads : std::nullopt;
}

TEST(Threads, PresetByPbsToTheChunksCpusAreReplaced) {
    const std::map<std::string, std::string> job = {
        {"PBS_JOBID", "12.pbs"}, {"NCPUS", "64"}, {"OMP_NUM_THREADS", "64"}};
    Machine machine = derecho();
    machine.grant = grant_of(lookup(job), "dec01\n", "dec01");
    EXPECT_EQ(threads(machine, 4, job), 16);
    EXPECT_EQ(threads(machine, 1, job), std::nullopt) << "a lone worker may use all";
}

TEST(Threads, AreSharesOfTheGrantNotOfTheHost) {
    const std::map<std::string, std::string> job = {
        {"PBS_JOBID", "12.pbs"}, {"NCPUS", "8"}, {"OMP_NUM_THREADS", "8"}};
    Machine machine = derecho();
    machine.grant = grant_of(lookup(job), "dec01\n", "dec01");
    EXPECT_EQ(threads(machine, 2, job), 4);
    EXPECT_EQ(threads(machine, 16, job), 1) << "never none";
}

TEST(Threads, OfOmpthreadsOrTheScriptAreKept) {
    std::map<std::string, std::string> job = {
        {"PBS_JOBID", "12.pbs"}, {"NCPUS", "8"}, {"OMP_NUM_THREADS", "8"}};
    Machine machine = derecho();
    machine.grant = grant_of(lookup(job), "d\nd\nd\nd\n", "d");
    EXPECT_EQ(threads(machine, 4, job), std::nullopt) << "select=1:ncpus=64:mpiprocs=4:ompthreads=8";
    job = {{"PBS_JOBID", "12.pbs"}, {"NCPUS", "64"}, {"OMP_NUM_THREADS", "4"}};
    machine.grant = grant_of(lookup(job), "d\n", "d");
    EXPECT_EQ(threads(machine, 4, job), std::nullopt) << "export OMP_NUM_THREADS=4";
    machine.grant = {};
    EXPECT_EQ(threads(machine, 4, {{"OMP_NUM_THREADS", "64"}}), std::nullopt)
        << "outside PBS it is always the user's";
}

// ---- the table

TEST(Seats, AreShownForBoundWorkersOfSeveralNodesOrAnAllocation) {
    JobSpec spec;
    EXPECT_THAT(seats_of(spec, polaris(), 4), IsEmpty()) << "one's own machine";
    spec.nodes = {2, 2};
    EXPECT_THAT(seats_of(spec, polaris(), 4),
                ElementsAre("CPUs 24-31, 56-63, NUMA 3, GPU 0", "CPUs 16-23, 48-55, NUMA 2, GPU 1",
                            "CPUs 8-15, 40-47, NUMA 1, GPU 2", "CPUs 0-7, 32-39, NUMA 0, GPU 3"));
    EXPECT_THAT(seats_of(spec, polaris(), 3), IsEmpty()) << "nobody is bound";
    spec.nodes = {1, 1};
    Machine in_a_job = polaris();
    in_a_job.grant.by = "PBS";
    EXPECT_EQ(seats_of(spec, in_a_job, 4).size(), 4u);
}

TEST(Seats, OfNodesThatAreAlikeShareOneTable) {
    std::vector<NodeSeats> nodes;
    for (int i = 0; i < 3; ++i) nodes.push_back({fmt::format("n{}", i), 2 * i, {"CPUs 0-3", "CPUs 4-7"}});
    nodes.push_back({"fat", 6, {"CPUs 0-63"}});
    EXPECT_THAT(render_seating(nodes),
                ElementsAre("seats on n0, n1, n2:", "  rank 0, 2, 4: CPUs 0-3", "  rank 1, 3, 5: CPUs 4-7",
                            "seats on fat:", "  rank 6: CPUs 0-63"));
    for (int i = 3; i < 300; ++i)
        nodes.push_back({fmt::format("n{}", i), 2 * i + 1, {"CPUs 0-3", "CPUs 4-7"}});
    EXPECT_EQ(render_seating(nodes)[0], "seats on n0, n1, ... n299 (300 in all):");
    EXPECT_EQ(render_seating(nodes)[1], "  rank 0, 2, ... 599 (300 in all): CPUs 0-3");
    EXPECT_THAT(render_seating({{"a", 0, {}}, {"b", 1, {}}}), IsEmpty());
}

}  // namespace
}  // namespace ddprun
