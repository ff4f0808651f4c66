#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Signals, TermStopsTheWorkersGracefullyWithTheRequeueExitCode) {
    Program program(ddprun_probe({"--nproc-per-node=2"},
                                 {"note", "15", "saving", "say", "up", "noted", "15", "exit", "0"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: saving"), HasSubstr("[1]: saving")));
    EXPECT_THAT(outcome.err, HasSubstr("SIGTERM: stopping 2 workers"));
}

TEST(Signals, TheFirstInterruptIsGracefulAndTheSecondKillsNow) {
    Program program(
        ddprun_probe({"--nproc-per-node=2"}, {"ignore", "2", "ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGINT);
    ASSERT_TRUE(program.wait_for_output("SIGINT: stopping 2 workers"));
    const auto second = std::chrono::steady_clock::now();
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - second, 15s) << "the grace is 30 s";
    EXPECT_EQ(outcome.status, 75) << outcome.err;
}

TEST(Signals, WorkersThatIgnoreTheStopAreKilledWhenTheGraceIsOver) {
    Program program(
        ddprun_probe({"--nproc-per-node=2", "--shutdown-timeout=1"}, {"ignore", "15", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    const auto sent = std::chrono::steady_clock::now();
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    const auto took = std::chrono::steady_clock::now() - sent;
    EXPECT_GE(took, 950ms);
    EXPECT_LT(took, 15s) << "without the option it takes 30 s";
    EXPECT_EQ(outcome.status, 75);
}

TEST(Signals, Usr1IsForwardedAndTheJobGoesOn) {
    Program program(
        ddprun_probe({"--nproc-per-node=2"}, {"note", "10", "got it", "on", "12", "0", "say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGUSR1);
    ASSERT_TRUE(program.wait_for_output("[0]: got it") && program.wait_for_output("[1]: got it"));
    program.signal(SIGUSR2);
    EXPECT_EQ(program.wait().status, 0);
}

TEST(Signals, WhatTheStarterIgnoresEndsNeitherTheJobNorAWorker) {
    std::vector<std::string> command{"/bin/sh", "-c", "trap '' HUP INT QUIT USR1; exec \"$@\"", "sh"};
    const std::vector<std::string> job =
        ddprun_probe({"--nproc-per-node=2", "--signal=QUIT=forward"},
                     {"note", "3", "a quit", "on", "12", "0", "say", "ready", "hold"});
    command.insert(command.end(), job.begin(), job.end());
    Program program(command);
    ASSERT_TRUE(program.wait_for_output("[0]: ready") && program.wait_for_output("[1]: ready"));
    for (const int signal : {SIGHUP, SIGINT, SIGUSR1, SIGQUIT}) program.signal(signal);
    ASSERT_TRUE(program.wait_for_output("[0]: a quit") && program.wait_for_output("[1]: a quit"));
    program.signal(SIGUSR2);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST(Signals, WorkersReceiveTheSignalThatWasSent) {
    Program program(ddprun_probe({"--nproc-per-node=1"}, {"note", "2", "an interrupt", "note", "15",
                                                          "a termination", "say", "up", "noted", "2"}));
    ASSERT_TRUE(program.wait_for_output("up\n"));
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("an interrupt"), Not(HasSubstr("a termination"))));
}

TEST(Signals, ASurvivorThatIgnoresTermDelaysAFailedJobOnlyByTheGrace) {
    const TemporaryDirectory directory;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=2", "--shutdown-timeout=1", "--failure-grace=60"},
                         {"rank", "0", "await", directory.file("deaf"), "exit", "6", "end", "ignore", "15",
                          "once", directory.file("deaf"), "end", "hold"}));
    EXPECT_EQ(outcome.status, 6) << outcome.err;
    EXPECT_GE(outcome.took, 1s);
    EXPECT_LT(outcome.took, 20s) << "a failure grants no more than a stop";
}

// ---- the walltime of a PBS job, by a fake qstat

/// A PATH with a qstat that shows a job that has run for so many of its 60 minutes.
struct PbsJob {
    TemporaryDirectory directory;
    RunOptions options;

    explicit PbsJob(int minutes) {
        std::ofstream(directory.file("qstat")) << R"(#!/bin/sh
test "$*" = '-f -F json 17.pbs' || exit 1
export LC_ALL=C
now=$(date +%s)
started=$(date -d @$((now - $RAN * 60)) '+%a %b %e %H:%M:%S %Y')
echo '{"timestamp":'$now',"Jobs":{"17.pbs":{"Resource_List":{"walltime":"01:00:00"},"stime":"'$started'"}}}'
)";
        ::chmod(directory.file("qstat").c_str(), 0755);
        options = with_environment({"PATH=" + directory.path() + ":/usr/bin:/bin", "PBS_JOBID=17.pbs",
                                    "LOGLEVEL=debug", "TZ=UTC0", "RAN=" + std::to_string(minutes)});
        options.unset = {"PBS_WALLTIME", "SLURM_JOB_END_TIME", "PBS_NODEFILE"};
    }
};

TEST(Signals, AJobThatPbsEndsAfterItsWalltimeReportsTheWalltime) {
    const PbsJob job(61);
    Program program(ddprun_probe({}, {"say", "up", "hold"}), job.options);
    ASSERT_TRUE(program.wait_for_output("the walltime ends in") && program.wait_for_output("up\n"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75);
    EXPECT_THAT(outcome.err, HasSubstr("killed at walltime"));
}

TEST(Signals, AJobDeletedLongBeforeItsWalltimeDoesNotReportIt) {
    const PbsJob job(1);
    Program program(ddprun_probe({}, {"say", "up", "hold"}), job.options);
    ASSERT_TRUE(program.wait_for_output("the walltime ends in") && program.wait_for_output("up\n"));
    program.signal(SIGTERM);
    EXPECT_THAT(program.wait().err, Not(HasSubstr("killed at walltime")));
}

TEST(Signals, AWalltimeNoticePreemptsTheJobBeforeItsEnd) {
    const PbsJob job(59);
    const Outcome outcome =
        run(ddprun_probe({"--walltime-notice=2m"}, {"on", "15", "0", "hold"}), job.options);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("walltime in "), HasSubstr("was preempted"),
                                   HasSubstr("stopped at walltime")));
}

/// A Slurm job whose environment does not have its end, and a fake squeue.
RunOptions slurm_job(const TemporaryDirectory& directory, const std::string& squeue) {
    std::ofstream(directory.file("squeue")) << "#!/bin/sh\n" << squeue << "\n";
    ::chmod(directory.file("squeue").c_str(), 0755);
    RunOptions options = with_environment(
        {"PATH=" + directory.path() + ":/usr/bin:/bin", "SLURM_JOB_ID=17", "LOGLEVEL=debug"});
    options.unset = {"PBS_JOBID", "PBS_WALLTIME", "SLURM_JOB_END_TIME", "PBS_NODEFILE"};
    return options;
}

TEST(Signals, AWalltimeNoticeComesByTheEndFromSqueue) {
    const TemporaryDirectory directory;
    const RunOptions options = slurm_job(
        directory, "test \"$SLURM_TIME_FORMAT $*\" = '%s -h -j 17 -o %e' && echo $(($(date +%s) + 60))");
    const Outcome outcome = run(ddprun_probe({"--walltime-notice=2m"}, {"on", "15", "0", "hold"}), options);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("walltime in "), HasSubstr("was preempted")));
}

TEST(Signals, AWalltimeNoticeComesByTheRestFromBjobs) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("bjobs"))
        << "#!/bin/sh\ntest \"$*\" = '-noheader -o time_left 17[3]' && echo '0:1 L'\n";
    ::chmod(directory.file("bjobs").c_str(), 0755);
    RunOptions options =
        with_environment({"PATH=" + directory.path() + ":/usr/bin:/bin", "LSB_JOBID=17", "LSB_JOBINDEX=3"});
    options.unset = {"PBS_JOBID",         "PBS_WALLTIME",   "SLURM_JOB_ID", "SLURM_JOB_END_TIME",
                     "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS"};
    const Outcome outcome = run(ddprun_probe({"--walltime-notice=2m"}, {"on", "15", "0", "hold"}), options);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("walltime in "));
}

TEST(Signals, AnImpossibleWalltimeNoticeIsReportedAtTheStart) {
    const TemporaryDirectory directory;
    const RunOptions refused =
        slurm_job(directory, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1");
    EXPECT_THAT(run(ddprun_probe({"--walltime-notice=2m"}, {"sleep", "500"}), refused).err,
                HasSubstr("--walltime-notice=2 min: no notice will be given: squeue gave no answer"));
    RunOptions nowhere;
    nowhere.unset = {"SLURM_JOB_ID", "SLURM_JOB_END_TIME", "PBS_JOBID", "PBS_WALLTIME", "LSB_JOBID"};
    EXPECT_THAT(
        run(ddprun_probe({"--walltime-notice=2m"}, {"say", "done"}), nowhere).err,
        HasSubstr(
            "--walltime-notice=2 min: no notice will be given: this process is in no job of PBS, Torque, Slurm or LSF"));
    EXPECT_THAT(run(ddprun_probe({}, {"say", "done"}), nowhere).err, Not(HasSubstr("notice")))
        << "nobody asked for one";
}

TEST(Signals, AWorkerThatFailsJustBeforeTheWalltimeIsNotStartedAgainAndTheJobCanBe) {
    const TemporaryDirectory directory;
    const RunOptions options =
        slurm_job(directory, "echo $(($(date +%s) + 30)); touch " + directory.file("asked"));
    const Outcome outcome = run(
        ddprun_probe({"--max-restarts=3"}, {"await", directory.file("asked"), "sleep", "500", "exit", "3"}),
        options);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("no restart: it would get nowhere in the "), HasSubstr("exit code 3")));
}

TEST(Signals, TwoSigtermsAtOnceInABatchJobLeaveTheWorkersTheirGrace) {
    const PbsJob job(1);
    Program program(ddprun_probe({}, {"note", "15", "saving", "say", "up", "noted", "15", "sleep", "1000",
                                      "say", "saved"}),
                    job.options);
    ASSERT_TRUE(program.wait_for_output("up\n"));
    program.signal(SIGTERM);
    ASSERT_TRUE(program.wait_for_output("saving"));
    program.signal(SIGTERM);  // the first was handled, so the kernel cannot have merged the two
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75);
    EXPECT_THAT(outcome.out, HasSubstr("saved"));
    EXPECT_THAT(outcome.err, Not(HasSubstr("killing")));
}

TEST(Signals, AQstatThatHangsDoesNotHoldUpTheJob) {
    const PbsJob job(1);
    std::ofstream(job.directory.file("qstat")) << "#!/bin/sh\nexec sleep 1000\n";
    const Outcome outcome = run(ddprun_probe({}, {"say", "done"}), job.options);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.err, Not(HasSubstr("left behind")));
    EXPECT_LT(outcome.took, std::chrono::seconds(20));
}

}  // namespace
}  // namespace ddprun::test
