#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "env/nodes/allocation.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Texts = std::map<std::string, std::string, std::less<>>;

AllocationQuery asked(Texts variables, Texts files = {}) {
    AllocationQuery query;
    query.variable = [variables = std::move(variables)](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
    query.read_file = [files = std::move(files)](const std::string& path) -> Result<std::string> {
        const auto found = files.find(path);
        if (found != files.end()) return found->second;
        return Error::system("open " + path, ENOENT);
    };
    return query;
}

std::vector<std::string> names(const std::vector<AllocatedHost>& hosts) {
    std::vector<std::string> result;
    for (const AllocatedHost& host : hosts) result.push_back(host.name);
    return result;
}

std::string complaint(const AllocationQuery& query) {
    const auto found = find_allocation(query);
    return found ? "none" : found.error().what;
}

TEST(Allocation, IsEmptyWithoutAnySource) {
    const auto found = find_allocation(asked({}));
    ASSERT_TRUE(found);
    EXPECT_EQ(*found, std::nullopt);
}

// Captured on OpenPBS 23.06: select=1:mpiprocs=2+2:mpiprocs=1.
TEST(Allocation, APbsNodeFileHasALineForEachSlotAndHostsInTheOrderOfTheirFirst) {
    const auto found =
        find_allocation(asked({{"PBS_JOBID", "12.server"}, {"PBS_NODEFILE", "/aux/12"}, {"PBS_NODENUM", "0"}},
                              {{"/aux/12", "h2\nh2\nh1\nh3\n"}}));
    ASSERT_TRUE(found && *found);
    EXPECT_EQ((*found)->source, AllocationSource::Pbs);
    EXPECT_EQ((*found)->job_id, "12.server");
    EXPECT_EQ((*found)->from, "PBS_NODEFILE=/aux/12");
    EXPECT_EQ((*found)->own_index, 0);
    const std::vector<AllocatedHost> expected = {
        {"h2", 2, std::nullopt, 0}, {"h1", 1, std::nullopt, 2}, {"h3", 1, std::nullopt, 3}};
    EXPECT_EQ((*found)->hosts, expected);
}

TEST(Allocation, AnArrayJobKeepsItsBrackets) {
    const auto found =
        find_allocation(asked({{"PBS_JOBID", "5[0].server"}, {"PBS_NODEFILE", "/f"}}, {{"/f", "h1\n"}}));
    ASSERT_TRUE(found && *found);
    EXPECT_EQ((*found)->job_id, "5[0].server");
}

TEST(Allocation, AMissingNodeFileIsNamedWithItsVariable) {
    EXPECT_THAT(complaint(asked({{"PBS_JOBID", "12.server"}, {"PBS_NODEFILE", "/aux/12"}})),
                AllOf(HasSubstr("PBS_NODEFILE"), HasSubstr("/aux/12: No such file")));
    EXPECT_THAT(complaint(asked({{"PBS_JOBID", "12.server"}, {"PBS_NODEFILE", "/f"}}, {{"/f", "\n"}})),
                HasSubstr("PBS_NODEFILE=/f: no host is named"));
    EXPECT_THAT(complaint(asked({{"PBS_JOBID", "12.server"}, {"PBS_NODEFILE", "/f"}},
                                {{"/f", "h1\n-oProxyCommand=x\n"}})),
                HasSubstr("line 2: '-oProxyCommand=x' is not the name of a host"));
}

TEST(Allocation, TorqueGivesItsGpusAndItsNumberOfHosts) {
    const Texts variables = {{"PBS_JOBID", "7.t"},
                             {"PBS_VERSION", "TORQUE-6.1.3"},
                             {"PBS_NODEFILE", "/n"},
                             {"PBS_GPUFILE", "/g"},
                             {"PBS_NUM_NODES", "2"}};
    const auto found =
        find_allocation(asked(variables, {{"/n", "a\na\nb\nb\n"}, {"/g", "a-gpu1\na-gpu0\nb-gpu0\n"}}));
    ASSERT_TRUE(found && *found) << found.error().what;
    EXPECT_EQ((*found)->source, AllocationSource::Torque);
    EXPECT_EQ((*found)->hosts[0].gpus, 2);
    EXPECT_EQ((*found)->hosts[1].gpus, 1);
    EXPECT_THAT(complaint(asked(variables, {{"/n", "a\n"}, {"/g", ""}})),
                AllOf(HasSubstr("PBS_NODEFILE=/n has 1 hosts (a)"), HasSubstr("PBS_NUM_NODES=2")));
}

TEST(Allocation, SlurmsListIsExpandedAndItsNodeNameGivesOurIndex) {
    const auto found = find_allocation(asked({{"SLURM_JOB_ID", "88"},
                                              {"SLURM_JOB_NODELIST", "n[01-03,07],gpu1"},
                                              {"SLURM_JOB_NUM_NODES", "5"},
                                              {"SLURMD_NODENAME", "n02"}}));
    ASSERT_TRUE(found && *found);
    EXPECT_EQ(names((*found)->hosts), (std::vector<std::string>{"n01", "n02", "n03", "n07", "gpu1"}));
    EXPECT_EQ((*found)->own_index, 1);
    EXPECT_EQ((*found)->hosts[0].slots, std::nullopt);
}

TEST(Allocation, SlurmsTasksAreSlotsWhenTheUserAskedForTasks) {
    const auto slots = [](std::map<std::string, std::string, std::less<>> more) {
        std::map<std::string, std::string, std::less<>> variables{
            {"SLURM_JOB_ID", "88"}, {"SLURM_JOB_NODELIST", "n[1-3]"}, {"SLURM_TASKS_PER_NODE", "2(x2),1"}};
        variables.merge(more);
        std::vector<int> told;
        const auto found = find_allocation(asked(variables));
        for (const AllocatedHost& host : (*found)->hosts) told.push_back(host.slots.value_or(0));
        return told;
    };
    EXPECT_EQ(slots({{"SLURM_NTASKS", "5"}}), (std::vector{2, 2, 1}));
    EXPECT_EQ(slots({{"SLURM_NTASKS_PER_NODE", "2"}}), (std::vector{2, 2, 1}));
    EXPECT_EQ(slots({}), (std::vector{0, 0, 0})) << "Slurm's own count of CPUs";
}

TEST(Allocation, OtherComponentsOfAHeterogeneousSlurmJobAreCounted) {
    const auto found = find_allocation(
        asked({{"SLURM_JOB_ID", "88"}, {"SLURM_JOB_NODELIST", "n1"}, {"SLURM_HET_SIZE", "3"}}));
    ASSERT_TRUE(found && *found);
    EXPECT_EQ((*found)->other_components, 2);
}

// Captured in `salloc -N2 : -N1` of Slurm 22.05: SLURM_JOB_NODELIST itself is not set there.
TEST(Allocation, TheFirstComponentsHostsAreThoseOfAHeterogeneousJobOfSalloc) {
    const auto found = find_allocation(asked({{"SLURM_JOB_ID", "1"},
                                              {"SLURM_HET_SIZE", "2"},
                                              {"SLURM_JOB_NODELIST_HET_GROUP_0", "node[00-01]"},
                                              {"SLURM_JOB_NODELIST_HET_GROUP_1", "node02"},
                                              {"SLURM_JOB_NUM_NODES_HET_GROUP_0", "2"},
                                              {"SLURM_TASKS_PER_NODE_HET_GROUP_0", "1(x2)"}}));
    ASSERT_TRUE(found && *found);
    EXPECT_EQ(names((*found)->hosts), (std::vector<std::string>{"node00", "node01"}));
    EXPECT_EQ((*found)->from, "SLURM_JOB_NODELIST_HET_GROUP_0=node[00-01]");
    EXPECT_EQ((*found)->other_components, 1);
}

TEST(Allocation, AListThatContradictsItsOwnCountIsRefusedAndBothAreShown) {
    EXPECT_THAT(
        complaint(
            asked({{"SLURM_JOB_ID", "88"}, {"SLURM_JOB_NODELIST", "n[1-3]"}, {"SLURM_JOB_NUM_NODES", "2"}})),
        AllOf(HasSubstr("n[1-3] has 3 hosts (n1,n2,n3)"), HasSubstr("SLURM_JOB_NUM_NODES=2")));
}

TEST(Allocation, LsfGivesHostsWithTheirSlots) {
    const auto list = find_allocation(asked({{"LSB_JOBID", "3"}, {"LSB_MCPU_HOSTS", "h1 4 h2 8"}}));
    ASSERT_TRUE(list && *list);
    EXPECT_EQ((*list)->hosts[1], (AllocatedHost{"h2", 8, std::nullopt, 0}));
    const auto file = find_allocation(
        asked({{"LSB_JOBID", "3"}, {"LSB_DJOB_HOSTFILE", "/f"}, {"LSB_MCPU_HOSTS", "h1 4 h2 8"}},
              {{"/f", "h1\nh2\nh2\n"}}));
    ASSERT_TRUE(file && *file);
    EXPECT_EQ((*file)->hosts[1].slots, 2);
    EXPECT_THAT(complaint(asked({{"LSB_JOBID", "3"}, {"LSB_MCPU_HOSTS", "h1 4 h2"}})),
                HasSubstr("LSB_MCPU_HOSTS"));
}

TEST(Allocation, TwoSchedulersThatDisagreeAreBothShown) {
    Texts variables = {
        {"SLURM_JOB_ID", "88"}, {"SLURM_JOB_NODELIST", "a,b"}, {"PBS_JOBID", "12.s"}, {"PBS_NODEFILE", "/f"}};
    EXPECT_THAT(complaint(asked(variables, {{"/f", "c\n"}})),
                AllOf(HasSubstr("Slurm"), HasSubstr("a,b"), HasSubstr("PBS"), HasSubstr("/f: c")));
    // Slurm's own qsub wrapper sets both, and they agree.
    EXPECT_EQ(complaint(asked(variables, {{"/f", "a.site.org\nb.site.org\n"}})), "none");
}

TEST(Allocation, TheUsersHostsMustBeTheSchedulers) {
    AllocationQuery query = asked({{"PBS_JOBID", "12.s"}, {"PBS_NODEFILE", "/f"}}, {{"/f", "a\na\nb\nc\n"}});
    query.hosts = "c,a:1";
    const auto found = find_allocation(query);
    ASSERT_TRUE(found && *found);
    EXPECT_EQ((*found)->source, AllocationSource::Pbs) << "its own tools can start there";
    EXPECT_EQ((*found)->hosts[0], (AllocatedHost{"c", 1, std::nullopt, 3}));
    EXPECT_EQ((*found)->hosts[1], (AllocatedHost{"a", 1, std::nullopt, 0}));
    query.hosts = "a,d";
    EXPECT_THAT(complaint(query),
                AllOf(HasSubstr("--hosts: d is not a host of this job"), HasSubstr("a,b,c")));
    query.hostfile = "/h";
    EXPECT_THAT(complaint(query), AllOf(HasSubstr("--hosts=a,d"), HasSubstr("--hostfile=/h")));
}

TEST(Hostfile, TakesTheSpellingsOfMpiLaunchersAndOfParallelSsh) {
    const auto hosts = parse_hostfile(
        "# the first rack\nn1 slots=4 max_slots=8\nn2:2   ; hydra's\n\n  me@n3\nr[08-10]\nn1 slots=1\na b\n[fe80]\n");
    EXPECT_FALSE(hosts) << "brackets alone are no name";
    const auto good = parse_hostfile(
        "# the first rack\nn1 slots=4 max_slots=8\nn2:2   ; hydra's\n\n  me@n3\nr[08-10]\nn1 slots=1\na b\n2001:db8::1\n");
    ASSERT_TRUE(good) << good.error().what;
    EXPECT_EQ(names(*good),
              (std::vector<std::string>{"n1", "n2", "me@n3", "r08", "r09", "r10", "a", "b", "2001:db8::1"}));
    EXPECT_EQ((*good)[0].slots, 5);
    EXPECT_EQ((*good)[1].slots, 2);
    EXPECT_EQ((*good)[2].slots, std::nullopt);
    EXPECT_EQ((*parse_hostfile("n1\nn2\nn1\n"))[0].slots, 2) << "as MPI launchers count it";
    const auto others = parse_hostfile("\xef\xbb\xbfn1 cpu=3\r\nn2 count=2\r\n");
    ASSERT_TRUE(others) << others.error().what;
    EXPECT_EQ((*others)[0], (AllocatedHost{"n1", 3, std::nullopt, 0}));
    EXPECT_EQ((*others)[1].slots, 2);
}

TEST(Hostfile, NamesAMalformedLine) {
    for (const auto& [text, told] : std::vector<std::pair<std::string, std::string>>{
             {"n1\nn2 slots=many\n", "line 2: slots: 'many'"},
             {"n1:0\n", "line 1: 'n1:0'"},
             {"n1\nn2 slots = 2\n", "line 2: 'slots' is not a host"},
             {"n1 slots =2\n", "line 1: 'slots' is not a host"},
             {"n1 slots= 2\n", "line 1: slots: ''"},
             {"n1 4 all.q@n1 UNDEFINED\n", "line 1: '4' is not a host"},
             {"n1\nslots=4\n", "line 2: "},
             {"n[3-1]\n", "line 1: 'n[3-1]'"},
             {"-x\n", "line 1: '-x' is not the name"}}) {
        const auto hosts = parse_hostfile(text);
        ASSERT_FALSE(hosts) << text;
        EXPECT_THAT(hosts.error().what, HasSubstr(told));
    }
}

TEST(HostList, TakesNamesRangesAndSlots) {
    const auto hosts = parse_hosts("a,b:4,c[1,3],10.0.0.5");
    ASSERT_TRUE(hosts) << hosts.error().what;
    EXPECT_EQ(names(*hosts), (std::vector<std::string>{"a", "b", "c1", "c3", "10.0.0.5"}));
    EXPECT_EQ((*hosts)[1].slots, 4);
    EXPECT_FALSE(parse_hosts("a,,b"));
    EXPECT_FALSE(parse_hosts("a b"));
}

TEST(IsSameHost, MatchesAShortNameWithALongOne) {
    EXPECT_TRUE(is_same_host("node01", "node01"));
    EXPECT_TRUE(is_same_host("node01", "node01.hsn.site.org"));
    EXPECT_FALSE(is_same_host("node01.a", "node01.b"));
    EXPECT_FALSE(is_same_host("node1", "node10.site"));
}

}  // namespace
}  // namespace ddprun
