// `ddprun pbs` and `ddprun slurm`, and jobs that are requeued: over a PBS of fakes and a real Slurm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/support/pbs_hosts.h"
#include "tests/support/pbs_user.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"
#include "tests/system/on_slurm.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

Words joined(std::initializer_list<Words> parts) {
    Words all;
    for (const Words& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
}

// ---- PBS

class PbsBatch : public ::testing::Test {
  protected:
    explicit PbsBatch(int hosts = 1) : count_(hosts) {}
    void SetUp() override {
        if (const auto reason = PbsHosts::why_not()) GTEST_SKIP() << *reason;
        hosts_ = std::make_unique<Hosts>(count_);
        pbs_ = std::make_unique<PbsHosts>(*hosts_);
        user_ = std::make_unique<PbsUser>(pbs_->options());
    }

    /// `ddprun pbs submit`, with the probe's acts as the program.
    static Words submit(const Words& options, const Words& ddprun_options, const Words& acts) {
        return joined({{path_of("DDPRUN"), "pbs", "submit", "--name", "job"},
                       options,
                       {"--"},
                       ddprun_options,
                       {path_of("PROBE")},
                       acts});
    }
    /// Runs a command as the user, with another PATH.
    [[nodiscard]] Outcome run_with_path(const std::string& path, const Words& command) const {
        return user_->run(joined({{"PATH=" + path}, command}));
    }
    [[nodiscard]] Outcome status(const std::string& id) const {
        return user_->run({path_of("DDPRUN"), "pbs", "status", id});
    }
    /// Follows a job whose worker holds, to its end: preempts it, as its walltime's notice would.
    [[nodiscard]] Outcome drained(const Words& following) const {
        Program program(following, pbs_->options());
        EXPECT_TRUE(program.wait_for_output("holding\n"));
        EXPECT_EQ(test::run(hosts_->command(0, {path_of("DDPRUN"), "drain"})).status, 0);
        return program.wait();
    }
    [[nodiscard]] std::string state_of(const std::string& id) const {
        return text_of(user_->status(id), "job_state");
    }

    const int count_;
    std::unique_ptr<Hosts> hosts_;
    std::unique_ptr<PbsHosts> pbs_;
    std::unique_ptr<PbsUser> user_;
};

class PbsBatchOnTwoHosts : public PbsBatch {
  protected:
    PbsBatchOnTwoHosts() : PbsBatch(2) {}
};

TEST_F(PbsBatchOnTwoHosts, OneCommandRunsOnAllNodesAndIsRequeuedWhenTheTimeIsUp) {
    const Words acts = {"on",  "15",      "0",    "env", "RANK", "once", user_->file("first"),
                        "say", "holding", "hold", "end"};
    const Outcome first =
        drained(submit({"--nodes=2", "--gpus-per-node=1", "--walltime=1h", "--requeue=self"}, {}, acts));
    EXPECT_EQ(first.status, 75) << first.err << first.out;
    EXPECT_THAT(first.err, HasSubstr("running on node00, node01"));
    EXPECT_THAT(first.out, HasSubstr("the next run is job 2.server"));
    const Outcome second = status("2.server");
    EXPECT_EQ(second.status, 0) << second.err << second.out;
    EXPECT_THAT(second.out, AllOf(HasSubstr("RANK=0\n"), HasSubstr("RANK=1\n")));
}

TEST_F(PbsBatch, SubmitShowsStateAndLogAndEndsAsTheJob) {
    const Outcome outcome = user_->run(
        submit({}, {"--nproc-per-node=2"}, {"say", "it's $HOME", "rank", "1", "exit", "3", "end", "hold"}));
    EXPECT_EQ(outcome.status, 3) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("it's $HOME\n"), HasSubstr("rank 1 on node00: exit code 3")))
        << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("job.pbs as job 1.server"), HasSubstr("1.server: ended with exit code 3")));
    EXPECT_TRUE(std::filesystem::exists(user_->file("job.pbs")));
}

TEST_F(PbsBatch, AWaitingJobIsShownWithItsPlaceAndReason) {
    const std::string first = user_->submit("sleep 600", {"-l", "select=1:ncpus=64"});
    Program waiting(submit({"--cpus-per-node=64"}, {}, {"say", "my turn"}), pbs_->options());
    EXPECT_TRUE(waiting.wait_for_output(
        "2.server: queued in workq, 1st of 1: Not Running: Insufficient amount of resource: ncpus"));
    EXPECT_EQ(user_->run({"qdel", first}).status, 0);
    const Outcome outcome = waiting.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("my turn"));
}

TEST_F(PbsBatch, CtrlCLeavesTheJobAndNamesTheCommandToFollowItAgain) {
    const std::string go = user_->file("go");
    Program following(submit({}, {}, {"say", "up", "await", go, "say", "done"}), pbs_->options());
    ASSERT_TRUE(following.wait_for_output("up\n"));
    following.signal(SIGINT);
    const Outcome left = following.wait();
    EXPECT_FALSE(left.signaled);
    EXPECT_EQ(left.status, 130);
    EXPECT_THAT(
        left.err,
        HasSubstr(
            "job 1.server goes on. ddprun pbs status 1.server follows it again, qdel 1.server ends it"));
    EXPECT_EQ(state_of("1.server"), "R");

    std::ofstream(go) << "";
    const Outcome again = user_->run({path_of("DDPRUN"), "pbs", "status", "1.server"});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_THAT(again.out, AllOf(HasSubstr("up\n"), HasSubstr("done\n"))) << "the log from its beginning";
    EXPECT_THAT(user_->run({path_of("DDPRUN"), "pbs", "status", "--no-follow", "1.server"}).out,
                HasSubstr("1.server: ended with exit code 0"));
}

TEST_F(PbsBatch, ADeletedJobIsReportedAsEnded) {
    Program following(submit({}, {}, {"say", "up", "hold"}), pbs_->options());
    ASSERT_TRUE(following.wait_for_output("up\n"));
    EXPECT_EQ(user_->run({"qdel", "1.server"}).status, 0);
    const Outcome outcome = following.wait();
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("1.server: ended with exit code "));
}

TEST_F(PbsBatch, ARefusalOfQsubIsShown) {
    const Outcome outcome = user_->run(submit({"--queue", "nowhere"}, {}, {}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_EQ(outcome.err, "ddprun pbs submit: qsub: Unknown queue\n");
}

TEST_F(PbsBatch, AMissingServerHasItsOwnExitCode) {
    const TemporaryDirectory elsewhere;  // the fake's state lies in the caller's directory
    std::filesystem::create_directory(elsewhere.file("bin"));
    std::filesystem::copy_symlink(pbs_->bin() + "/qsub", elsewhere.file("bin/qsub"));
    const Outcome outcome = run_with_path(elsewhere.file("bin") + ":/usr/bin:/bin", submit({}, {}, {}));
    EXPECT_EQ(outcome.status, 69);
    EXPECT_THAT(outcome.err, HasSubstr("qsub: cannot connect to server"));
}

TEST_F(PbsBatch, AMissingQsubIsReported) {
    const Outcome outcome = run_with_path("/usr/bin:/bin", submit({}, {}, {}));
    EXPECT_EQ(outcome.status, 69);
    EXPECT_THAT(outcome.err, HasSubstr("qsub: not found in PATH"));
    EXPECT_FALSE(std::filesystem::exists(user_->file("job.pbs"))) << "nothing is left behind";
}

TEST_F(PbsBatch, AProgramThatIsNotThereIsRefusedBeforeTheQueue) {
    const Outcome outcome = user_->run({path_of("DDPRUN"), "pbs", "submit", "nosuch.py"});
    EXPECT_EQ(outcome.status, 127);
    EXPECT_THAT(outcome.err, HasSubstr("ddprun pbs submit: nosuch.py: "));
    EXPECT_FALSE(std::filesystem::exists(user_->file("nosuch.pbs")));
    EXPECT_EQ(state_of("1.server"), "");
}

TEST_F(PbsBatch, AScriptThatIsNotOursIsNotWrittenOver) {
    std::ofstream(user_->file("job.pbs")) << "#!/bin/bash\n./mine\n";
    const Outcome outcome = user_->run(submit({}, {}, {}));
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err, HasSubstr("exists and was not written by ddprun; give another --file"));
    EXPECT_EQ(file_content(user_->file("job.pbs")), "#!/bin/bash\n./mine\n");
}

TEST_F(PbsBatch, AnUnknownJobIsReported) {
    const Outcome outcome = user_->run({path_of("DDPRUN"), "pbs", "status", "77"});
    EXPECT_EQ(outcome.status, 69);
    EXPECT_THAT(outcome.err, HasSubstr("Unknown Job Id 77"));
}

TEST(BatchExamples, MatchTheProgramsOutput) {
    // The examples are of a ddprun in every shell's PATH.
    const std::string path_line =
        "export PATH=" + std::filesystem::path(path_of("DDPRUN")).parent_path().string() + ":$PATH\n";
    const std::pair<std::string, Words> examples[] = {
        {"any.pbs",
         {"--nodes", "3", "--cpus-per-node", "2", "--walltime", "10m", "--", "--nproc-per-node=2", "train"}},
        {"train.pbs",
         {"--site", "derecho", "--nodes", "2", "--walltime", "1h", "--account", "PROJ0001", "train",
          "--device", "cuda", "--epochs", "10"}},
        {"multinode_basic.pbs",
         {"--site", "polaris", "--walltime", "30m", "--queue", "debug", "--account", "PROJ0001", "--requeue",
          "auto", "--file", "multinode_basic.pbs", "--", "--walltime-notice=3m",
          "build/examples/multinode_basic", "--total_epochs", "10", "--save_every", "1"}}};
    const TemporaryDirectory directory;
    RunOptions options;
    options.directory = directory.path();
    for (const auto& [name, words] : examples) {
        Outcome outcome = run(joined({{path_of("DDPRUN"), "pbs", "script"}, words}), options);
        if (std::filesystem::exists(directory.file(name))) outcome.out = file_content(directory.file(name));
        const std::size_t at = outcome.out.find(path_line);
        ASSERT_NE(at, std::string::npos) << outcome.out;
        EXPECT_EQ(outcome.out.erase(at, path_line.size()),
                  file_content(path_of("SOURCE_ROOT") + "/pbs/" + name))
            << outcome.err;
    }
}

// ---- jobs that go back into the queue

/// The first run holds until it is stopped; the next does not. When the first can end before its worker has
/// begun, the job's script makes the file in the second run.
Words for_two_runs(const std::string& directory) {
    return {"on",      "15",   "0",   "once", directory + "/first", "say",
            "holding", "hold", "end", "say",  "second run"};
}
const Words kHolding = {"on", "15", "0", "say", "holding", "hold"};
const Words kSelf = {"--walltime=1h", "--requeue=self"};

TEST_F(PbsBatch, AJobWhoseTimeIsUpSubmitsItsScriptAgain) {
    const Outcome first = user_->run(
        submit(joined({kSelf, {"--setup", "[ $PBS_JOBID = 1.server ] || touch " + user_->file("first")}}),
               {"--walltime-notice=3599s"}, for_two_runs(user_->directory())));
    EXPECT_EQ(first.status, 75) << first.err << first.out;
    EXPECT_THAT(first.out,
                AllOf(HasSubstr("walltime in "),
                      HasSubstr("putting the job back into the queue: its time is up; run 2 of at most 11"),
                      HasSubstr("the next run is job 2.server")));
    EXPECT_FALSE(std::filesystem::exists(user_->file("ddprun-1.server.json")))
        << "the file goes to the next run";

    const Outcome second = status("2.server");
    EXPECT_EQ(second.status, 0) << second.err << second.out;
    EXPECT_THAT(second.out, AllOf(HasSubstr("run 2 of job 2.server"), HasSubstr("second run\n")));
    EXPECT_FALSE(std::filesystem::exists(user_->file("ddprun-2.server.json"))) << "there is no third";
    EXPECT_EQ(state_of("3.server"), "");
}

TEST_F(PbsBatch, AJobThatIsDeletedDoesNotComeBack) {
    Program following(submit(kSelf, {}, {"on", "15", "0", "say", "up", "hold"}), pbs_->options());
    ASSERT_TRUE(following.wait_for_output("up\n"));
    EXPECT_EQ(user_->run({"qdel", "1.server"}).status, 0);
    EXPECT_THAT(following.wait().out,
                HasSubstr("not put back into the queue: it was stopped by SIGTERM, not by its walltime"));
    EXPECT_EQ(state_of("2.server"), "");
}

TEST_F(PbsBatch, AStopFileEndsTheChain) {
    std::ofstream(user_->file("ddprun.stop")) << "";
    const Outcome outcome = drained(submit(kSelf, {}, kHolding));
    EXPECT_EQ(outcome.status, 75);
    EXPECT_THAT(outcome.out,
                HasSubstr("not put back into the queue: " + user_->file("ddprun.stop") + " is there"));
    EXPECT_EQ(state_of("2.server"), "");
}

TEST_F(PbsBatch, TheLimitEndsTheChain) {
    EXPECT_THAT(drained(submit(kSelf, {"--requeue-limit=1"}, kHolding)).out, HasSubstr("run 2 of at most 2"));
    const Outcome second = drained({path_of("DDPRUN"), "pbs", "status", "2.server"});
    EXPECT_EQ(second.status, 75);
    EXPECT_THAT(second.out,
                HasSubstr("not put back into the queue: all 1 requeues are used up (--requeue-limit)"));
    EXPECT_THAT(file_content(user_->file("ddprun-2.server.json")),
                AllOf(HasSubstr("\"first_job\": \"1.server\""), HasSubstr("\"run\": 2"),
                      HasSubstr("\"phase\": \"ended\"")));
    EXPECT_EQ(state_of("3.server"), "");
}

TEST_F(PbsBatch, AJobThatPbsRunsAgainGoesOnCounting) {
    Program following(submit(kSelf, {}, for_two_runs(user_->directory())), pbs_->options());
    ASSERT_TRUE(following.wait_for_output("run 1 of job 1.server") && following.wait_for_output("holding\n"));
    EXPECT_EQ(user_->run({"qrerun", "1.server"}).status, 0);
    const Outcome outcome = following.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_THAT(outcome.out, HasSubstr("run 2 of job 1.server"));
}

TEST_F(PbsBatch, ARefusalOfQsubInAJobIsShown) {
    const std::string bin = user_->file("bin");
    std::filesystem::create_directory(bin);
    std::ofstream(bin + "/qsub") << "#!/bin/sh\necho 'qsub: not allowed on compute nodes' >&2\nexit 1\n";
    std::filesystem::permissions(bin + "/qsub", std::filesystem::perms::owner_all);
    const Outcome outcome =
        drained(submit(joined({kSelf, {"--setup", "export PATH=" + bin + ":$PATH"}}), {}, kHolding));
    EXPECT_EQ(outcome.status, 75);
    EXPECT_THAT(outcome.out, HasSubstr("the job could not be put back: qsub: not allowed on compute nodes"));
    EXPECT_THAT(file_content(user_->file("ddprun-1.server.json")), HasSubstr("\"phase\": \"ended\""));
}

/// A job script of the user's own.
TEST_F(PbsBatch, RequeueSelfRefusesTheStartWhenItIsImpossible) {
    const std::string start = path_of("DDPRUN") + " --requeue=self ";
    const std::string none = user_->output_of(user_->submit(start + path_of("PROBE") + " say ran"));
    EXPECT_THAT(none, AllOf(HasSubstr("--requeue=self: PBS keeps a copy of the job script only"),
                            Not(HasSubstr("ran\n"))));
    std::filesystem::remove(user_->file("out"));
    const std::string missing =
        user_->output_of(user_->submit(start + "--requeue-script=nowhere " + path_of("PROBE") + " say ran"));
    EXPECT_THAT(missing, AllOf(HasSubstr("--requeue-script: " + user_->file("nowhere") + ": No such file"),
                               Not(HasSubstr("ran\n"))));
    const Outcome here = run({path_of("DDPRUN"), "--requeue=self", path_of("PROBE"), "say", "ran"});
    EXPECT_EQ(here.status, 64);
    EXPECT_THAT(here.err, HasSubstr("--requeue=self: this is no job of PBS or Slurm"));
}

TEST(SlurmSubmit, ExpeditesARequeueWhenSbatchCan) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("sbatch"))
        << "#!/bin/sh\n[ \"$1\" = --version ] && { echo slurm $SAID; exit; }\necho \"$*\" >>"
        << directory.file("called") << "\necho 17\n";
    std::filesystem::permissions(directory.file("sbatch"), std::filesystem::perms::owner_all);
    for (const char* version : {"25.11.0", "25.05.0"}) {
        RunOptions options =
            with_environment({"PATH=" + directory.path() + ":/usr/bin:/bin", std::string("SAID=") + version});
        options.directory = directory.path();
        const Outcome outcome =
            run({path_of("DDPRUN"), "slurm", "submit", "--no-follow", "--name=t", "--requeue=self", "train"},
                options);
        EXPECT_EQ(outcome.out, "17\n") << outcome.err;
    }
    EXPECT_EQ(file_content(directory.file("called")), "--parsable --requeue=expedite " +
                                                          directory.file("t.slurm") + "\n--parsable " +
                                                          directory.file("t.slurm") + "\n");
}

TEST(Requeue, AutoOutsideAJobIsSilent) {
    RunOptions options;
    options.unset = {"PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID"};
    const Outcome outcome =
        run({path_of("DDPRUN"), "--requeue=auto", path_of("PROBE"), "say", "ran"}, options);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(said_of_its_own_job(outcome), "");
}

TEST(Walltime, AnEndThatMovesWhileTheJobRunsIsLoggedAndMovesTheNotice) {
    const TemporaryDirectory directory;
    // The first answer leaves ten seconds before the notice, later ones two hours.
    std::ofstream(directory.file("squeue"))
        << "#!/bin/sh\nleft=7200\n[ -e " << directory.file("asked") << " ] || left=3610\n: >"
        << directory.file("asked") << "\necho $(($(date +%s) + left))\n";
    std::filesystem::permissions(directory.file("squeue"), std::filesystem::perms::owner_all);
    RunOptions options = with_environment({"PATH=" + directory.path() + ":/usr/bin:/bin", "SLURM_JOB_ID=7"});
    options.unset = {"SLURM_JOB_END_TIME"};
    Program job(ddprun_probe({"--standalone", "--walltime-notice=3600s"},
                             {"await", directory.file("go"), "say", "done"}),
                options);
    EXPECT_TRUE(job.wait_for_output("the end of the walltime has changed: in 2 h (before: in "));
    std::ofstream(directory.file("go")) << "";
    const Outcome outcome = job.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("walltime in ")));
    EXPECT_EQ(occurrences(outcome.err, "has changed"), 1);
}

// ---- Slurm

class SlurmBatch : public OnSlurm<1> {
  protected:
    /// `ddprun slurm submit` on the first host, in a directory of its own.
    static Outcome submit(const std::string& name, const Words& options, const Words& ddprun_options,
                          const Words& acts) {
        return slurm_->run(joined({{path_of("DDPRUN"), "slurm", "submit", "--file", file(name + ".slurm"),
                                    "--name", name, "--output", file(name + ".log")},
                                   options,
                                   {"--"},
                                   ddprun_options,
                                   {path_of("PROBE")},
                                   acts}));
    }
    static std::string file(const std::string& name) { return hosts_->home() + "/" + name; }
};

TEST_F(SlurmBatch, SubmitShowsStateAndLogAndEndsAsTheJob) {
    const Outcome outcome = submit("fails", {}, {"--nproc-per-node=2"},
                                   {"say", "hello", "rank", "1", "exit", "3", "end", "hold"});
    EXPECT_EQ(outcome.status, 3) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("hello\n"), HasSubstr("rank 1 on node00: exit code 3")));
    EXPECT_THAT(outcome.err, HasSubstr(": ended with exit code 3"));
}

TEST_F(SlurmBatch, ARefusalOfSbatchIsShown) {
    const Outcome outcome = submit("refused", {"--partition", "nowhere"}, {}, {});
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("ddprun slurm submit: sbatch: "), HasSubstr("nvalid partition")));
}

TEST_F(SlurmBatch, ACancelledJobIsNoSuccess) {
    const Outcome submitted = submit("cancelled", {"--no-follow"}, {}, {"say", "up", "hold"});
    const std::string id(trim(submitted.out));
    ASSERT_TRUE(slurm_->await_text("cancelled.log", "up")) << submitted.err;
    EXPECT_EQ(slurm_->run({"scancel", id}).status, 0);
    const Outcome outcome = slurm_->run({path_of("DDPRUN"), "slurm", "status", id});
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("(CANCELLED)"));
}

TEST_F(SlurmBatch, ANoticeComesBeforeSqueuesEnd) {
    const Outcome outcome =
        submit("noticed", {"--walltime=1h"}, {"--walltime-notice=3599s"}, {"on", "15", "0", "hold"});
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("walltime in ")) << outcome.err;
}

TEST_F(SlurmBatch, AJobWhoseTimeIsUpIsRunAgainAndFollowed) {
    const Outcome submitted =
        submit("again",
               {"--no-follow", "--walltime=1h", "--requeue=self", "--setup",
                "[ -z \"$SLURM_RESTART_COUNT\" ] || touch " + file("again.first")},
               {"--walltime-notice=3595s"},
               {"on", "15", "0", "once", file("again.first"), "hold", "end", "say", "second run"});
    const std::string id(trim(submitted.out));
    Program following(hosts_->command(0, {path_of("DDPRUN"), "slurm", "status", id}));
    ASSERT_TRUE(following.wait_for_output("putting the job back into the queue")) << submitted.err;
    const Outcome outcome = following.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("putting the job back into the queue: its time is up; run 2 of at most 11"),
                      HasSubstr("run 2 of job "), HasSubstr("second run\n")));
}

TEST_F(SlurmBatch, AnElementOfAnArrayIsRunAgainAlone) {
    // Both end at once; the last one's number is also the array's.
    const std::string start = "[ -z \"$SLURM_RESTART_COUNT\" ] || touch element$SLURM_ARRAY_TASK_ID\nexec " +
                              path_of("DDPRUN") + " --requeue=self ";
    const std::string acts =
        " on 15 0 once element$SLURM_ARRAY_TASK_ID hold end say \"again $SLURM_ARRAY_TASK_ID\"";
    const std::string array =
        slurm_->submit("notice=; [ $SLURM_ARRAY_TASK_ID = 1 ] || notice=--walltime-notice=3595s\n" + start +
                           "$notice " + path_of("PROBE") + acts,
                       {"--array=1-2", "--time=60", "--open-mode=append", "--output=element.%a"});
    const std::string last = array + "_2";
    ASSERT_TRUE(slurm_->await_text("element.2", "putting the job back into the queue"))
        << file_content(file("element.2"));
    EXPECT_TRUE(slurm_->await_text("element.2", "again 2")) << file_content(file("element.2"));
    EXPECT_THAT(file_content(file("element.2")), HasSubstr("run 2 of job " + last));
    EXPECT_EQ(slurm_->await_state(array + "_1", {"RUNNING"}), "RUNNING") << "the other one is left alone";
    EXPECT_TRUE(std::filesystem::exists(file("ddprun-" + array + "_1.json")));
    EXPECT_EQ(slurm_->run({"scancel", array}).status, 0);
}

}  // namespace
}  // namespace ddprun::test
