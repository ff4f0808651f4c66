#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "env/text.h"
#include "launcher/machine/machine.h"
#include "launcher/plan/binding.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

EnvironmentLookup environment(std::map<std::string, std::string> variables = {}) {
    return [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

/// Cores with two threads each: CPU c and c + cores, as the kernel numbers them; two cores share a cache.
Machine machine_of(int nodes, int cores_per_node) {
    Machine machine;
    const int cores = nodes * cores_per_node;
    for (int cpu = 0; cpu < 2 * cores; ++cpu) {
        const int core = cpu % cores;
        machine.cpu_places.push_back(
            {cpu, core / cores_per_node, core / cores_per_node / 2, core, core / 2 * 2});
    }
    machine.cpus = 2 * cores;
    return machine;
}

void add_gpus(Machine& machine, const std::vector<int>& nodes) {
    for (const int node : nodes) machine.gpu_places.push_back({std::to_string(machine.gpus++), "", node});
}

std::vector<int> cpus_of(NumaBinding policy, const Machine& machine, int workers, std::size_t which) {
    const Result<Bindings> bindings = bind_workers(policy, machine, workers);
    EXPECT_TRUE(bindings);
    return bindings ? bindings->workers[which].cpus : std::vector<int>{};
}

// ---- GPUs and CPUs of the machine

const std::vector<Gpu> kFourGpus = {
    {"0", "GPU-aaaa1111", 0}, {"1", "GPU-aabb2222", 0}, {"2", "GPU-cccc3333", 1}, {"3", "GPU-dddd4444", 1}};

std::vector<std::string> visible(const std::optional<std::string>& value) {
    std::vector<std::string> ids;
    for (const Gpu& gpu : visible_gpus(kFourGpus, value)) ids.push_back(gpu.id);
    return ids;
}

TEST(VisibleGpus, FollowCudasRules) {
    EXPECT_THAT(visible(std::nullopt), ElementsAre("0", "1", "2", "3"));
    EXPECT_THAT(visible(""), IsEmpty());
    EXPECT_THAT(visible("2,0"), ElementsAre("2", "0"));
    EXPECT_THAT(visible("1,7,2"), ElementsAre("1")) << "the list ends at the first entry that is no GPU";
    EXPECT_THAT(visible("-1"), IsEmpty());
    EXPECT_THAT(visible("NoDevFiles"), IsEmpty());
    EXPECT_THAT(visible("1,1"), ElementsAre("1"));
}

TEST(VisibleGpus, TakeUuidsAndTheirBeginningsAndMigIds) {
    EXPECT_THAT(visible("GPU-cccc3333,0"), ElementsAre("GPU-cccc3333", "0"));
    EXPECT_THAT(visible("GPU-c"), ElementsAre("GPU-c"));
    EXPECT_THAT(visible("GPU-aa"), IsEmpty()) << "the beginning of two";
    EXPECT_THAT(visible("GPU-ffff"), IsEmpty());
    EXPECT_THAT(visible("MIG-1234,MIG-5678"), ElementsAre("MIG-1234", "MIG-5678"));
    EXPECT_EQ(visible_gpus(kFourGpus, "GPU-cccc3333").front().numa_node, 1);
    EXPECT_THAT(visible_gpus({}, "0,1"), IsEmpty()) << "no driver, no GPU";
}

TEST(WorkerCountOfNode, IsResolvedFromTheMachine) {
    Machine machine = machine_of(1, 4);
    const auto count = [&](WorkerCount::Kind kind, int number = 0) {
        return resolve_worker_count({kind, number}, machine);
    };
    using Kind = WorkerCount::Kind;
    EXPECT_EQ(*count(Kind::Number, 7), 7);
    EXPECT_EQ(*count(Kind::Cpu), 8);
    EXPECT_EQ(*count(Kind::Auto), 8);
    machine.quota = 2.5;
    EXPECT_EQ(*count(Kind::Cpu), 2);
    EXPECT_EQ(*count(Kind::Auto), 2);
    machine.quota = 0.5;
    EXPECT_EQ(*count(Kind::Cpu), 1);
    machine.quota.reset();
    machine.grant = {"Slurm", 3, 1, std::nullopt};
    EXPECT_EQ(*count(Kind::Auto), 3) << "the job's part of the host";
    machine.host_cpus = 64;
    EXPECT_EQ(*count(Kind::Auto), 8) << "a cpuset confines the job already";
    machine.grant = {};
    const Result<int> none = count(Kind::Gpu);
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().what,
              "--nproc-per-node: gpu: this machine has no NVIDIA GPU (use cpu or a count)");
    machine.hidden_gpus = 4;
    EXPECT_EQ(count(Kind::Gpu).error().what,
              "--nproc-per-node: gpu: CUDA_VISIBLE_DEVICES shows none of this machine's 4 NVIDIA GPUs (unset "
              "it, or use cpu or a count)");
    add_gpus(machine, {0, 0});
    EXPECT_EQ(*count(Kind::Gpu), 2);
    EXPECT_EQ(*count(Kind::Auto), 2);
    EXPECT_EQ(*count(Kind::Cpu), 8);
}

TEST(CpuList, IsReadAsTheKernelWritesIt) {
    EXPECT_THAT(parse_cpu_list("0-3,8\n"), ElementsAre(0, 1, 2, 3, 8));
    EXPECT_THAT(parse_cpu_list(""), IsEmpty());
    EXPECT_THAT(parse_cpu_list("5"), ElementsAre(5));
}

TEST(CpuPlaces, AreReadFromSys) {
    const test::TemporaryDirectory sys;
    const auto write = [&](const std::string& file, const std::string& text) {
        const std::filesystem::path path = sys.file("devices/system/" + file);
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text << '\n';
    };
    write("node/online", "0-1");
    write("node/node0/cpulist", "0-1");
    write("node/node1/cpulist", "2-3");
    write("cpu/cpu3/topology/physical_package_id", "1");
    write("cpu/cpu3/topology/thread_siblings_list", "1,3");
    write("cpu/cpu3/cache/index3/shared_cpu_list", "2-3");
    EXPECT_THAT(read_cpu_places(sys.path(), {0, 3}, true),
                ElementsAre(Cpu{0, 0, 0, 0, 0}, Cpu{3, 1, 1, 1, 2}));
    EXPECT_THAT(read_cpu_places(sys.path(), {3}, false), ElementsAre(Cpu{3, 1, 0, 3, 0}));
}

TEST(DetectMachine, FindsAtLeastTheCpuOfThisThread) {
    const Machine machine = detect_machine(environment({{"CUDA_VISIBLE_DEVICES", ""}}));
    EXPECT_GE(machine.cpus, 1);
    EXPECT_EQ(machine.cpu_places.size(), static_cast<std::size_t>(machine.cpus));
    EXPECT_EQ(machine.gpus, 0) << "CUDA_VISIBLE_DEVICES hides all";
}

TEST(Probe, ReadsOnlyFactsThatThePlanNeeds) {
    JobSpec spec;
    EXPECT_FALSE(probe_for(spec).caches);
    EXPECT_EQ(probe_for(spec).gpus, Probe::Gpus::WithSeveralNumaNodes);
    spec.binding = NumaBinding::None;
    EXPECT_EQ(probe_for(spec).gpus, Probe::Gpus::No);
    spec.workers.kind = WorkerCount::Kind::Auto;
    EXPECT_EQ(probe_for(spec).gpus, Probe::Gpus::Yes);
    spec.binding = NumaBinding::CoreComplex;
    EXPECT_TRUE(probe_for(spec).caches);
}

// ---- binding

TEST(Binding, AutoBindsOnlyWhereThatIsUnambiguous) {
    const auto why = [](const Machine& machine, int workers) {
        return bind_workers(NumaBinding::Auto, machine, workers)->why;
    };
    EXPECT_EQ(why(machine_of(1, 4), 4), "none: one NUMA node");
    EXPECT_EQ(why(machine_of(2, 4), 3), "none: 3 workers do not divide over 2 NUMA nodes");
    EXPECT_EQ(why(machine_of(2, 4), 4), "node: the CPUs of a NUMA node");
    Machine machine = machine_of(2, 4);
    add_gpus(machine, {0, 1});
    EXPECT_EQ(why(machine, 4), "none: 4 workers for 2 GPUs");
    EXPECT_EQ(why(machine, 2), "node: the CPUs of its GPU's NUMA node");
    machine.gpu_places[0].numa_node = -1;
    EXPECT_EQ(why(machine, 2), "none: the GPUs' NUMA nodes are not known");
    EXPECT_THAT(cpus_of(NumaBinding::Auto, machine_of(1, 4), 4, 0), IsEmpty());
}

TEST(Binding, AQuotaCountsAsCoresThatAreNotKnown) {
    Machine machine = machine_of(2, 4);
    machine.quota = 5.9;
    const Result<Bindings> unbound = bind_workers(NumaBinding::Auto, machine, 2);
    EXPECT_EQ(unbound->why, "none: the cgroup's CPU quota gave 5 of 8 cores, and which ones is not known");
    EXPECT_EQ(unbound->workers[0].cores, 2);
    EXPECT_EQ(bind_workers(NumaBinding::Node, machine, 2)->workers[0].cores, 2) << "bound to four cores";
    EXPECT_EQ(bind_workers(NumaBinding::None, machine, 8)->workers[7].cores, 1);
    machine.grant = {"PBS", 3, 1, std::nullopt};
    EXPECT_EQ(bind_workers(NumaBinding::None, machine, 1)->workers[0].cores, 3) << "the smaller one counts";
    machine.grant = {};
    machine.quota = 8;
    EXPECT_FALSE(bind_workers(NumaBinding::Auto, machine, 2)->workers[0].cpus.empty());
}

TEST(Binding, NodeSpreadsWorkersInBlocksWithoutGpus) {
    const Machine machine = machine_of(2, 2);
    EXPECT_THAT(cpus_of(NumaBinding::Node, machine, 4, 1), ElementsAre(0, 1, 4, 5));
    EXPECT_THAT(cpus_of(NumaBinding::Node, machine, 4, 2), ElementsAre(2, 3, 6, 7));
    EXPECT_THAT(bind_workers(NumaBinding::Node, machine, 4)->workers[3].memory_nodes, ElementsAre(1));
    EXPECT_EQ(bind_workers(NumaBinding::Node, machine, 4)->workers[0].cores, 1)
        << "two cores for two workers";
}

TEST(Binding, NodeFollowsTheGpu) {
    Machine machine = machine_of(2, 2);
    add_gpus(machine, {1, 0});
    EXPECT_THAT(cpus_of(NumaBinding::Node, machine, 2, 0), ElementsAre(2, 3, 6, 7));
    EXPECT_THAT(cpus_of(NumaBinding::Node, machine, 2, 1), ElementsAre(0, 1, 4, 5));
}

TEST(Binding, SocketTakesAllNodesOfThePackage) {
    const Machine machine = machine_of(4, 1);  // two nodes per package
    EXPECT_THAT(cpus_of(NumaBinding::Socket, machine, 4, 0), ElementsAre(0, 1, 4, 5));
    EXPECT_THAT(bind_workers(NumaBinding::Socket, machine, 4)->workers[3].memory_nodes, ElementsAre(2, 3));
}

TEST(Binding, ExclusiveDividesCoresWithTheirThreads) {
    const Machine machine = machine_of(1, 5);
    EXPECT_THAT(cpus_of(NumaBinding::Exclusive, machine, 2, 0), ElementsAre(0, 1, 2, 5, 6, 7))
        << "the first takes one more";
    EXPECT_THAT(cpus_of(NumaBinding::Exclusive, machine, 2, 1), ElementsAre(3, 4, 8, 9));
    const Result<Bindings> few = bind_workers(NumaBinding::Exclusive, machine, 6);
    ASSERT_FALSE(few);
    EXPECT_EQ(few.error().what, "--numa-binding: exclusive: NUMA node 0 has 5 usable cores for 6 workers");
}

TEST(Binding, CoreComplexGivesCoresThatShareACacheInTurn) {
    const Machine machine = machine_of(1, 4);
    EXPECT_THAT(cpus_of(NumaBinding::CoreComplex, machine, 3, 0), ElementsAre(0, 1, 4, 5));
    EXPECT_THAT(cpus_of(NumaBinding::CoreComplex, machine, 3, 1), ElementsAre(2, 3, 6, 7));
    EXPECT_THAT(cpus_of(NumaBinding::CoreComplex, machine, 3, 2), ElementsAre(0, 1, 4, 5));
}

// ---- the plan

class Plan : public testing::Test {
  protected:
    Plan() {
        program_.path = "/bin/prog";
        program_.arguments = {"prog", "--out=${rank}.txt", "${local_rank}/${rank}"};
        order_.first_rank = 4;
        order_.local_world_size = 2;
        order_.world_size = 8;
        order_.group_rank = 2;
        order_.group_world_size = 4;
    }
    std::vector<WorkerPlan> plan(const EnvironmentLookup& inherited = environment()) {
        Result<std::vector<WorkerPlan>> workers = plan_workers(spec_, program_, machine_, order_, inherited);
        EXPECT_TRUE(workers) << (workers ? "" : workers.error().what);
        return workers ? *workers : std::vector<WorkerPlan>(2);
    }
    JobSpec spec_;
    ResolvedProgram program_;
    Machine machine_ = machine_of(1, 4);
    rdzv::StartGeneration order_;
};

TEST_F(Plan, NumbersEveryWorker) {
    spec_.rendezvous.run_id = "j";
    spec_.restart.max_restarts = 3;
    order_.restart_count = 1;
    order_.role_first_rank = 2;
    order_.role_world_size = 6;
    const WorkerEnv env = plan()[1].env;
    EXPECT_EQ(env.rank, 5);
    EXPECT_EQ(env.local_rank, 1);
    EXPECT_EQ(env.world_size, 8);
    EXPECT_EQ(env.group_rank, 2);
    EXPECT_EQ(env.role_rank, 3);
    EXPECT_EQ(env.role_world_size, 6);
    EXPECT_EQ(env.restart_count, 1);
    EXPECT_EQ(env.max_restarts, 3);
    EXPECT_EQ(env.run_id, "j");
}

TEST_F(Plan, ShowsTheSignalsThatStopTheJobAsTheyWereGiven) {
    EXPECT_THAT(plan()[0].environment,
                Contains(Pair("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")));
    spec_.signals_to_handle = "SIGUSR1";
    EXPECT_THAT(plan()[1].environment, Contains(Pair("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")));
}

TEST_F(Plan, SubstitutesMacrosInArgumentsOnly) {
    program_.arguments[0] = "${rank}";
    EXPECT_THAT(plan()[1].arguments, ElementsAre("${rank}", "--out=5.txt", "1/5"));
}

TEST_F(Plan, SetsThreadsToTheCoresPerWorkerUnlessTheUserDid) {
    EXPECT_EQ(plan()[0].env.omp_num_threads, 2);
    EXPECT_EQ(plan(environment({{"OMP_NUM_THREADS", "7"}}))[0].env.omp_num_threads, std::nullopt);
    order_.local_world_size = 1;
    EXPECT_EQ(plan()[0].env.omp_num_threads, std::nullopt) << "a lone worker may use all";
    machine_.quota = 3;
    EXPECT_EQ(plan()[0].env.omp_num_threads, 3) << "a library would count the CPUs";
}

TEST_F(Plan, SetsNcclErrorHandlingUnlessTheUserDid) {
    EXPECT_THAT(plan()[0].environment, Contains(Pair("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")));
    EXPECT_THAT(plan(environment({{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"}}))[0].environment,
                Not(Contains(Pair("TORCH_NCCL_ASYNC_ERROR_HANDLING", testing::_))));
}

TEST_F(Plan, SetsWhatTheFabricNeedsUnlessTheUserDid) {
    EXPECT_THAT(plan()[0].environment, Not(Contains(Pair("FI_PROVIDER", testing::_))))
        << "nobody looked for a fabric";
    machine_.fabric = choose_fabric(Fabric::Efa, {});
    EXPECT_THAT(plan()[1].environment, Contains(Pair("FI_PROVIDER", "efa")));
    EXPECT_THAT(plan(environment({{"FI_PROVIDER", "tcp"}}))[0].environment,
                Not(Contains(Pair("FI_PROVIDER", testing::_))));
    const std::string text = render_plan(spec_, program_, machine_, order_, plan(), {}, environment());
    EXPECT_THAT(text, HasSubstr("fabric:     efa (--fabric efa)\n  FI_PROVIDER=efa  ("));
}

TEST_F(Plan, TheFirstWorkersNcclTellsWhichNetworkItTakes) {
    EXPECT_FALSE(plan()[0].asks_network);
    machine_.fabric.fabric = Fabric::Slingshot;
    EXPECT_TRUE(plan()[0].asks_network);
    EXPECT_FALSE(plan()[1].asks_network);
    EXPECT_FALSE(plan(environment({{"NCCL_DEBUG", "WARN"}}))[0].asks_network);
    order_.local_world_size = 1;
    spec_.outer_rank = OuterRank{.local_rank = 1, .local_size = 2, .node_rank = 0, .nodes = 2};
    EXPECT_FALSE(plan()[0].asks_network) << "the second process of an outer launcher on its node";
}

TEST_F(Plan, VirtualLocalRankNarrowsToTheWorkersGpu) {
    spec_.virtual_local_rank = true;
    machine_.gpu_places = {{"GPU-c", "", -1}, {"3", "", -1}};
    machine_.gpus = 2;
    const std::vector<WorkerPlan> workers = plan();
    EXPECT_EQ(workers[1].env.local_rank, 0);
    EXPECT_EQ(workers[1].local_index, 1);
    EXPECT_EQ(workers[1].arguments[2], "0/5");
    EXPECT_THAT(workers[0].environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "GPU-c")));
    EXPECT_THAT(workers[1].environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "3")));
    order_.local_world_size = 3;
    const auto few = plan_workers(spec_, program_, machine_, order_, environment());
    ASSERT_FALSE(few);
    EXPECT_EQ(few.error().what, "--virtual-local-rank: 3 workers but only 2 visible GPUs");
}

/// The values of this variable for each worker; "unset" where the plan leaves it alone.
std::vector<std::string> values_of(const std::vector<WorkerPlan>& workers, std::string_view variable) {
    std::vector<std::string> values;
    for (const WorkerPlan& worker : workers) {
        values.emplace_back("unset");
        for (const auto& [name, value] : worker.environment) {
            if (name == variable) values.back() = value;
        }
    }
    return values;
}

TEST_F(Plan, VirtualLocalRankNarrowsGpusThatNvmlDoesNotShow) {
    spec_.virtual_local_rank = true;
    EXPECT_THAT(values_of(plan(), "CUDA_VISIBLE_DEVICES"), ElementsAre("0", "1")) << "as torchrun";
    for (const char* const variable :
         {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}) {
        const std::vector<WorkerPlan> workers = plan(environment({{variable, "4, GPU-a,6"}}));
        EXPECT_THAT(values_of(workers, variable), ElementsAre("4", "GPU-a")) << variable;
        EXPECT_EQ(workers[1].environment.back().first, variable) << "no other variable is set";
    }
    const auto few =
        plan_workers(spec_, program_, machine_, order_, environment({{"ROCR_VISIBLE_DEVICES", "4"}}));
    ASSERT_FALSE(few);
    EXPECT_EQ(few.error().what, "--virtual-local-rank: 2 workers but only 1 GPUs in ROCR_VISIBLE_DEVICES=4");
}

TEST_F(Plan, NarrowsTheListThatChoosesFromAnother) {
    spec_.narrow_gpus = true;
    const std::vector<WorkerPlan> amd = plan(environment(
        {{"ROCR_VISIBLE_DEVICES", "6,7"}, {"HIP_VISIBLE_DEVICES", "1,0"}, {"CUDA_VISIBLE_DEVICES", "1,0"}}));
    EXPECT_THAT(values_of(amd, "HIP_VISIBLE_DEVICES"), ElementsAre("1", "0"));
    EXPECT_THAT(values_of(amd, "CUDA_VISIBLE_DEVICES"), ElementsAre("1", "0"));
    EXPECT_THAT(values_of(amd, "ROCR_VISIBLE_DEVICES"), ElementsAre("unset", "unset"));
}

TEST_F(Plan, NarrowsNothingWhereAllGpusAreHidden) {
    spec_.narrow_gpus = true;
    for (const char* const nothing : {"", "-1", "NoDevFiles"})
        EXPECT_THAT(values_of(plan(environment({{"CUDA_VISIBLE_DEVICES", nothing}})), "CUDA_VISIBLE_DEVICES"),
                    ElementsAre("unset", "unset"));
    machine_.hidden_gpus = 4;
    EXPECT_THAT(values_of(plan(environment({{"CUDA_VISIBLE_DEVICES", "9"}})), "CUDA_VISIBLE_DEVICES"),
                ElementsAre("unset", "unset"));
}

TEST_F(Plan, LeavesGpusAloneUnlessAsked) {
    add_gpus(machine_, {0, 0});
    EXPECT_THAT(plan()[0].environment, Not(Contains(Pair("CUDA_VISIBLE_DEVICES", testing::_))));
    spec_.narrow_gpus = true;
    EXPECT_THAT(plan()[1].environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "1")));
    EXPECT_EQ(plan()[1].env.local_rank, 1);
}

TEST_F(Plan, KeepsAnOuterJobsVariablesFromTheWorkers) {
    EXPECT_THAT(plan()[0].removed, Contains("DDPRUN_TOKEN"));
    EXPECT_THAT(plan()[0].removed, Contains("TORCHELASTIC_ERROR_FILE"));
}

TEST_F(Plan, StdinGoesToOneRankAndAttachPutsOneUnderADebugger) {
    spec_.stdin_rank = 5;
    EXPECT_FALSE(plan()[0].reads_stdin);
    EXPECT_TRUE(plan()[1].reads_stdin);
    spec_.stdin_rank.reset();
    spec_.attach = {4, "gdb"};
    const WorkerPlan attached = plan()[0];
    EXPECT_TRUE(attached.attached && attached.reads_stdin);
    EXPECT_EQ(attached.program, "/bin/sh");
    EXPECT_THAT(attached.arguments, ElementsAre("/bin/sh", "-c", "exec gdb --args \"$@\"", "sh", "/bin/prog",
                                                "--out=4.txt", "0/4"));
    EXPECT_FALSE(plan()[1].attached);
}

TEST_F(Plan, IsRenderedCompletelyAndWithoutSecrets) {
    std::vector<WorkerPlan> workers = plan();
    workers[0].environment.emplace_back("WANDB_API_KEY", "abc");
    workers[0].environment.emplace_back("DDPRUN_TOKEN", "def");
    workers[0].cpus = {0, 1, 4};
    const std::string text = render_plan(spec_, program_, machine_, order_, workers);
    EXPECT_THAT(text, HasSubstr("2 workers on this node (node 2 of 4), ranks 4-5 of 8"));
    EXPECT_THAT(text, HasSubstr("rank 5 (local rank 1): prog --out=5.txt 1/5\n"));
    EXPECT_THAT(text, HasSubstr("  WORLD_SIZE=8\n"));
    EXPECT_THAT(text, HasSubstr("  RANK=5\n"));
    EXPECT_THAT(text, HasSubstr("  CPUs 0-1, 4\n"));
    EXPECT_THAT(text, HasSubstr("binding:    none: one NUMA node\n"));
    EXPECT_THAT(text, HasSubstr("WANDB_API_KEY=<secret>"));
    EXPECT_THAT(text, HasSubstr("DDPRUN_TOKEN=<secret>"));
    EXPECT_THAT(text, Not(HasSubstr("abc")));
    EXPECT_THAT(text, Not(HasSubstr("def\n")));
}

TEST_F(Plan, NamesTheScriptAndNotOnlyThePythonThatRunsIt) {
    program_.name = "train.py";
    program_.path = "/usr/bin/python3";
    program_.how = "run by /usr/bin/python3, the first python3 in PATH";
    EXPECT_THAT(render_plan(spec_, program_, machine_, order_, plan()),
                HasSubstr("program:    train.py (run by /usr/bin/python3, the first python3 in PATH)\n"));
}

TEST_F(Plan, SaysWhetherWorkersMayRecoverInPlace) {
    const auto rendered = [this](bool has_pmix = false) {
        return render_plan(spec_, program_, machine_, order_, plan(),
                           PlanSurroundings{"", "", "", {}, has_pmix});
    };
    EXPECT_THAT(rendered(), HasSubstr("recovery:   in place where the program announces it"));
    EXPECT_THAT(rendered(true), HasSubstr("recovery:   all ranks restart (MPI does not outlive its peers)"));
    spec_.recover.mode = RecoverSpec::Mode::Restart;
    EXPECT_THAT(rendered(), HasSubstr("recovery:   all ranks restart (--recover=restart)"));
}

TEST_F(Plan, MarksValuesThatAreNotKnownBeforeTheNodesHaveMet) {
    order_.master_addr = "";
    order_.master_port = 0;
    const PlanSurroundings around{
        "shown as node 1", "at node00:29400 (node rank 1)", "", {"node00: node 0", "node01: node 1"}};
    const std::string text = render_plan(spec_, program_, machine_, order_, plan(), around);
    EXPECT_THAT(text, HasSubstr("  MASTER_ADDR=<an address of the first node>\n"));
    EXPECT_THAT(text, HasSubstr("  MASTER_PORT=<a free port>\n"));
    EXPECT_THAT(text, HasSubstr("node:       shown as node 1\n"));
    EXPECT_THAT(
        text,
        HasSubstr(
            "controller: at node00:29400 (node rank 1)\nhosts:      node00: node 0\n            node01: node 1\n"));
}

TEST(RanksExist, RefusesAbsentRanksOfOneNodeWithOptionValueAndRemedy) {
    JobSpec spec;
    spec.stdin_rank = 5;
    EXPECT_EQ(
        check_ranks_exist(spec, 1).error().what,
        "--stdin=5: this job has rank 0 only; name one of these, or give more workers (--nproc-per-node)");
    EXPECT_TRUE(check_ranks_exist(spec, 6));
    spec.nodes = {1, 2};
    EXPECT_TRUE(check_ranks_exist(spec, 1)) << "another node may have it";
    spec = {};
    spec.attach = {4, "gdb"};
    EXPECT_THAT(check_ranks_exist(spec, 4).error().what,
                HasSubstr("--attach=4: this job has ranks 0-3 only"));
    spec = {};
    spec.output.local_ranks = {7};
    EXPECT_THAT(check_ranks_exist(spec, 2).error().what,
                HasSubstr("--local-ranks-filter=7: this job has ranks 0-1 only"));
    spec.output.local_ranks = {7, 1};
    EXPECT_TRUE(check_ranks_exist(spec, 2)) << "something is shown";
}

TEST(ShellQuoted, QuotesOnlyWhatNeedsIt) {
    EXPECT_EQ(shell_quoted("--a=b"), "--a=b");
    EXPECT_EQ(shell_quoted("a b"), "'a b'");
    EXPECT_EQ(shell_quoted("it's"), "'it'\\''s'");
    EXPECT_EQ(shell_quoted(""), "''");
}

// ---- programs

class Program : public testing::Test {
  protected:
    Program() {
        std::filesystem::create_directories(own());
        std::filesystem::create_directories(bin());
        search_.own_directories = {own()};
        search_.path = bin();
        make(bin() + "/python3", 0755);
    }
    [[nodiscard]] std::string own() const { return directory_.file("own"); }
    [[nodiscard]] std::string bin() const { return directory_.file("bin"); }
    static void make(const std::string& path, mode_t mode) {
        std::ofstream(path) << "#!/bin/sh\n";
        ::chmod(path.c_str(), mode);
    }
    ResolvedProgram found(const std::string& name, ProgramSpec::Kind kind = ProgramSpec::Kind::Detect) {
        Result<ResolvedProgram> program = resolve_program({kind, name, {"arg"}}, search_);
        EXPECT_TRUE(program) << (program ? "" : program.error().what);
        return program ? *program : ResolvedProgram{};
    }
    Error error(const std::string& name, ProgramSpec::Kind kind = ProgramSpec::Kind::Detect) {
        const Result<ResolvedProgram> program = resolve_program({kind, name, {}}, search_);
        EXPECT_FALSE(program) << name << " was found";
        return program ? Error{} : program.error();
    }
    test::TemporaryDirectory directory_;
    ProgramSearch search_;
};

TEST_F(Program, OwnWorkersComeBeforePath) {
    make(bin() + "/train", 0755);
    EXPECT_EQ(found("train").path, bin() + "/train");
    make(own() + "/train", 0755);
    EXPECT_EQ(found("train").path, own() + "/train");
    EXPECT_THAT(found("train").arguments, ElementsAre("train", "arg"));
    EXPECT_EQ(found("train").how, "found among ddprun's own workers");
    EXPECT_EQ(found("train").name, own() + "/train");
}

TEST_F(Program, PythonScriptsRunUnbufferedAlsoWhenNotExecutable) {
    const std::string script = directory_.file("t.py");
    make(script, 0644);
    EXPECT_EQ(found(script).path, bin() + "/python3");
    EXPECT_THAT(found(script).arguments, ElementsAre(bin() + "/python3", "-u", script, "arg"));
    EXPECT_EQ(found(script).name, script) << "reports name the script, not the interpreter";
    make(bin() + "/other-python", 0755);
    search_.python = "other-python";
    EXPECT_EQ(found(script).path, bin() + "/other-python");
    EXPECT_EQ(program_exit_code(error(script, ProgramSpec::Kind::Executable)), ExitCode::NotExecutable);
}

TEST_F(Program, ModulesAndRunPathGoThroughPython) {
    EXPECT_THAT(found("pkg.train", ProgramSpec::Kind::Module).arguments,
                ElementsAre(bin() + "/python3", "-u", "-m", "pkg.train", "arg"));
    const std::string script = directory_.file("script");
    make(script, 0644);
    EXPECT_THAT(found(script, ProgramSpec::Kind::RunPath).arguments,
                ElementsAre(bin() + "/python3", "-u", "-c", HasSubstr("runpy.run_path"), script, "arg"));
}

TEST_F(Program, NotFoundIs127AndSuggestsWhatIsNear) {
    make(own() + "/train", 0755);
    EXPECT_EQ(error("trian").what,
              "trian: not found among ddprun's own workers and in PATH; did you mean train?");
    EXPECT_THAT(error("train_gpt").what, HasSubstr("did you mean train?"));
    make(bin() + "/touch", 0755);
    EXPECT_EQ(error("nosuch").what, "nosuch: not found among ddprun's own workers and in PATH");
    EXPECT_THAT(error("tuch").what, HasSubstr("did you mean touch?"));
    make(bin() + "/halt", 0755);
    search_.own_words = {"--help", "stacks", "ps"};
    EXPECT_THAT(error("status").what, HasSubstr("did you mean ddprun ps?"));
    EXPECT_THAT(error("stack").what, HasSubstr("did you mean ddprun stacks?"));
    EXPECT_THAT(error("help").what, HasSubstr("did you mean ddprun --help?"));
    EXPECT_EQ(program_exit_code(error("trian")), ExitCode::NotFound);
    EXPECT_EQ(error(own() + "/trian").what,
              own() + "/trian: no such file; did you mean " + own() + "/train?");
    EXPECT_EQ(error(directory_.file("none/zzz")).what, directory_.file("none/zzz") + ": no such file");
    EXPECT_THAT(error("absent.py").what,
                HasSubstr("absent.py: no such file (relative to the current directory)"));
    EXPECT_EQ(program_exit_code(error("absent.py")), ExitCode::NotFound);
}

TEST_F(Program, AMissingScriptSuggestsTheScriptThatIsNear) {
    make(directory_.file("train.py"), 0644);
    make(directory_.file("trains"), 0644);
    EXPECT_EQ(
        error(directory_.file("trian.py")).what,
        directory_.file("trian.py") + ": no such file; did you mean " + directory_.file("train.py") + "?");
}

TEST_F(Program, NamesThePythonThatRunsAndWhy) {
    const std::string script = directory_.file("t.py");
    make(script, 0644);
    EXPECT_EQ(found(script).how, "run by " + bin() + "/python3, the first python3 in PATH");
    search_.python = bin() + "/python3";
    EXPECT_EQ(found(script).how, "run by " + bin() + "/python3, PYTHON_EXEC");
}

TEST(ChoiceOfPython, PythonExecComesBeforeTheEnvironmentOfDdprunAndThatBeforePath) {
    ProgramSearch search{.own_directories = {}, .path = "/usr/bin", .python = "", .environment = ""};
    EXPECT_EQ(choose_python(search).program, "python3");
    search.environment = "/home/ada/venv";
    EXPECT_EQ(choose_python(search).program, "/home/ada/venv/bin/python3");
    EXPECT_EQ(choose_python(search).why, "of the environment that ddprun is installed in");
    search.python = "python3.12";
    EXPECT_EQ(choose_python(search).program, "python3.12");
    EXPECT_EQ(choose_python(search).why, "PYTHON_EXEC");
}

TEST_F(Program, APythonThatIsGoneFromTheEnvironmentOfDdprunIsAnErrorAndPathIsNotSearched) {
    const std::string script = directory_.file("t.py");
    make(script, 0644);
    search_.environment = "/no/venv";
    EXPECT_EQ(
        error(script).what,
        "/no/venv/bin/python3: no such file (the Python of the environment that ddprun is installed in; "
        "PYTHON_EXEC names another)");
    search_.python = "python3";
    EXPECT_EQ(found(script).path, bin() + "/python3");
}

TEST_F(Program, DirectoriesAndFilesWithoutPermissionAre126) {
    EXPECT_THAT(error(own()).what, HasSubstr("is a directory"));
    EXPECT_EQ(program_exit_code(error(own())), ExitCode::NotExecutable);
    make(bin() + "/data", 0644);
    EXPECT_THAT(error("data").what, HasSubstr("permission denied (not executable; try chmod +x"));
    std::ofstream(bin() + "/data") << "import torch\n";
    EXPECT_THAT(error("data").what,
                HasSubstr("(not executable; a Python script is run by --run-path, a program needs chmod +x " +
                          bin() + "/data)"));
    EXPECT_EQ(program_exit_code(error("data")), ExitCode::NotExecutable);
    EXPECT_EQ(program_exit_code(error(bin() + "/data")), ExitCode::NotExecutable);
}

TEST_F(Program, NamesTheDirectoryThatIsClosed) {
    const std::string home = directory_.file("home"), link = bin() + "/linked", script = home + "/bin/t.py";
    std::filesystem::create_directories(home + "/bin");
    make(home + "/bin/tool", 0755);
    make(script, 0644);
    std::filesystem::create_symlink("../home/bin/tool", link);
    for (const std::string& directory : {directory_.path(), bin(), home + "/bin"})
        std::filesystem::permissions(directory, std::filesystem::perms(0755));
    std::filesystem::permissions(home, std::filesystem::perms(0700));
    const auto what = [&](const std::string& path) {
        return fmt::format("{}: permission denied (this user may not enter the directory {})", path,
                           path == link ? bin() + "/../home" : home);
    };
    // Run as another user, because nothing is closed to root. (After `make`: the child must not write.)
    const pid_t child = ::fork();
    if (child == 0) {
        if (::getuid() == 0 && ::setuid(65534) != 0) ::_exit(9);
        if (::getuid() != 65534) ::chmod(home.c_str(), 0);
        const bool all = error(link).what == what(link) && error("linked").what == what(link) &&
                         error(home + "/bin/tool").what == what(home + "/bin/tool") &&
                         error(script).what == what(script) &&
                         program_exit_code(error(link)) == ExitCode::NotExecutable;
        ::_exit(all ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    std::filesystem::permissions(home, std::filesystem::perms(0700));
}

TEST_F(Program, AScriptWhoseFirstLineNamesPythonNeedsNoPySuffixAndNoPermission) {
    const std::string script = directory_.file("main");
    std::ofstream(script) << "#!/usr/bin/env python3\nprint('hello')\n";
    ::chmod(script.c_str(), 0644);
    EXPECT_THAT(found(script).arguments, ElementsAre(bin() + "/python3", "-u", script, "arg"));
    EXPECT_EQ(found(script).name, script);
    EXPECT_THAT(error(script, ProgramSpec::Kind::Executable).what, HasSubstr("try chmod +x"))
        << "--no-python";
    ::chmod(script.c_str(), 0755);
    EXPECT_EQ(found(script).path, script) << "the kernel reads that line itself";
    std::ofstream(script) << "#!/bin/sh\n";
    ::chmod(script.c_str(), 0644);
    EXPECT_THAT(error(script).what, HasSubstr("(not executable; try chmod +x " + script + ")"));
}

TEST_F(Program, IsRunByPythonAlsoWhenItsFirstLineOrTheUserSaysSo) {
    make(directory_.file("train.py"), 0644);
    EXPECT_TRUE(is_run_by_python(found(directory_.file("train.py"))));
    EXPECT_TRUE(is_run_by_python(found("python3", ProgramSpec::Kind::Executable)));
    std::ofstream(bin() + "/lightning") << "#!/opt/venv/bin/python3.12\n";
    ::chmod((bin() + "/lightning").c_str(), 0755);
    EXPECT_TRUE(is_run_by_python(found("lightning")));
    make(bin() + "/solver", 0755);
    EXPECT_FALSE(is_run_by_python(found("solver")));
}

TEST(NamesPython, MatchesTheInterpreterHoweverItIsWritten) {
    for (const char* line : {"#!/usr/bin/python", "#! /opt/conda/bin/python3.12 -u", "#!/usr/bin/env python3",
                             "#!/usr/bin/env -S python3 -u"}) {
        EXPECT_TRUE(names_python(line)) << line;
    }
    for (const char* line : {"", "#!/bin/sh", "#!/home/python/bin/perl", "import python", "# python"})
        EXPECT_FALSE(names_python(line)) << line;
}

TEST_F(Program, AMissingPythonIsReported) {
    search_.path = own();
    EXPECT_THAT(error("m", ProgramSpec::Kind::Module).what, HasSubstr("python3: not found in PATH"));
    search_.python = "/no/python";
    EXPECT_THAT(error("m", ProgramSpec::Kind::Module).what,
                HasSubstr("/no/python: no such file (named by PYTHON_EXEC)"));
}

}  // namespace
}  // namespace ddprun
