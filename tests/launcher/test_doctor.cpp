#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "env/json.h"
#include "launcher/machine/grant.h"
#include "launcher/tools/doctor/doctor.h"

namespace ddprun::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

GpuFacts gpu(unsigned index) {
    GpuFacts facts;
    facts.index = index;
    facts.name = "NVIDIA H100";
    facts.uuid = "GPU-" + std::to_string(index);
    facts.total_bytes = 80ULL << 30;
    facts.links = facts.links_up = 18;
    return facts;
}

/// A sound node with two GPUs.
Facts sound() {
    Facts facts;
    HostFacts& host = facts.host;
    host.name = "node01";
    host.kernel = "Linux 6.1 x86_64";
    host.machine.cpus = 4;
    host.machine.cpu_places = {{0, 0, 0, 0, 0}, {1, 0, 0, 1, 0}, {2, 1, 1, 2, 2}, {3, 1, 1, 3, 2}};
    host.memory_total = 64ULL << 30;
    host.memory_available = 60ULL << 30;
    host.shm_size = 32ULL << 30;
    host.shm_free = 31ULL << 30;
    host.open_files = {65536, 65536};
    host.clock = {"tsc", true, true, 1'780'000'000};
    facts.nvidia.driver = "580.65.06";
    facts.nvidia.cuda_version = 13000;
    facts.nvidia.gpus = {gpu(0), gpu(1)};
    facts.nvidia.pairs = {{0, 1, GpuDistance::NvLink, true}};
    facts.network.interfaces = {{"lo", true, true, true, {"127.0.0.1"}, std::nullopt, 65536},
                                {"eth0", true, false, false, {"10.0.0.1"}, 25000, 9000}};
    facts.trial.state = TrialFacts::State::Done;
    facts.trial.workers = 2;
    facts.trial.backend = "nccl";
    facts.trial.bus_gigabytes_per_second = 300;
    return facts;
}

TrialFacts failed_trial() {
    TrialFacts trial;
    trial.state = TrialFacts::State::Failed;
    trial.command = "ddprun x";
    trial.problem = "rank 0: no";
    trial.exit_code = 1;
    return trial;
}

std::vector<Finding> troubles(const Facts& facts) {
    std::vector<Finding> found;
    for (const Finding& finding : judge(facts)) {
        if (finding.severity != Severity::Ok) found.push_back(finding);
    }
    return found;
}

struct Case {
    const char* name;
    void (*spoil)(Facts&);
    Severity severity;
    const char* subject;
    const char* says;
    const char* remedy;
};

// Each case breaks one thing of a sound machine and expects exactly one finding that is not ok.
const Case kCases[] = {
    {"LittleMemory", [](Facts& f) { f.host.memory_available = 1 << 30; }, Severity::Warning, "memory",
     "1 GiB available of 64 GiB", "ps aux"},
    {"NoShm", [](Facts& f) { f.host.shm_size.reset(); }, Severity::Warning, "/dev/shm", "is not there",
     "mount"},
    {"SmallShm", [](Facts& f) { f.host.shm_size = 64 << 20; }, Severity::Warning, "/dev/shm",
     "64 MiB: too small", "--shm-size"},
    {"FullShm", [](Facts& f) { f.host.shm_free = 1 << 20; }, Severity::Warning, "/dev/shm",
     "1 MiB free of 32 GiB", "remove"},
    {"Memlock",
     [](Facts& f) {
         f.host.memlock = {65536, 65536};
     },
     Severity::Note, "memlock", "64 KiB (hard 64 KiB): too little for RDMA", "limits.conf"},
    {"FewFilesThatCanBeRaised",
     [](Facts& f) {
         f.host.open_files = {1024, 524288};
     },
     Severity::Warning, "nofile", "1024 (hard 524288)", "ulimit -n 524288"},
    {"FewFiles",
     [](Facts& f) {
         f.host.open_files = {256, 256};
     },
     Severity::Warning, "nofile", "256 (hard 256)", "limits.conf"},
    {"FewProcesses",
     [](Facts& f) {
         f.host.processes = {512, std::nullopt};
     },
     Severity::Warning, "nproc", "512 (hard unlimited)", "ulimit -u 4096"},
    {"SmallStack",
     [](Facts& f) {
         f.host.stack = {1 << 20, std::nullopt};
     },
     Severity::Warning, "stack", "1 MiB", "ulimit -s unlimited"},
    {"SmallCgroup",
     [](Facts& f) {
         f.host.cgroup = {2, 512ULL << 20, {}, {}, {}};
     },
     Severity::Warning, "cgroup memory", "only 512 MiB", "--memory"},
    {"FewPids",
     [](Facts& f) {
         f.host.cgroup = {2, {}, {}, 100, {}};
     },
     Severity::Warning, "cgroup pids", "only 100", "--pids-limit"},
    {"CpuQuota",
     [](Facts& f) {
         f.host.cgroup.version = 2;
         f.host.machine.quota = 2.0;
     },
     Severity::Warning, "cgroup cpu", "2.0 CPUs of quota, 4 CPUs visible", "OMP_NUM_THREADS"},
    {"OldClock", [](Facts& f) { f.host.clock.unix_seconds = 0; }, Severity::Error, "clock", "before 2024",
     "set it"},
    {"UnsynchronisedClock", [](Facts& f) { f.host.clock.synchronised = false; }, Severity::Note, "clock",
     "not synchronised", "chronyd"},
    {"SlowClock", [](Facts& f) { f.host.clock.source = "hpet"; }, Severity::Warning, "clock source", "hpet",
     "clocksource=tsc"},
    {"Ptrace", [](Facts& f) { f.host.ptrace_scope = 1; }, Severity::Note, "ptrace", "ptrace_scope 1",
     "ptrace_scope=0"},
    {"PtraceForNobody",
     [](Facts& f) {
         f.host.ptrace_scope = 3;
         f.host.may_ptrace = true;
     },
     Severity::Note, "ptrace", "ptrace_scope 3", "administrator"},
    {"Powersave", [](Facts& f) { f.host.governor = "powersave"; }, Severity::Note, "cpu governor",
     "powersave", "performance"},
    {"NoVisibleGpu", [](Facts& f) { f.visible_devices = ""; }, Severity::Error, "visible GPUs",
     "0 of 2 GPUs visible", "unset"},
    {"UnknownVisibleGpu", [](Facts& f) { f.visible_devices = "0,7"; }, Severity::Warning, "visible GPUs",
     "1 of 2 GPUs visible", "that exist"},
    {"NoPeerAccess",
     [](Facts& f) {
         f.nvidia.pairs = {{0, 1, GpuDistance::System, false}};
     },
     Severity::Warning, "peer access", "1 of 1 pairs", "ACS"},
    {"DarkNvlink", [](Facts& f) { f.nvidia.gpus[1].links_up = 0; }, Severity::Warning, "nvlink",
     "no active NVLink", "fabricmanager"},
    {"NoGpuShown",
     [](Facts& f) {
         f.nvidia.gpus.clear();
         f.nvidia.pairs.clear();
     },
     Severity::Error, "driver", "shows no GPU", "--gpus all"},
    {"LaunchBlocking",
     [](Facts& f) {
         f.variables = {{"CUDA_LAUNCH_BLOCKING", "1"}};
     },
     Severity::Warning, "variable", "debugging only", "unset CUDA_LAUNCH_BLOCKING"},
    {"ForcedAlgorithm",
     [](Facts& f) {
         f.variables = {{"NCCL_ALGO", "Ring"}};
     },
     Severity::Warning, "variable", "NCCL_ALGO=Ring", "unset NCCL_ALGO"},
    {"WrongInterface",
     [](Facts& f) {
         f.variables = {{"NCCL_SOCKET_IFNAME", "ib0"}};
     },
     Severity::Error, "NCCL sockets", "names no interface", "unset"},
    {"OwnNameIsALoopback", [](Facts& f) { f.network.own_name_at = "127.0.1.1"; }, Severity::Note, "own name",
     "127.0.1.1 by /etc/hosts", "GLOO_SOCKET_IFNAME"},
    {"TwoNetworks",
     [](Facts& f) {
         f.network.interfaces.push_back({"eth1", true, false, false, {"10.1.0.1"}, 1000, 1500});
     },
     Severity::Note, "NCCL sockets", "takes eth0,eth1", "NCCL_SOCKET_IFNAME"},
    {"NoNetwork", [](Facts& f) { f.network.interfaces.clear(); }, Severity::Warning, "NCCL sockets",
     "no interface is up", "ip link"},
    {"Slingshot", [](Facts& f) { f.network.cxi_devices = {"cxi0"}; }, Severity::Warning, "NCCL sockets",
     "must be told", "NCCL_SOCKET_IFNAME=hsn"},
    {"AllReduceFailed", [](Facts& f) { f.trial = failed_trial(); }, Severity::Error, "all-reduce",
     "exit code 1: rank 0: no", "ddprun x"},
    {"AllReduceOnCpus", [](Facts& f) { f.trial.why_cpus = "a GPU is lost"; }, Severity::Warning, "all-reduce",
     "on the CPUs: a GPU is lost", "above"},
    {"AllReduceNotAsked", [](Facts& f) { f.trial = {}; }, Severity::Note, "all-reduce", "--no-run", ""},
    {"LostGpu", [](Facts& f) { f.nvidia.gpus[1].lost = "fell off"; }, Severity::Error, "GPU 1", "fell off",
     "reset"},
};

class Doctor : public ::testing::TestWithParam<Case> {};

TEST_P(Doctor, NamesTheFaultAndItsRemedy) {
    Facts facts = sound();
    GetParam().spoil(facts);
    const std::vector<Finding> found = troubles(facts);
    ASSERT_EQ(found.size(), 1u) << render_text(found, {});
    EXPECT_EQ(found[0].severity, GetParam().severity);
    EXPECT_EQ(found[0].subject, GetParam().subject);
    EXPECT_THAT(found[0].what, HasSubstr(GetParam().says));
    EXPECT_THAT(found[0].remedy, HasSubstr(GetParam().remedy));
}

INSTANTIATE_TEST_SUITE_P(Troubles, Doctor, ::testing::ValuesIn(kCases),
                         [](const auto& one) { return one.param.name; });

TEST(DoctorJudgement, FindsNoFaultInASoundMachine) { EXPECT_THAT(troubles(sound()), IsEmpty()); }

TEST(DoctorJudgement, NamesTheFabricAndThatDdprunSetsItsVariables) {
    Facts facts = sound();
    facts.network.cxi_devices = {"cxi0"};
    EXPECT_THAT(judge(facts),
                Contains(AllOf(
                    Field(&Finding::subject, "fabric"),
                    Field(&Finding::what,
                          HasSubstr("slingshot (cxi0); in jobs of several nodes ddprun sets 9 variables")))));
}

TEST(DoctorJudgement, AMachineWithoutGpusIsNoError) {
    Facts facts = sound();
    facts.nvidia = {};
    facts.nvidia.problem = "no NVIDIA driver is loaded";
    for (const Finding& finding : troubles(facts))
        EXPECT_EQ(finding.severity, Severity::Note) << finding.what;
    facts.nvidia.has_device = true;
    EXPECT_THAT(troubles(facts), Contains(AllOf(Field(&Finding::severity, Severity::Error),
                                                Field(&Finding::subject, "driver"))));
    facts.nvidia.mismatch = true;
    EXPECT_THAT(troubles(facts), Contains(AllOf(Field(&Finding::subject, "driver"),
                                                Field(&Finding::remedy, HasSubstr("updated while in use")))));
}

TEST(DoctorJudgement, LockedMemoryMattersWithRdmaOnly) {
    Facts facts = sound();
    facts.host.memlock = {8 << 20, 8 << 20};
    facts.network.ports = {{"mlx5_0", 1, "ACTIVE", "400 Gb/sec", "InfiniBand"}};
    EXPECT_THAT(troubles(facts), ElementsAre(AllOf(Field(&Finding::subject, "memlock"),
                                                   Field(&Finding::severity, Severity::Warning))));
    facts.host.memlock = {};
    facts.network.ports[0].state = "DOWN";
    EXPECT_THAT(troubles(facts), Contains(AllOf(Field(&Finding::subject, "RDMA"),
                                                Field(&Finding::what, HasSubstr("no port is active")))));
}

TEST(DoctorJudgement, ReadsTheInterfaceSettingAsNcclDoes) {
    const auto sockets_with = [](const char* setting) {
        Facts facts = sound();
        facts.network.interfaces.push_back({"eth01", true, false, true, {"10.1.0.1"}, 1000, 1500});
        facts.variables = {{"NCCL_SOCKET_IFNAME", setting}};
        for (const Finding& finding : judge(facts)) {
            if (finding.subject == "NCCL sockets") return finding.what;
        }
        return std::string();
    };
    EXPECT_THAT(sockets_with("eth0"), HasSubstr("eth0,eth01 ("));
    EXPECT_THAT(sockets_with("=eth0"), HasSubstr("eth0 ("));
    EXPECT_THAT(sockets_with("^lo,eth01"), HasSubstr("eth0 ("));
}

TEST(DoctorTrial, TakesOneWorkerPerGpuAndTheCpusWhenAGpuIsLost) {
    Facts facts = sound();
    TrialPlan plan = plan_trial(facts.host, facts.nvidia, 2);
    EXPECT_TRUE(plan.on_gpus);
    EXPECT_THAT(plan.arguments, Contains("--nproc-per-node=2"));
    EXPECT_THAT(plan.arguments, Contains("cuda"));
    EXPECT_THAT(plan.arguments, Contains("nccl"));
    const std::string prefix = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${rank}]: ";
    EXPECT_THAT(plan.environment, ElementsAre(prefix)) << "what the workers write is known by it";
    facts.nvidia.gpus[1].lost = "fell off";
    plan = plan_trial(facts.host, facts.nvidia, 2);
    EXPECT_FALSE(plan.on_gpus);
    EXPECT_EQ(plan.workers, 4);
    EXPECT_EQ(plan.why, "a GPU is lost");
}

TEST(DoctorTrial, KeepsToTheQuotaOfTheCgroup) {
    Facts facts = sound();
    facts.host.machine.quota = 2.5;
    EXPECT_EQ(plan_trial(facts.host, facts.nvidia, 0).workers, 2);
    facts.host.machine.quota = 0.5;
    EXPECT_EQ(plan_trial(facts.host, facts.nvidia, 0).workers, 1);
}

TEST(DoctorTrial, ReadsTheWorkersResultOrItsError) {
    const TrialFacts done = read_trial(
        "noise\n[0]: {\"allreduce_check\": 1, \"workers\": 3, \"backend\": \"cpu\", \"bytes\": 64, \"rounds\": 7, "
        "\"seconds\": 2.0, \"bus_gigabytes_per_second\": 9.5, \"first_at_ns\": 2500}\n",
        0, 500);
    EXPECT_EQ(done.state, TrialFacts::State::Done);
    EXPECT_EQ(done.workers, 3);
    EXPECT_EQ(done.start, Duration(2000));
    const TrialFacts failed =
        read_trial("ddprun: failed\n[1]: rank 1: no device\n[0]: rank 0: no device\n", 1, 0);
    EXPECT_EQ(failed.state, TrialFacts::State::Failed);
    EXPECT_EQ(failed.problem, "[1]: rank 1: no device; [0]: rank 0: no device");
    EXPECT_EQ(read_trial("", 0, 0).state, TrialFacts::State::Failed);
    EXPECT_EQ(read_trial("{\"allreduce_check\": 1, cut o", 0, 0).state, TrialFacts::State::Failed);
}

TEST(DoctorCgroup, SearchesFromOurCgroupUpwards) {
    const auto directories = [](std::string_view text, std::string_view controller) {
        return cgroup_places(text, controller).directories;
    };
    EXPECT_THAT(directories("0::/a.slice/job\n", "memory"),
                ElementsAre("/sys/fs/cgroup/a.slice/job", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"));
    EXPECT_THAT(directories("4:memory:/docker/x\n2:cpu,cpuacct:/\n0::/\n", "memory"),
                ElementsAre("/sys/fs/cgroup/memory/docker/x", "/sys/fs/cgroup/memory/docker",
                            "/sys/fs/cgroup/memory"));
    EXPECT_THAT(directories("2:cpu,cpuacct:/\n", "cpu"), ElementsAre("/sys/fs/cgroup/cpu"));
    EXPECT_THAT(directories("", "cpu"), IsEmpty());
}

TEST(DoctorText, IsAlignedWrappedAndCounted) {
    const std::vector<Finding> findings = {
        {Severity::Ok, "Host", "cpu", "fine", ""},
        {Severity::Warning, "GPUs", "GPU 0", "is hot and the text about it goes on for long", "cool it"}};
    EXPECT_EQ(render_text(findings, {false, 40}),
              "Host\n"
              "  ok       cpu    fine\n"
              "\n"
              "GPUs\n"
              "  warning  GPU 0  is hot and the text\n"
              "                  about it goes on for\n"
              "                  long\n"
              "                  -> cool it\n"
              "\n"
              "0 errors, 1 warning, 0 notes\n");
    EXPECT_THAT(render_text(findings, {true, 80}), HasSubstr("\033[33mwarning  \033[0mGPU 0"));
    EXPECT_THAT(render_text(findings, {false, 80}), Not(HasSubstr("\033")));
}

TEST(DoctorText, HasOneLinePerFindingInAFile) {
    const std::string what = std::string(90, 'w') + " and " + std::string(90, 'x');
    EXPECT_THAT(render_text({{Severity::Ok, "Host", "cpu", what, ""}}, {}), HasSubstr("cpu  " + what + "\n"));
}

TEST(DoctorJson, HoldsFindingsAndFacts) {
    Facts facts = sound();
    facts.nvidia.gpus[0].name = "a \"name\" \xff";
    const Json json = parse_json(render_json(facts, judge(facts))).value_or(Json());
    EXPECT_EQ(json["version"], 1);
    EXPECT_EQ(json["worst"], "ok");
    EXPECT_EQ(json["gpus"].size(), 2u);
    EXPECT_EQ(json["gpus"][1]["memory_bytes"], 80ULL << 30);
    EXPECT_EQ(json["all_reduce"]["workers"], 2);
    EXPECT_TRUE(json["host"]["cgroup_cpus"].is_null());
}

}  // namespace
}  // namespace ddprun::doctor
