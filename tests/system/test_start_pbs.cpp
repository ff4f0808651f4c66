// ddprun as the last line of a PBS job's script, over three hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/pbs_hosts.h"
#include "tests/support/pbs_user.h"
#include "tests/support/ssh_hosts.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class StartPbs : public ::testing::Test {
  protected:
    void SetUp() override {
        if (const auto reason = PbsHosts::why_not()) GTEST_SKIP() << *reason;
        hosts_.emplace(3);
        pbs_.emplace(*hosts_);
        user_.emplace(pbs_->options());
    }
    /// A job whose script's last line is ddprun with a probe; its output can be read while it runs.
    std::string submit(const std::string& options, const std::string& acts,
                       const std::vector<std::string>& more = {}) {
        return submit_command(path_of("DDPRUN") + " " + options + " " + path_of("PROBE") + " " + acts, more);
    }
    std::string submit_command(const std::string& command, const std::vector<std::string>& more = {}) {
        std::vector<std::string> arguments{"-k", "doe",          "-l", "select=3:ncpus=4:mpiprocs=2",
                                           "-l", "place=scatter"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return user_->submit("export PROBE_JOB=" + mark_ + "\nexec " + command, arguments);
    }
    bool await_ranks(int count, const std::string& text) {
        for (int rank = 0; rank < count; ++rank) {
            if (!user_->await_output("[" + std::to_string(rank) + "]: " + text)) return false;
        }
        return true;
    }
    std::string output() { return file_content(user_->file("out")); }
    int exit_status_of(const std::string& id) {
        return user_->await_state(id, "F")["Exit_status"].get<int>();
    }

    const std::string mark_ = unique_name("pbs");
    std::optional<Hosts> hosts_;
    std::optional<PbsHosts> pbs_;
    std::optional<PbsUser> user_;
};

TEST_F(StartPbs, TheLastLineOfAScriptRunsOnAllHostsOfTheAllocation) {
    const std::string id =
        submit("--nproc-per-node=2", "env RANK env WORLD_SIZE env GROUP_RANK env MASTER_ADDR cwd");
    EXPECT_EQ(exit_status_of(id), 0) << output();
    for (const char* line : {"[0]: RANK=0\n", "[5]: RANK=5\n", "[5]: WORLD_SIZE=6\n", "[3]: GROUP_RANK=1\n",
                             "[4]: GROUP_RANK=2\n", "[5]: MASTER_ADDR=node00\n"}) {
        EXPECT_THAT(output(), HasSubstr(line));
    }
    EXPECT_THAT(output(), HasSubstr("[5]: " + user_->directory() + "\n"))
        << "tasks of pbsdsh begin in the home directory";
    EXPECT_THAT(output(), AllOf(HasSubstr("PBS job " + id), HasSubstr("3 hosts"), HasSubstr("pbsdsh")));
}

TEST_F(StartPbs, WorkersOnOtherHostsHaveTheScriptsEnvironment) {
    const std::string id = submit("--nproc-per-node=1", "env WORD env PBS_JOBID");
    EXPECT_EQ(exit_status_of(id), 0) << output();
    EXPECT_EQ(occurrences(output(), "PBS_JOBID=" + id + "\n"), 3) << output();
    const std::string with_word = user_->submit("export WORD='from the script'\nexec " + path_of("DDPRUN") +
                                                    " --nproc-per-node=1 " + path_of("PROBE") + " env WORD",
                                                {"-l", "select=2:ncpus=1", "-l", "place=scatter"});
    EXPECT_THAT(user_->output_of(with_word), HasSubstr("[1]: WORD=from the script\n"));
}

TEST_F(StartPbs, AFailureOnAnotherHostIsTheJobsExitStatus) {
    const std::string id = submit("--nproc-per-node=2", "rank 5 err 'cannot go on' exit 17 end hold");
    EXPECT_EQ(exit_status_of(id), 17) << output();
    EXPECT_THAT(output(), AllOf(HasSubstr("rank 5 on node02"), HasSubstr("cannot go on")));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartPbs, TheLinesOfAllHostsComeOutOfDdprunsOwnStandardStreams) {
    for (const char* starter : {"pbsdsh", "tm"}) {
        const std::string mine = user_->file(starter);
        const std::string id = submit_command(
            path_of("DDPRUN") + " --start=" + starter + " --nproc-per-node=2 " + path_of("PROBE") +
            " say said err complained >" + mine + ".out 2>" + mine + ".err");
        EXPECT_EQ(exit_status_of(id), 0) << output();
        for (int rank = 0; rank < 6; ++rank) {
            const std::string prefix = "[" + std::to_string(rank) + "]: ";
            EXPECT_THAT(file_content(mine + ".out"), HasSubstr(prefix + "said\n"));
            EXPECT_THAT(file_content(mine + ".err"), HasSubstr(prefix + "complained\n"));
        }
        EXPECT_EQ(output(), "") << "PBS's own way";
    }
}

TEST_F(StartPbs, AnElasticJobGoesOnWithoutAHostThatIsLost) {
    const std::string id =
        submit_command(path_of("DDPRUN") +
                       " --nnodes=2:3 --nproc-per-node=1 /bin/sh -c 'echo world of $WORLD_SIZE; "
                       "[ $WORLD_SIZE = 2 ] || exec sleep 1000'");
    ASSERT_TRUE(await_ranks(3, "world of 3")) << output();
    EXPECT_EQ(run(hosts_->command(2, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(exit_status_of(id), 0) << output();
    EXPECT_EQ(occurrences(output(), "world of 2\n"), 2) << output();
}

TEST_F(StartPbs, QdelWhileWorkersSaveLetsAllOfThemSave) {
    const std::string saves =
        "trap \"for i in 1 2 3 4 5; do sleep 0.1; done; echo saved by \\$RANK; exit 0\" TERM; echo up; while :; do sleep 0.05; done";
    const std::string id =
        submit_command(path_of("DDPRUN") + " --nproc-per-node=2 /bin/sh -c '" + saves + "'");
    ASSERT_TRUE(await_ranks(6, "up")) << output();
    EXPECT_EQ(user_->run({"qdel", id}).status, 0);
    EXPECT_EQ(exit_status_of(id), 271);
    for (int rank = 0; rank < 6; ++rank)
        EXPECT_THAT(output(), HasSubstr("saved by " + std::to_string(rank) + "\n"));
    EXPECT_THAT(output(), AllOf(Not(HasSubstr("killing")), HasSubstr("exit code     75")));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartPbs, WorkersSaveBeforeTheEndOfTheWalltime) {
    const std::string id = submit("--nproc-per-node=1 --walltime-notice=995",
                                  "note 15 asked say up noted 15 say saved exit 0", {"-l", "walltime=1000"});
    EXPECT_EQ(exit_status_of(id), 75) << output();
    EXPECT_EQ(occurrences(output(), "]: saved\n"), 3) << output();
}

TEST_F(StartPbs, ARestartTakesTheWorkersOfAllHosts) {
    const std::string id = submit("--nproc-per-node=1 --max-restarts=1",
                                  "rank 2 once " + user_->file("once") + " exit 5 end end rank 0 await " +
                                      user_->file("once") + " end env TORCHELASTIC_RESTART_COUNT");
    EXPECT_EQ(exit_status_of(id), 0) << output();
    for (int rank = 0; rank < 3; ++rank)
        EXPECT_THAT(output(), HasSubstr("[" + std::to_string(rank) + "]: TORCHELASTIC_RESTART_COUNT=1\n"));
}

TEST_F(StartPbs, AKilledHeadLeavesNothingOnAnyHost) {
    const std::string id = submit("--nproc-per-node=2", "ignore 15 say up hold");
    ASSERT_TRUE(await_ranks(6, "up")) << output();
    EXPECT_EQ(run(hosts_->command(0, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(exit_status_of(id), 137) << output();
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartPbs, AKilledDdprunOfAnotherHostEndsTheJobAndLeavesNothing) {
    const std::string id = submit("--nproc-per-node=2", "say up hold");
    ASSERT_TRUE(await_ranks(6, "up")) << output();
    EXPECT_EQ(run(hosts_->command(2, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(exit_status_of(id), 69) << output();
    EXPECT_THAT(output(), HasSubstr("node02"));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartPbs, AHostWithoutDdprunIsNamedWithTheMessageOfPbsdshAndNothingIsLeft) {
    for (const int host : {0, 1})
        ASSERT_EQ(run(hosts_->command(host, {"cp", path_of("DDPRUN"), "/tmp/ddprun"})).status, 0);
    const std::string id =
        submit_command("/tmp/ddprun --nproc-per-node=1 " + path_of("PROBE") + " say started");
    EXPECT_EQ(exit_status_of(id), 69) << output();
    EXPECT_THAT(output(), AllOf(HasSubstr("node02 cannot take part"), HasSubstr("exit status 254"),
                                Not(HasSubstr("]: started"))));
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
}

TEST_F(StartPbs, PbsTmrshStartsTheOthersToo) {
    const std::string id = submit("--start=tm --nproc-per-node=1", "env RANK");
    EXPECT_EQ(exit_status_of(id), 0) << output();
    EXPECT_THAT(output(),
                AllOf(HasSubstr("[2]: RANK=2\n"), HasSubstr("starting ddprun on the other 2 by tm")));
}

TEST_F(StartPbs, ProcessesStartedBySshArePartOfTheJobAndEndWithIt) {
    if (const auto reason = SshHosts::why_not()) GTEST_SKIP() << *reason;
    const SshHosts ssh(*hosts_);
    const std::string id = submit("--start=ssh --nproc-per-node=1", "say up hold");
    ASSERT_TRUE(await_ranks(3, "up")) << output();
    EXPECT_THAT(output(), HasSubstr("starting ddprun on the other 2 by ssh"));
    // A stopped ddprun sees no end of its connections: only PBS can end it, and only as a task.
    ASSERT_EQ(run(hosts_->command(2, {"pkill", "-STOP", "-x", "ddprun"})).status, 0);
    ASSERT_EQ(run(hosts_->command(0, {"pkill", "-9", "-x", "ddprun"})).status, 0);
    EXPECT_EQ(exit_status_of(id), 137) << output();
    EXPECT_TRUE(all_gone("PROBE_JOB=" + mark_));
    EXPECT_NE(run(hosts_->command(2, {"pgrep", "-x", "ddprun"})).status, 0);
}

TEST_F(StartPbs, StandaloneStaysOnTheFirstHost) {
    const std::string id = submit("--standalone --nproc-per-node=2", "env WORLD_SIZE");
    EXPECT_EQ(exit_status_of(id), 0) << output();
    EXPECT_EQ(occurrences(output(), "WORLD_SIZE=2\n"), 2) << output();
}

TEST_F(StartPbs, TwoJobsAtOnceOnTheSameHostsDoNotMeet) {
    const std::string one =
        submit("--nproc-per-node=1", "say up await " + user_->file("go") + " env WORLD_SIZE");
    ASSERT_TRUE(await_ranks(3, "up")) << output();
    const std::string other = user_->submit(
        "exec " + path_of("DDPRUN") + " --nproc-per-node=2 " + path_of("PROBE") + " env WORLD_SIZE",
        {"-o", user_->file("other"), "-l", "select=3:ncpus=4", "-l", "place=scatter"});
    EXPECT_EQ(exit_status_of(other), 0);
    std::ofstream(user_->file("go")).close();
    EXPECT_EQ(exit_status_of(one), 0) << output();
    EXPECT_EQ(occurrences(output(), "WORLD_SIZE=3\n"), 3) << output();
    EXPECT_EQ(occurrences(file_content(user_->file("other")), "WORLD_SIZE=6\n"), 6);
}

TEST_F(StartPbs, TheSecretIsInNoCommandLineNorInTheOutput) {
    const std::string id = submit("--nproc-per-node=1", "say up hold");
    ASSERT_TRUE(await_ranks(3, "up")) << output();
    std::string commands, cookie;
    for (int host = 0; host < 3; ++host) commands += run(hosts_->command(host, {"ps", "-eo", "args="})).out;
    for (const pid_t pid : processes_with("PROBE_JOB=" + mark_)) {
        const std::string environment = file_content("/proc/" + std::to_string(pid) + "/environ");
        const std::size_t at = environment.find("PBS_JOBCOOKIE=");
        if (at != std::string::npos) cookie = environment.c_str() + at + 14;
    }
    ASSERT_EQ(cookie.size(), 32U);
    EXPECT_THAT(commands, Not(HasSubstr(cookie)));
    EXPECT_THAT(output(), Not(HasSubstr(cookie)));
    user_->run({"qdel", id});
    (void)exit_status_of(id);
}

TEST_F(StartPbs, ASnifferSeesNeitherTheCookieNorAVariableOfTheScript) {
    // Capture every packet that node01 sends and receives.
    const std::string packets = user_->file("packets");
    const std::string record =
        "import socket,sys\ns=socket.socket(socket.AF_PACKET,socket.SOCK_RAW,socket.htons(3))\nf=open(sys.argv[1],'wb',0)\n"
        "print('recording',flush=True)\nwhile True: f.write(s.recv(1<<17))\n";
    Program recorder(hosts_->command(1, {"python3", "-B", "-c", record, packets}));
    ASSERT_TRUE(recorder.wait_for_output("recording"));
    const std::string shown = user_->file("cookie");
    std::ofstream(user_->file("key.sh")) << "printenv WANDB_API_KEY >" << shown << ".$RANK\n";
    const std::string id = user_->submit(
        "export WANDB_API_KEY=4f1c9e7a20b35d68 DDPRUN_TOKEN=aNotherJobsSecretText\necho $PBS_JOBCOOKIE >" +
            shown + "\nexec " + path_of("DDPRUN") + " --nproc-per-node=1 /bin/sh " + user_->file("key.sh"),
        {"-l", "select=3:ncpus=1", "-l", "place=scatter"});
    const std::string out = user_->output_of(id);
    // The workers report by files: ddprun cannot hide their own output.
    for (int rank = 0; rank < 3; ++rank)
        EXPECT_EQ(file_content(shown + "." + std::to_string(rank)), "4f1c9e7a20b35d68\n") << out;
    recorder.signal(SIGKILL);
    recorder.wait();
    const std::string bytes = file_content(packets), cookie = file_content(shown).substr(0, 32);
    ASSERT_THAT(bytes, HasSubstr("start/order")) << "the question of node01 was recorded";
    ASSERT_EQ(cookie.size(), 32U);
    for (const std::string& secret : {cookie, std::string("4f1c9e7a20b35d68"),
                                      std::string("aNotherJobsSecretText"), std::string("WANDB")}) {
        EXPECT_EQ(bytes.find(secret), std::string::npos) << secret;
    }
}

}  // namespace
}  // namespace ddprun::test
