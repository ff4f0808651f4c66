#include "env/nodes/batch_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace ddprun {
namespace {

EnvironmentLookup lookup_in(const std::map<std::string, std::string>& variables) {
    return [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(std::string(name));
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

std::optional<BatchJob> found_in(const std::map<std::string, std::string>& variables) {
    return find_batch_job(lookup_in(variables));
}

TEST(BatchJobHere, OfPbsHasAScriptOrIsInteractive) {
    const std::optional<BatchJob> job =
        found_in({{"PBS_JOBID", "12.pbs01"}, {"PBS_O_WORKDIR", "/home/u"}, {"PBS_ENVIRONMENT", "PBS_BATCH"}});
    EXPECT_EQ(job, (BatchJob{Scheduler::Pbs, "12.pbs01", "/home/u", true, false}));
    EXPECT_FALSE(found_in({{"PBS_JOBID", "12.pbs01"}, {"PBS_ENVIRONMENT", "PBS_INTERACTIVE"}})->is_script);
}

TEST(BatchJobHere, AnElementOfAnArrayIsKnownByItsBrackets) {
    EXPECT_TRUE(found_in({{"PBS_JOBID", "5[0].pbs01"}})->is_array_element);
    const std::optional<BatchJob> lsf = found_in({{"LSB_JOBID", "17"}, {"LSB_JOBINDEX", "3"}});
    EXPECT_EQ(lsf->id, "17[3]");
    EXPECT_TRUE(lsf->is_array_element);
    EXPECT_EQ(found_in({{"LSB_JOBID", "17"}, {"LSB_JOBINDEX", "0"}})->id, "17")
        << "LSF says 0 where there is no array";
}

TEST(BatchJobHere, AnElementOfASlurmArrayIsNotTheArray) {
    // The last element's job number is the array's.
    const std::optional<BatchJob> last =
        found_in({{"SLURM_JOB_ID", "17"}, {"SLURM_ARRAY_JOB_ID", "17"}, {"SLURM_ARRAY_TASK_ID", "3"}});
    EXPECT_EQ(last->id, "17_3");
    EXPECT_TRUE(last->is_array_element);
    EXPECT_EQ(
        found_in({{"SLURM_JOB_ID", "18"}, {"SLURM_ARRAY_JOB_ID", "17"}, {"SLURM_ARRAY_TASK_ID", "1"}})->id,
        "17_1");
}

TEST(BatchJobHere, OfSlurmHasAScriptUnderSbatch) {
    EXPECT_TRUE(found_in({{"SLURM_JOB_ID", "17"}, {"ENVIRONMENT", "BATCH"}})->is_script);
    EXPECT_FALSE(found_in({{"SLURM_JOB_ID", "17"}})->is_script) << "salloc";
}

TEST(BatchJobHere, IsNoneWithoutAScheduler) {
    EXPECT_EQ(found_in({}), std::nullopt);
    EXPECT_EQ(found_in({{"PBS_JOBID", ""}}), std::nullopt);
}

TEST(SchedulersPrograms, AreAlsoFoundInTheSubmittersPathOfAPbsJob) {
    const std::map<std::string, std::string> of_qsub{
        {"PBS_JOBID", "12.pbs01"}, {"PATH", "/bin:/usr/bin"}, {"PBS_O_PATH", "/usr/bin:/opt/pbs/bin"}};
    EXPECT_EQ(scheduler_search_path(lookup_in(of_qsub)), "/bin:/usr/bin:/usr/bin:/opt/pbs/bin");
    EXPECT_EQ(scheduler_search_path(lookup_in({{"PATH", "/bin"}, {"PBS_O_PATH", "/opt/pbs/bin"}})), "/bin")
        << "of no job";
    EXPECT_EQ(scheduler_search_path(lookup_in({{"PBS_JOBID", "12.pbs01"}, {"PBS_O_PATH", "/opt/pbs/bin"}})),
              "/opt/pbs/bin");
    EXPECT_EQ(scheduler_environment({"A=1", "PATH=/bin:/usr/bin", "B=2"}, lookup_in(of_qsub)),
              (std::vector<std::string>{"A=1", "B=2", "PATH=/bin:/usr/bin:/usr/bin:/opt/pbs/bin"}));
}

TEST(JobIdAsAFileName, KeepsElementsOfAnArrayApart) {
    EXPECT_EQ(file_name_of("5[0].pbs01"), "5_0_.pbs01");
    EXPECT_NE(file_name_of("5[1].pbs01"), file_name_of("5[0].pbs01"));
    EXPECT_EQ(file_name_of("../17"), ".._17");
}

TEST(OtherScheduler, WithSeveralHostsGetsALine) {
    const auto remark = [](const std::string& variable, const std::string& text) {
        return remark_on_other_scheduler(
            [&](std::string_view name) {
                return name == variable ? std::optional<std::string>("/spool/hosts") : std::nullopt;
            },
            [&](const std::string&) { return Result<std::string>(text); });
    };
    EXPECT_EQ(
        remark("PE_HOSTFILE", "n1 2 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\n"),
        "PE_HOSTFILE=/spool/hosts names 2 hosts, but ddprun does not know the jobs of Grid Engine and stays on "
        "this host: name all of them by --hosts or --hostfile, and ssh starts them");
    for (const char* variable : {"COBALT_NODEFILE", "OAR_NODEFILE", "PJM_O_NODEINF"})
        EXPECT_THAT(remark(variable, "n1\nn1\nn2\n"), ::testing::HasSubstr("names 2 hosts")) << variable;
    EXPECT_EQ(remark("OAR_NODEFILE", "n1\nn1\n\n"), "") << "one host, two cores";
    EXPECT_EQ(remark("NOTHING", "n1\nn2\n"), "");
}

}  // namespace
}  // namespace ddprun
