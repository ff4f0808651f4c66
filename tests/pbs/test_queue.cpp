#include "pbs/qstat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pbs/directives.h"

namespace ddprun::pbs {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::Not;

constexpr const char* kJson = R"J({"timestamp":1795269600,"pbs_server":"pbs01","Jobs":{"12.pbs01":{
    "Job_Name":"train","job_state":"F","queue":"main","comment":"Job run at Sat Nov 21 at 14:00 on (node01:ncpus=64)",
    "exec_host":"node01/0*64+node02/0*64","Output_Path":"login1.site:/home/u/train.o12","Exit_status":271,"run_count":"2"}}})J";

/// OpenPBS's output without -F json: long values continue after a tab.
constexpr const char* kText =
    "Job Id: 12.pbs01\n    Job_Name = train\n    job_state = Q\n    queue = main\n"
    "    comment = Not Running: Insufficient amount of resource: \n\tngpus\n"
    "    Output_Path = login1:/home/u/train.o12\n    Variable_List = PBS_O_HOME=/home/u,\n\tA = B\n\n";

TEST(QueuedJob, IsReadFromJson) {
    const Result<QueuedJob> job = parse_job(kJson);
    ASSERT_TRUE(job) << job.error().what;
    EXPECT_EQ(job->id, "12.pbs01");
    EXPECT_EQ(job->state, "F");
    EXPECT_EQ(job->output, "/home/u/train.o12");
    EXPECT_EQ(job->exit_status, 271);
    EXPECT_EQ(job->run_count, 2) << "also where it stands in quotes";
}

TEST(QueuedJob, IsReadFromTextWithoutJson) {
    const Result<QueuedJob> job = parse_job(kText);
    ASSERT_TRUE(job) << job.error().what;
    EXPECT_EQ(job->state, "Q");
    EXPECT_EQ(job->comment, "Not Running: Insufficient amount of resource: ngpus") << "a folded value is one";
    EXPECT_EQ(job->exit_status, std::nullopt);
}

TEST(QueuedJob, RefusesBrokenJson) {
    EXPECT_EQ(parse_job("").error().code, Errc::NotFound);
    EXPECT_EQ(parse_job(R"({"Jobs":{}})").error().code, Errc::NotFound);
    EXPECT_EQ(parse_job("qstat: Unknown Job Id 12.pbs01\n").error().code, Errc::NotFound);
    EXPECT_EQ(parse_job(R"({"Jobs":{"12":7}})").error().code, Errc::NotFound);
}

TEST(QueuedJob, AnOutputPathWithoutAHostStaysWhole) {
    EXPECT_EQ(parse_job(R"({"Jobs":{"1.s":{"Output_Path":"/a:b/train.o1"}}})")->output, "/a:b/train.o1");
}

TEST(SubmittedJob, IsTheLastLineThatQsubPrints) {
    EXPECT_EQ(*parse_submitted("12.pbs01\n"), "12.pbs01");
    EXPECT_EQ(*parse_submitted("Welcome to the cluster\n5[].pbs01\n\n"), "5[].pbs01");
    for (const char* text : {"", "\n", "qsub: Unknown queue", "12 jobs submitted"})
        EXPECT_FALSE(parse_submitted(text)) << text;
}

constexpr const char* kTable =
    "Job id            Name             User              Time Use S Queue\n"
    "----------------  ---------------- ----------------  -------- - -----\n"
    "9.pbs01           other            u                 00:10:00 R main\n"
    "10.pbs01          other            v                 0        Q main\n"
    "11.pbs01          other            v                 0        Q debug\n"
    "12.pbs01          train            u                 0        Q main\n"
    "120.pbs01         train            u                 0        Q main\n";

TEST(PlaceInQueue, CountsJobsThatWaitInTheSameQueue) {
    EXPECT_EQ(place_in_queue(kTable, "12.pbs01.site.org", "main"), (QueuePlace{2, 3}));
    EXPECT_EQ(place_in_queue(kTable, "11.pbs01", "debug"), (QueuePlace{1, 1}));
    EXPECT_EQ(place_in_queue(kTable, "9.pbs01", "main"), std::nullopt) << "it runs";
    EXPECT_EQ(place_in_queue("", "9.pbs01", "main"), std::nullopt);
}

TEST(PlaceInQueue, KnowsAQueueWhoseNameTheTableCut) {
    EXPECT_EQ(place_in_queue("7.s  n  u  0 Q preem\n", "7.s", "preemptable"), (QueuePlace{1, 1}));
}

TEST(HostsOfAJob, AreNamedOnce) {
    EXPECT_EQ(hosts_of("node01/0*64+node02/0*64"), "node01, node02");
    EXPECT_EQ(hosts_of("node01/0+node01/1"), "node01");
    EXPECT_EQ(hosts_of(""), "");
}

TEST(ExitStatus, IsConvertedToAShellsCode) {
    EXPECT_EQ(exit_code_of(0), 0);
    EXPECT_EQ(exit_code_of(75), 75);
    EXPECT_EQ(exit_code_of(271), 143) << "a task that SIGTERM ended";
    EXPECT_EQ(exit_code_of(137), 137);
    EXPECT_EQ(exit_code_of(-29), 1);
    EXPECT_EQ(meaning_of(-29), "the walltime was exceeded");
    EXPECT_EQ(meaning_of(0), "");
}

TEST(PbsDirectives, LeaveOutWhatWasNotAskedFor) {
    Directives d;
    d.name = "train";
    EXPECT_THAT(render_directives(d), ElementsAre("#PBS -N train", "#PBS -l select=1", "#PBS -j oe"));
}

TEST(PbsDirectives, RenderAWholeRequest) {
    Directives d;
    d.name = "train", d.account = "ABCD0001", d.queue = "main", d.walltime = "01:00:00", d.nodes = 2,
    d.cpus = 64, d.gpus = 4;
    d.memory = "480GB", d.select = "system=polaris", d.place = "scatter", d.filesystems = "home:eagle",
    d.keep = "doe";
    d.rerunnable = false, d.more = {"-l job_priority=economy"};
    EXPECT_THAT(
        render_directives(d),
        ElementsAre("#PBS -N train", "#PBS -A ABCD0001", "#PBS -q main",
                    "#PBS -l select=2:system=polaris:ncpus=64:ngpus=4:mem=480GB", "#PBS -l place=scatter",
                    "#PBS -l walltime=01:00:00", "#PBS -l filesystems=home:eagle", "#PBS -j oe",
                    "#PBS -k doe", "#PBS -r n", "#PBS -l job_priority=economy"));
}

}  // namespace
}  // namespace ddprun::pbs
