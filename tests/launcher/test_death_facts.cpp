#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "env/io/file.h"
#include "launcher/ends/error_file.h"
#include "launcher/ends/explain.h"
#include "launcher/hang/stacks.h"
#include "launcher/machine/grant.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::string_view kCgroupKill =
    "6,1234,5678901,-;Memory cgroup out of memory: Killed process 4171 (train) total-vm:70123456kB, "
    "anon-rss:61000000kB, file-rss:1024kB, shmem-rss:0kB, UID:1000 pgtables:120000kB oom_score_adj:0";
constexpr std::string_view kNodeKill =
    "Out of memory: Killed process 4172 (python3) total-vm:70123456kB, anon-rss:2048kB, file-rss:0kB, shmem-rss:0kB";

DeathFacts killed(pid_t pid) {
    DeathFacts facts;
    facts.pid = pid;
    facts.signal = SIGKILL;
    return facts;
}

TEST(OomKill, IsReadFromTheKernelsLine) {
    const auto kill = parse_oom_kill(kCgroupKill);
    ASSERT_TRUE(kill);
    EXPECT_EQ(kill->pid, 4171);
    EXPECT_EQ(kill->program, "train");
    EXPECT_EQ(kill->rss_bytes, std::uint64_t{61001024} * 1024);
    EXPECT_TRUE(kill->by_cgroup);
    EXPECT_FALSE(parse_oom_kill(kNodeKill)->by_cgroup);
    EXPECT_FALSE(parse_oom_kill("6,1,2,-;eth0: link up"));
    EXPECT_FALSE(parse_oom_kill("Killed process x (y)"));
}

TEST(CgroupPlaces, AreThoseOfVersion2OrTheMemoryControllersOfVersion1) {
    EXPECT_EQ(cgroup_places("0::/user.slice/job_12\n", "memory"),
              (CgroupPlaces{
                  2, {"/sys/fs/cgroup/user.slice/job_12", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"}}));
    EXPECT_EQ(cgroup_places("12:cpu,cpuacct:/a\n4:memory:/slurm/job_2\n0::/init.scope\n", "memory"),
              (CgroupPlaces{1,
                            {"/sys/fs/cgroup/memory/slurm/job_2", "/sys/fs/cgroup/memory/slurm",
                             "/sys/fs/cgroup/memory"}}));
    EXPECT_EQ(cgroup_places("nonsense", "memory"), CgroupPlaces{});
}

TEST(CpuQuota, IsTheSmallestOfACgroupAndThoseAboveIt) {
    const test::TemporaryDirectory tree;
    const auto write = [&](const std::string& file, std::string_view text) {
        ASSERT_TRUE(write_file_atomically(tree.file(file), text, 0644)) << file;
    };
    std::filesystem::create_directories(tree.file("pod/container"));
    const CgroupPlaces two{2, {tree.file("pod/container"), tree.file("pod"), tree.path()}};
    EXPECT_EQ(cpu_quota(two), std::nullopt);
    write("pod/container/cpu.max", "max 100000\n");
    EXPECT_EQ(cpu_quota(two), std::nullopt);
    write("pod/cpu.max", "150000 100000\n");
    write("cpu.max", "400000 100000\n");
    EXPECT_EQ(cpu_quota(two), 1.5);

    const CgroupPlaces one{1, {tree.file("pod"), tree.path()}};
    write("pod/cpu.cfs_quota_us", "-1\n");
    write("pod/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(cpu_quota(one), std::nullopt);
    write("cpu.cfs_quota_us", "400000\n");
    write("cpu.cfs_period_us", "50000\n");
    EXPECT_EQ(cpu_quota(one), 8);
}

TEST(MemoryCounters, AreMatchedByTheirWholeName) {
    const std::string_view events = "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n";
    EXPECT_EQ(parse_counter(events, "oom_kill"), 1u);
    EXPECT_EQ(parse_counter(events, "oom"), 2u);
    EXPECT_FALSE(parse_counter(events, "kill"));
    EXPECT_EQ(parse_cgroup_limit("68719476736\n"), std::uint64_t{64} << 30);
    EXPECT_FALSE(parse_cgroup_limit("max\n"));
    EXPECT_FALSE(parse_cgroup_limit("9223372036854771712\n"));
}

TEST(ExplainDeath, NamesTheCpuTimeLimitAfterSigkill) {
    DeathFacts facts = killed(4171);
    facts.cpu_limit = 60;
    EXPECT_THAT(explain_death(facts), HasSubstr("limit of 60 s (ulimit -Ht)"));
    facts.cgroup_oom_kills = 1;
    EXPECT_THAT(explain_death(facts), HasSubstr("out of memory")) << "what is known comes first";
    facts.signal = SIGSEGV;
    EXPECT_EQ(explain_death(facts), "");
}

TEST(ExplainDeath, NamesTheCgroupsMemoryLimit) {
    DeathFacts facts = killed(4171);
    facts.cgroup_oom_kills = 1;
    facts.memory_limit = std::uint64_t{64} << 30;
    EXPECT_EQ(explain_death(facts), "out of memory: the cgroup's limit of 64 GiB was hit");
    facts.kernel_lines = {std::string(kCgroupKill)};
    EXPECT_THAT(explain_death(facts), HasSubstr("(it held 58.2 GiB)"));
}

TEST(ExplainDeath, BlamesTheNodesMemoryOnlyForTheProcessThatTheKernelNames) {
    DeathFacts facts = killed(4172);
    facts.kernel_lines = {std::string(kCgroupKill), std::string(kNodeKill)};
    EXPECT_THAT(explain_death(facts), HasSubstr("the node had none left"));
    facts.pid = 4173;
    EXPECT_EQ(explain_death(facts), "");
}

TEST(ExplainDeath, DoesNotBlameMemoryForAnotherSignal) {
    DeathFacts facts = killed(1);
    facts.cgroup_oom_kills = 1;
    facts.signal = SIGSEGV;
    EXPECT_EQ(explain_death(facts), "");
}

TEST(ExplainDeath, BlamesSharedMemoryForABusErrorOnlyWhenItIsFull) {
    DeathFacts facts;
    facts.signal = SIGBUS;
    facts.shm_size = std::uint64_t{64} << 20;
    facts.shm_free = 4096;
    EXPECT_THAT(explain_death(facts), HasSubstr("/dev/shm is full (4 KiB of 64 MiB free)"));
    facts.shm_free = std::uint64_t{32} << 20;
    EXPECT_EQ(explain_death(facts), "");
}

TEST(ExplainDeath, BlamesTheSchedulerAtTheEndOfTheWalltime) {
    DeathFacts facts = killed(1);
    facts.walltime_left = -2s;
    EXPECT_THAT(explain_death(facts), HasSubstr("walltime"));
    facts.walltime_left = 3600s;
    EXPECT_EQ(explain_death(facts), "");
    facts.walltime_left = -3600s;
    EXPECT_EQ(explain_death(facts), "") << "it was extended: the job runs on";
}

TEST(ReadableErrorFile, ShowsTorchsMessageAndTrace) {
    const std::string json = R"({"message": {"message": "rank 1: boom", "extraInfo": {"py_callstack": )"
                             R"("#0 _ZN5train3runEi [/opt/train+0x12]\n#1 main [x]\n", "timestamp": "1"}}})";
    EXPECT_EQ(readable_error_file(json), "rank 1: boom\n#0 train::run(int) [/opt/train+0x12]\n#1 main [x]");
}

TEST(ReadableErrorFile, ShowsAPythonMessageOnce) {
    const std::string json = R"({"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": )"
                             R"("Traceback:\n  f()\nValueError: no\n", "timestamp": "1"}}})";
    EXPECT_EQ(readable_error_file(json), "Traceback:\n  f()\nValueError: no");
}

TEST(ReadableErrorFile, AddsErrorsOfNcclAndCudaThatTheMessageLacks) {
    const char* json =
        R"({"message": {"message": "rank 1: timed out: the link is down", "extraInfo": {"py_callstack": "#0 main [x]\n",
        "timestamp": "1", "nccl_error": "the link is down", "cuda_error": "device-side assert"}}})";
    EXPECT_EQ(readable_error_file(json),
              "rank 1: timed out: the link is down\nlast CUDA error: device-side assert\n#0 main [x]");
}

TEST(ReadableErrorFile, SaysWhatIsLeftOutOfALongReport) {
    const std::string trace = "Traceback:" + std::string(200'000, 'x') + "\\nValueError: no";
    const std::string text = readable_error_file(R"({"message": {"message": "ValueError: no", "extraInfo": )"
                                                 R"({"py_callstack": ")" +
                                                 trace + "\"}}}");
    EXPECT_LT(text.size(), 66'000U);
    EXPECT_TRUE(text.starts_with("Traceback:xxx"));
    EXPECT_TRUE(text.ends_with("xxx\nValueError: no"));
    EXPECT_NE(text.find(" KiB of this report are left out]\n"), std::string::npos);
}

TEST(ReadableErrorFile, KeepsAnyOtherText) {
    for (const char* text :
         {"plain words", "{\"message\": 5}", "{\"message\": {\"message\": 5}}", "[1]", ""}) {
        EXPECT_EQ(readable_error_file(text), text);
    }
}

TEST(StackMethods, PreferTheWorkersOwnHandlerUnlessItCannotRun) {
    const StackTools all{"/bin/py-spy", "/bin/gdb", "/bin/eu-stack"};
    EXPECT_EQ(choose_stack_method({true, false, false}, all), StackMethod::Handler);
    EXPECT_EQ(choose_stack_method({true, true, false}, all), StackMethod::Gdb);
    EXPECT_EQ(choose_stack_method({false, false, true}, all), StackMethod::PySpy);
    EXPECT_EQ(choose_stack_method({false, false, true}, {"", "", "/bin/eu-stack"}), StackMethod::EuStack);
    EXPECT_EQ(choose_stack_method({false, false, true}, {}), StackMethod::Kernel);
}

}  // namespace
}  // namespace ddprun
