// Claims about PBS that ddprun relies on. They are tried on the fake that other suites use; with
// DDPRUN_TEST_PBS=1 on the PBS whose commands are in PATH (three hosts that share the home directory; the
// user may rerun jobs).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <set>
#include <sstream>

#include "tests/support/pbs_hosts.h"
#include "tests/support/pbs_user.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Pbs : public ::testing::Test {
  protected:
    void SetUp() override {
        if (!wants_real_pbs()) {
            if (const auto reason = PbsHosts::why_not()) GTEST_SKIP() << *reason;
            hosts_ = std::make_unique<Hosts>(3);
            PbsHosts::Settings settings;
            settings.kill_delay = 2s;
            fake_ = std::make_unique<PbsHosts>(*hosts_, settings);
        }
        user_ = std::make_unique<PbsUser>(fake_ ? fake_->options() : real_pbs());
    }
    void TearDown() override {
        if (wants_real_pbs() && user_) std::filesystem::remove_all(user_->directory());
    }
    /// Arguments of qsub for two MPI processes on each of three hosts.
    static std::vector<std::string> on_three_hosts(const std::vector<std::string>& arguments = {}) {
        std::vector<std::string> all{"-l", "select=3:ncpus=1:mpiprocs=2", "-l", "place=scatter"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        return all;
    }
    /// The output of a job of that script.
    std::string output_of(const std::string& script, const std::vector<std::string>& arguments = {}) {
        return user_->output_of(user_->submit(script, on_three_hosts(arguments)));
    }

    std::unique_ptr<Hosts> hosts_;
    std::unique_ptr<PbsHosts> fake_;
    std::unique_ptr<PbsUser> user_;
};

TEST_F(Pbs, TheScriptIsACopyThatRunsInTheHomeDirectoryBelowALoginShell) {
    const std::string id = user_->submit("");
    std::ofstream(user_->file("job.sh"))
        << "#!/bin/bash\npwd; echo script $0; ps -o sid=,ppid= -p $$; ps -o args= -p $PPID; cat; echo end\n";
    const Outcome submitted =
        user_->run({"qsub", "-j", "oe", "-o", user_->file("own"), "-N", "name", "job.sh"});
    ASSERT_EQ(submitted.status, 0) << submitted.err;
    (void)user_->await_state(std::string(trim(submitted.out)), "F");
    const std::string out = file_content(user_->file("own"));
    EXPECT_THAT(out, Not(HasSubstr("script " + user_->file("job.sh"))));
    std::istringstream lines(out);
    std::string directory, word, script, session, parent, shell;
    lines >> directory >> word >> script >> session >> parent >> shell;
    EXPECT_EQ(directory, hosts_ ? hosts_->home() : std::getenv("HOME"));
    EXPECT_EQ(session, parent) << out;
    EXPECT_THAT(shell, HasSubstr("bash"));
    EXPECT_THAT(out, EndsWith("end\n")) << "its input has an end";
}

TEST_F(Pbs, TheNodeFileHasALineForEachMpiProcessInTheOrderOfTheChunks) {
    std::istringstream out(output_of("cat $PBS_NODEFILE"));
    std::vector<std::string> lines;
    for (std::string line; out >> line;) lines.push_back(line);
    ASSERT_EQ(lines.size(), 6U);
    for (std::size_t i = 0; i < 6; i += 2) EXPECT_EQ(lines[i], lines[i + 1]);
    EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()).size(), 3U);
}

TEST_F(Pbs, TheScriptKnowsItsJob) {
    const std::string out = output_of("env", {"-N", "some_name", "-v", "WORD=given"});
    for (const char* variable :
         {"PBS_JOBID=", "PBS_JOBCOOKIE=", "PBS_QUEUE=", "PBS_O_HOST=", "PBS_O_PATH=", "NCPUS=1",
          "OMP_NUM_THREADS=1", "PBS_NODEFILE=", "PBS_NODENUM=0", "PBS_TASKNUM=1", "PBS_JOBNAME=some_name",
          "PBS_ENVIRONMENT=PBS_BATCH", "TMPDIR=", "WORD=given"}) {
        EXPECT_THAT("\n" + out, HasSubstr("\n" + std::string(variable)));
    }
    EXPECT_THAT(out, HasSubstr("PBS_O_WORKDIR=" + user_->directory() + "\n"));
}

TEST_F(Pbs, TasksOfPbsdshGetNoEnvironmentDirectoryOrInputOfTheCaller) {
    const std::string out = output_of(
        "export WORD=from-the-script; echo from the script | pbsdsh -n 2 -- /bin/sh -c 'pwd; env; cat; echo end'");
    EXPECT_THAT(out, Not(HasSubstr("from")));
    EXPECT_THAT(out, StartsWith((hosts_ ? hosts_->home() : std::string(std::getenv("HOME"))) + "\n"));
    EXPECT_THAT(out, AllOf(HasSubstr("PBS_JOBID="), HasSubstr("PBS_NODENUM=1"),
                           HasSubstr("PATH=/bin:/usr/bin\n"), EndsWith("end\n")));
}

TEST_F(Pbs, TheCookieIsTheSameInEveryTaskAndTheNodeNumberCountsHosts) {
    const std::string out =
        output_of("echo c=$PBS_JOBCOOKIE; pbsdsh -- /bin/sh -c 'echo c=$PBS_JOBCOOKIE n=$PBS_NODENUM.'");
    const std::string cookie = out.substr(0, out.find('\n'));
    EXPECT_GT(cookie.size(), 20U);
    EXPECT_EQ(occurrences(out, cookie), 7) << out;
    for (const char* number : {"n=0.", "n=1.", "n=2."}) EXPECT_EQ(occurrences(out, number), 2) << out;
}

TEST_F(Pbs, TheNodeFileIsUnknownToTasksOnTheFirstHostOnly) {
    const std::string out = output_of("pbsdsh -- /bin/sh -c 'echo n=$PBS_NODENUM ${PBS_NODEFILE:+known}.'");
    EXPECT_EQ(occurrences(out, "n=0 ."), 2) << out;
    EXPECT_EQ(occurrences(out, "known."), 4) << out;
}

TEST_F(Pbs, PbsdshRunsOneTaskForEachLineOrForOneLine) {
    const std::string out =
        output_of("pbsdsh -- /bin/uname -n; echo one; pbsdsh -n 4 -- /bin/uname -n; sed -n 5p $PBS_NODEFILE");
    const std::size_t one = out.find("one\n");
    EXPECT_EQ(sorted_lines(out.substr(0, one)).size(), 6U) << out;
    const std::vector<std::string> fifth = sorted_lines(out.substr(one + 4));
    ASSERT_EQ(fifth.size(), 2U) << out;
    EXPECT_THAT(fifth[0], StartsWith(fifth[1].substr(0, fifth[1].find('.'))));
}

TEST_F(Pbs, PbsdshSucceedsWhateverItsTasksDoAndWritesTheirCodes) {
    const TemporaryDirectory empty;
    const std::string out = output_of("pbsdsh -n 0 -- /bin/sh -c 'exit 7'; echo code $?; pbsdsh -n 2 -- " +
                                      empty.file("none") + "; echo code $?");
    EXPECT_EQ(occurrences(out, "code 0\n"), 2) << out;
    EXPECT_THAT(out, AllOf(HasSubstr("exit status 7"), HasSubstr("exit status 254")));
}

TEST_F(Pbs, PbsTmrshUsesNoShellAndReturnsTheCode) {
    const std::string out = output_of(
        "host=$(tail -1 $PBS_NODEFILE); pbs_tmrsh $host /bin/echo '$HOME *'; echo code $?; pbs_tmrsh $host /bin/sh -c 'exit 7'; echo code $?;"
        "pbs_tmrsh $host /bin/sh -c 'kill -9 $$'; echo code $?; pbs_tmrsh no-such-host /bin/true; echo code $?");
    EXPECT_THAT(out, HasSubstr("$HOME *\n"));
    for (const char* code : {"code 0\n", "code 7\n", "code 9\n", "code 255\n"})
        EXPECT_EQ(occurrences(out, code), 1) << out;
}

TEST_F(Pbs, QdelSendsSigtermToEveryProcessOfTheJobOnAllHosts) {
    // The processes report by files (see the next claim) that they make without a child, which would get the
    // signal, too.
    const auto saves = [&](const std::string& who) {
        return "/bin/sh -c 'trap : PIPE; trap \": >" + user_->file(who) +
               "; exit 0\" TERM; echo up; while :; do sleep 0.05; done' &\n";
    };
    const std::string id = user_->submit("set -m\npbsdsh -n 2 -- " + saves("task.1") + "pbsdsh -n 4 -- " +
                                             saves("task.2") + saves("group.0") +
                                             "until [ $(grep -c '^up' out) = 3 ]; do sleep 0.05; done\n"
                                             "touch all_up; wait; wait; sleep 60",
                                         on_three_hosts({"-k", "doe"}));
    ASSERT_TRUE(user_->await_file("all_up")) << file_content(user_->file("out"));
    EXPECT_EQ(user_->run({"qdel", id}).status, 0);
    EXPECT_EQ(user_->await_state(id, "F")["Exit_status"], 271);
    for (const char* who : {"task.1", "task.2", "group.0"})
        EXPECT_TRUE(user_->await_file(who)) << who << file_content(user_->file("out"));
}

TEST_F(Pbs, TheOutputOfTasksOnOtherHostsGoesToTheJobsOutputAndNotToThatOfPbsdshOrPbsTmrsh) {
    const std::string out = output_of(
        "host=$(tail -1 $PBS_NODEFILE); (pbsdsh -n 2 -- /bin/echo by pbsdsh; pbs_tmrsh $host /bin/echo by tmrsh) >mine; echo mine: $(cat mine)");
    EXPECT_THAT(out, AllOf(HasSubstr("by pbsdsh\n"), HasSubstr("by tmrsh\n"), HasSubstr("mine:\n")));
}

TEST_F(Pbs, TheStandardOutputOfTasksOnOtherHostsBreaksAtQdel) {
    const std::string id = user_->submit("pbsdsh -n 2 -- /bin/sh -c 'trap \": >" + user_->file("asked") +
                                             "\" TERM; trap : PIPE; echo up;"
                                             "while [ ! -e " +
                                             user_->file("asked") +
                                             " ]; do sleep 0.05; done;"
                                             "while echo late 2>/dev/null; do sleep 0.05; done; : >" +
                                             user_->file("broken") + "' &\n" + path_of("PROBE") +
                                             " ignore 15 await " + user_->file("broken") + " say kept",
                                         on_three_hosts({"-k", "doe"}));
    ASSERT_TRUE(user_->await_output("up"));
    EXPECT_EQ(user_->run({"qdel", id}).status, 0);
    EXPECT_TRUE(user_->await_file("broken"));
    EXPECT_THAT(user_->output_of(id), HasSubstr("kept")) << "the first host's stays";
}

TEST_F(Pbs, AJobWhoseScriptIsGoneLivesOnThroughTheGraceOfQdel) {
    const std::string id =
        user_->submit(path_of("PROBE") + " ignore 15 say up sleep 1000 say saved exit 0", {"-k", "doe"});
    ASSERT_TRUE(user_->await_output("up"));
    EXPECT_EQ(user_->run({"qdel", id}).status, 0);
    EXPECT_THAT(user_->output_of(id), HasSubstr("saved"));
}

TEST_F(Pbs, AProcessThatIgnoresSigtermIsKilledAfterTheKillDelay) {
    const std::string id = user_->submit(path_of("PROBE") + " ignore 15 say up hold", {"-k", "doe"});
    ASSERT_TRUE(user_->await_output("up"));
    EXPECT_EQ(user_->run({"qdel", id}).status, 0);
    EXPECT_FALSE(user_->await_state(id, "F").is_null());
}

TEST_F(Pbs, TasksOnOtherHostsAreKilledWhenTheFirstHasNoProcessLeft) {
    // The task runs longer than the test waits.
    const std::string id = user_->submit("pbsdsh -n 2 -- " + path_of("PROBE") +
                                             " ignore 15 say up sleep 600000 & "
                                             "until grep -q '^up' out 2>/dev/null; do sleep 0.05; done",
                                         on_three_hosts({"-k", "doe"}));
    EXPECT_FALSE(user_->await_state(id, "F").is_null());
}

TEST_F(Pbs, TheWalltimeIsEnforcedLateAndShowsInTheStatusAndTheOutput) {
    const std::string id = user_->submit("sleep 600", {"-l", "walltime=1"});
    const Json job = user_->await_state(id, "F");
    EXPECT_EQ(job["Exit_status"], -29) << job;
    EXPECT_THAT(user_->output_of(id), HasSubstr("=>> PBS: job killed: walltime "));
}

TEST_F(Pbs, QstatShowsTheHostsAndTheWalltimeOfAJob) {
    const std::string id = user_->submit("touch up; sleep 600", on_three_hosts({"-l", "walltime=00:10:00"}));
    ASSERT_TRUE(user_->await_file("up"));
    const Json told = parse_json(user_->run({"qstat", "-f", "-F", "json", id}).out).value_or(Json());
    EXPECT_TRUE(told["timestamp"].is_number_integer());
    const Json& job = told["Jobs"][id];
    EXPECT_EQ(job["job_state"].get<std::string>(), "R");
    EXPECT_EQ(job["Resource_List"]["walltime"].get<std::string>(), "00:10:00");
    EXPECT_EQ(job["Rerunable"].get<std::string>(), "True");
    EXPECT_EQ(job["run_count"], 1);
    EXPECT_EQ(occurrences(job["exec_vnode"].get<std::string>(), ":ncpus=1"), 3) << job;
    EXPECT_EQ(occurrences(job["exec_host"].get<std::string>(), "+"), 2) << job;
    EXPECT_FALSE(job["stime"].get<std::string>().empty());
    EXPECT_TRUE(job.contains("substate"));
    user_->run({"qdel", id});
    EXPECT_FALSE(user_->await_state(id, "F").is_null());
    const Outcome finished = user_->run({"qstat", id});
    EXPECT_EQ(finished.status, 35);
    EXPECT_THAT(finished.err, HasSubstr("Job has finished"));
    EXPECT_EQ(user_->run({"qstat", "999999"}).status, 153);
}

TEST_F(Pbs, QsubRefusesAnUnknownQueueAndAnUnsetVariable) {
    const Outcome queue = user_->run({"qsub", "-q", "no_such_queue"}, "true\n");
    EXPECT_EQ(queue.status, 170);
    EXPECT_THAT(queue.err, HasSubstr("Unknown queue"));
    const Outcome variable = user_->run({"qsub", "-v", "NO_SUCH_VARIABLE"}, "true\n");
    EXPECT_NE(variable.status, 0);
    EXPECT_THAT(variable.err, HasSubstr("cannot send environment"));
}

TEST_F(Pbs, AJobThatIsRunAgainKeepsItsIdAndItsOutput) {
    const std::string id = user_->submit(
        "[ -e first ] && { echo second run $PBS_JOBID; exit 0; }; echo first run; touch first; sleep 600");
    ASSERT_TRUE(user_->await_file("first"));
    const Outcome rerun = user_->run({"qrerun", id});
    if (rerun.status == 159) GTEST_SKIP() << "this user may not rerun jobs";
    EXPECT_EQ(rerun.status, 0) << rerun.err;
    EXPECT_THAT(user_->output_of(id), AllOf(HasSubstr("first run\n"), HasSubstr("second run " + id)));
    EXPECT_EQ(user_->status(id)["run_count"], 2);
}

TEST_F(Pbs, AnArraysJobsAreKnownByTheirIndexInBrackets) {
    const std::string id = user_->submit("echo $PBS_ARRAY_INDEX $PBS_ARRAY_ID >$PBS_JOBID", {"-J", "1-2"});
    EXPECT_THAT(id, HasSubstr("[]."));
    const std::string number = id.substr(0, id.find('[')), server = id.substr(id.find(']') + 1);
    for (const char* index : {"1", "2"}) {
        const std::string name = number + "[" + index + "]" + server;
        ASSERT_TRUE(user_->await_file(name));
        (void)user_->await_state(name, "F");
        EXPECT_EQ(file_content(user_->file(name)), std::string(index) + " " + id + "\n");
    }
}

TEST_F(Pbs, OutputIsNamedAfterTheScriptOrInAGivenDirectoryAfterTheJob) {
    const std::string id = user_->submit("");
    (void)user_->await_state(id, "F");
    std::filesystem::create_directory(user_->file("outputs"));
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"qsub", "-o", "outputs", "-j", "oe", "job.sh"},
          {"qsub", "-j", "oe", "job.sh"}}) {
        const std::string next(trim(user_->run(command).out));
        (void)user_->await_state(next, "F");
        const bool is_in_directory = command[1] == "-o";
        EXPECT_TRUE(user_->await_file(is_in_directory ? "outputs/" + next + ".OU"
                                                      : "job.sh.o" + next.substr(0, next.find('.'))))
            << next;
    }
}

TEST_F(Pbs, AJobThatIsAProgramHasTheSystemsPathAndTheSubmittersInAVariable) {
    const Outcome submitted = user_->run({"qsub", "-j", "oe", "-o", user_->file("own"), "--", "/bin/sh", "-c",
                                          "echo path $PATH; echo from $PBS_O_PATH"});
    ASSERT_EQ(submitted.status, 0) << submitted.err;
    (void)user_->await_state(std::string(trim(submitted.out)), "F");
    const Outcome submitters = user_->run({"sh", "-c", "echo from $PATH"});
    EXPECT_EQ(file_content(user_->file("own")), "path /bin:/usr/bin\n" + submitters.out);
}

TEST_F(Pbs, AJobCanSubmitTheNextOneWhichWaitsForItsEnd) {
    const std::string id = user_->submit(
        "[ \"$GEN\" = 2 ] && { touch second; exit 0; }; qsub -W depend=afterany:$PBS_JOBID -v GEN=2 job.sh; sleep 0.3; touch first");
    ASSERT_TRUE(user_->await_file("second"));
    EXPECT_TRUE(std::filesystem::exists(user_->file("first")));
}

}  // namespace
}  // namespace ddprun::test
