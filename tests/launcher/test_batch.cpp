#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <fstream>

#include "env/text.h"
#include "launcher/cli/subcommand.h"
#include "launcher/talk/scheduler_command.h"
#include "launcher/tools/batch/batch.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using Words = std::vector<std::string>;
using Phase = BatchStatus::Phase;

const EnvironmentLookup kNothing = [](std::string_view) -> std::optional<std::string> {
    return std::nullopt;
};

std::string script(Scheduler scheduler, Words words) {
    words.insert(words.begin(), "script");
    const Result<BatchCommand> command = parse_batch_command(scheduler, words, kNothing);
    return command ? render_job_script(scheduler, command->request) : "error: " + command.error().what;
}

std::string last_line(const std::string& text) {
    const std::size_t end = text.rfind('\n', text.size() - 2);
    return text.substr(end + 1, text.size() - end - 2);
}

// ---- scripts

TEST(JobScript, EndsWithTheLineForALaptop) {
    EXPECT_EQ(last_line(script(Scheduler::Pbs, {"--", "--max-restarts=3", "train", "--epochs", "10"})),
              "exec ddprun --max-restarts=3 train --epochs 10");
    EXPECT_EQ(last_line(script(Scheduler::Slurm, {"train"})), "exec ddprun train");
}

TEST(JobScript, StartsAWorkerPerGpuUnlessTheLineHasACount) {
    EXPECT_EQ(last_line(script(Scheduler::Pbs, {"--gpus-per-node", "4", "train"})),
              "exec ddprun --nproc-per-node=4 train");
    EXPECT_EQ(
        last_line(script(Scheduler::Pbs, {"--gpus-per-node", "4", "--", "--nproc-per-node=2", "train"})),
        "exec ddprun --nproc-per-node=2 train");
    EXPECT_EQ(last_line(script(Scheduler::Pbs, {"--site", "derecho", "train"})),
              "exec ddprun --nproc-per-node=4 train");
    EXPECT_EQ(last_line(script(Scheduler::Pbs, {"--site", "derecho", "--gpus-per-node", "0", "train"})),
              "exec ddprun train");
}

TEST(JobScript, ChangesToTheDirectoryOfItsSubmission) {
    EXPECT_THAT(script(Scheduler::Pbs, {"train"}), HasSubstr("\ncd \"$PBS_O_WORKDIR\" || exit 1\n"));
    EXPECT_THAT(script(Scheduler::Slurm, {"train"}), HasSubstr("\ncd \"$SLURM_SUBMIT_DIR\" || exit 1\n"));
}

TEST(JobScript, PutsTwoNodesOnTwoHosts) {
    EXPECT_THAT(script(Scheduler::Pbs, {"--nodes=2", "train"}),
                AllOf(HasSubstr("#PBS -l select=2\n"), HasSubstr("#PBS -l place=scatter\n")));
    EXPECT_THAT(script(Scheduler::Pbs, {"train"}), Not(HasSubstr("place=")));
}

TEST(JobScript, AnElasticJobOutlivesTheLossOfAHostUnderSlurm) {
    const Words elastic = {"--nodes=3", "--", "--nnodes=2:3", "train"};
    EXPECT_THAT(script(Scheduler::Slurm, elastic), HasSubstr("\n#SBATCH --no-kill\n"));
    EXPECT_THAT(script(Scheduler::Pbs, elastic), Not(HasSubstr("kill"))) << "PBS lets such a job go on";
    EXPECT_THAT(script(Scheduler::Slurm, {"--nodes=3", "train"}), Not(HasSubstr("no-kill")));
}

TEST(JobScript, HasTheDirectivesOfItsSite) {
    EXPECT_THAT(
        script(Scheduler::Pbs, {"--site=polaris", "--nodes=2", "--account=proj", "--walltime=1h", "train"}),
        AllOf(HasSubstr("#PBS -l select=2:system=polaris:ngpus=4\n"),
              HasSubstr("#PBS -l filesystems=home:eagle\n"), HasSubstr("#PBS -k doe\n"),
              HasSubstr("#PBS -l place=scatter\n"), HasSubstr("#PBS -q prod\n"),
              HasSubstr("#PBS -l walltime=01:00:00\n"), HasSubstr("#PBS -A proj\n")));
    EXPECT_THAT(script(Scheduler::Pbs, {"--site=polaris", "--queue=debug", "train"}),
                AllOf(HasSubstr("-q debug\n"), Not(HasSubstr("-q prod"))));
}

TEST(JobScript, AsksSlurmForOneTaskPerNode) {
    EXPECT_THAT(script(Scheduler::Slurm, {"--nodes=2", "--gpus-per-node=4", "--cpus-per-node=64",
                                          "--walltime=90m", "--partition=gpu", "train"}),
                AllOf(HasSubstr("#SBATCH --nodes=2\n"), HasSubstr("#SBATCH --ntasks-per-node=1\n"),
                      HasSubstr("#SBATCH --gpus-per-node=4\n"), HasSubstr("#SBATCH --cpus-per-task=64\n"),
                      HasSubstr("#SBATCH --time=01:30:00\n"), HasSubstr("#SBATCH --partition=gpu\n")));
}

Words remarks(Scheduler scheduler, Words words) {
    words.insert(words.begin(), "script");
    const Result<BatchCommand> command = parse_batch_command(scheduler, words, kNothing);
    return command ? command->remarks : Words{"error: " + command.error().what};
}

TEST(JobScript, ForGpusOrWorkersWithoutCpusHasARemark) {
    const auto one =
        ElementsAre(HasSubstr("no --cpus-per-node: most clusters then give a job one core of each node"));
    EXPECT_THAT(remarks(Scheduler::Pbs, {"--gpus-per-node=4", "train"}), one);
    EXPECT_THAT(remarks(Scheduler::Slurm, {"--nodes=2", "--", "--nproc-per-node=8", "train"}), one);
    EXPECT_THAT(remarks(Scheduler::Slurm, {"--", "--nproc-per-node=auto", "train"}), one);
    EXPECT_THAT(remarks(Scheduler::Pbs, {"--gpus-per-node=4", "--cpus-per-node=32", "train"}), ElementsAre());
    EXPECT_THAT(remarks(Scheduler::Pbs, {"train"}), ElementsAre()) << "one worker";
    EXPECT_THAT(remarks(Scheduler::Pbs, {"--site=derecho", "train"}), ElementsAre()) << "the site's CPUs";
    EXPECT_THAT(remarks(Scheduler::Pbs, {"--site=polaris", "train"}), ElementsAre())
        << "the site's own select";
    EXPECT_THAT(remarks(Scheduler::Slurm, {"--gpus-per-node=4", "--directive=--exclusive", "train"}),
                ElementsAre());
}

TEST(JobScript, NamesItselfToPbsForARequeue) {
    const std::string text =
        script(Scheduler::Pbs, {"--requeue=self", "--file", "/home/u/my script.pbs", "train"});
    EXPECT_THAT(text, HasSubstr("#PBS -r y\n"));
    EXPECT_EQ(last_line(text), "exec ddprun --requeue=self '--requeue-script=/home/u/my script.pbs' train");
    EXPECT_THAT(script(Scheduler::Pbs, {"--requeue=no", "train"}),
                AllOf(HasSubstr("#PBS -r n\n"), EndsWith("exec ddprun train\n")));
    EXPECT_THAT(script(Scheduler::Slurm, {"--requeue=auto", "train"}),
                AllOf(HasSubstr("#SBATCH --requeue\n"), HasSubstr("#SBATCH --open-mode=append\n"),
                      EndsWith("exec ddprun --requeue=auto train\n")));
}

TEST(JobScript, PassesAnyWordToTheProgramUnchanged) {
    const Words nasty = {"a b", "it's", "$HOME", "`id`", "\"", "\\", "*",     "~",         "",     "a\nb",
                         "!x",  "#c",   ";",     "&&",   "ü",  "-n", "'\\''", "$(exit 3)", "a'\"b"};
    const test::TemporaryDirectory directory;
    // A ddprun that prints its arguments.
    std::ofstream(directory.file("ddprun")) << "#!/bin/sh\nprintf '<%s>' \"$@\"\n";
    ::chmod(directory.file("ddprun").c_str(), 0755);
    Words words = {"--env", "VALUE=it's $HOME\nand more", "--", "train"};
    words.insert(words.end(), nasty.begin(), nasty.end());
    std::string text = script(Scheduler::Pbs, words);
    text.replace(text.find("exec ddprun"), 4, "printf '%s|' \"$VALUE\"; exec");
    std::ofstream(directory.file("job")) << text;
    test::RunOptions options = test::with_environment(
        {"PATH=" + directory.path() + ":/usr/bin:/bin", "PBS_O_WORKDIR=" + directory.path()});
    const test::Outcome outcome = test::run({"/bin/bash", directory.file("job")}, options);
    std::string expected = "it's $HOME\nand more|<train>";
    for (const std::string& word : nasty) expected += "<" + word + ">";
    EXPECT_EQ(outcome.out, expected) << outcome.err;
}

TEST(JobScript, RefusesValuesThatNoDirectiveCanHold) {
    EXPECT_EQ(
        script(Scheduler::Pbs, {"--name", "a b", "train"}),
        "error: --name: 'a b' cannot stand in a directive: it has a blank, a quote, or what is not ASCII");
    for (const char* value : {"a\nb", "a'b", "a\"b", "a#b", "$x", "ü"}) {
        EXPECT_THAT(script(Scheduler::Pbs, {"--account", value, "train"}), HasSubstr("error: --account: "))
            << value;
    }
    EXPECT_THAT(script(Scheduler::Pbs, {"--directive", "-l x\nrm -rf", "train"}),
                HasSubstr("error: --directive: "));
    EXPECT_THAT(script(Scheduler::Pbs, {"--setup", "a\nb", "train"}), HasSubstr("error: --setup: "));
    EXPECT_THAT(script(Scheduler::Pbs, {"--env", "A B=1", "train"}),
                HasSubstr("error: --env: 'A B' is no name of a variable"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--module", "a b", "train"}), HasSubstr("error: --module: "));
}

TEST(JobScript, IsNamedAfterItsProgram) {
    EXPECT_THAT(script(Scheduler::Pbs, {"./build/train it.py"}), HasSubstr("#PBS -N train_it\n"));
    EXPECT_THAT(script(Scheduler::Pbs, {"./7days"}), HasSubstr("#PBS -N job_7days\n"));
}

TEST(BatchCommandLine, RefusesWhatDdprunWouldRefuseOnTheNode) {
    EXPECT_EQ(script(Scheduler::Pbs, {"--", "--nproc-per-node=eight", "train"}),
              "error: --nproc-per-node: 'eight' is not a number (expected a count, auto, gpu or cpu)");
    EXPECT_THAT(script(Scheduler::Pbs, {"--nodes=2"}), HasSubstr("error: no program given"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--", "--requeue=self", "train"}),
                HasSubstr("error: --requeue: give it before"));
}

TEST(BatchCommandLine, RefusesALineThatContradictsTheRequestedNodes) {
    EXPECT_EQ(script(Scheduler::Slurm, {"--nodes", "2", "--", "--nnodes=4", "train"}),
              "error: --nnodes=4 contradicts --nodes 2: leave --nnodes out to use all nodes of the job");
    EXPECT_THAT(script(Scheduler::Slurm, {"--nodes", "2", "--", "--nnodes=1", "train"}),
                HasSubstr("error: --nnodes=1 contradicts --nodes 2"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--nodes", "2", "--", "--standalone", "train"}),
                HasSubstr("error: --standalone uses one node, and --nodes 2 asks for 2"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--nodes", "3", "--", "--hosts=a,b,c", "train"}),
                HasSubstr("error: --hosts: which hosts the job gets is known when it runs"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--nodes", "3", "--", "--nnodes=2:3", "train"}),
                Not(HasSubstr("error")));
    EXPECT_THAT(script(Scheduler::Pbs, {"--", "--standalone", "train"}), Not(HasSubstr("error")));
}

TEST(BatchCommandLine, TakesSlurmsNamesOfTheOptions) {
    EXPECT_THAT(script(Scheduler::Slurm, {"-N", "2", "--time=2-00:00:00", "-p", "gpu", "-A", "proj", "-J",
                                          "it", "--cpus-per-task=8", "--mem=64G", "-o", "out", "train"}),
                AllOf(HasSubstr("#SBATCH --nodes=2\n"), HasSubstr("#SBATCH --time=48:00:00\n"),
                      HasSubstr("#SBATCH --partition=gpu\n"), HasSubstr("#SBATCH --account=proj\n"),
                      HasSubstr("#SBATCH --job-name=it\n"), HasSubstr("#SBATCH --cpus-per-task=8\n"),
                      HasSubstr("#SBATCH --mem=64G\n"), HasSubstr("#SBATCH --output=out\n")));
    EXPECT_THAT(script(Scheduler::Slurm, {"-t", "1-6", "train"}), HasSubstr("#SBATCH --time=30:00:00\n"));
    EXPECT_THAT(script(Scheduler::Slurm, {"-t", "1-6:30", "train"}), HasSubstr("#SBATCH --time=30:30:00\n"));
    EXPECT_THAT(script(Scheduler::Slurm, {"--gpu-per-node", "4", "train"}),
                HasSubstr("error: --gpu-per-node: unknown option of script (did you mean --gpus-per-node?)"));
}

TEST(BatchCommandLine, RefusesTheSiteOfAnotherScheduler) {
    EXPECT_EQ(script(Scheduler::Slurm, {"--site=derecho", "train"}),
              "error: --site=derecho: that machine has PBS; use ddprun pbs ...");
    EXPECT_THAT(script(Scheduler::Pbs, {"--site=derecho", "train"}), Not(HasSubstr("error")));
}

TEST(BatchRequest, OfAProgramThatIsNotThereIsRefusedUnlessTheScriptCouldMakeIt) {
    const test::TemporaryDirectory directory;
    const std::string there = directory.file("there.py"), missing = directory.file("missing.py");
    std::ofstream(there) << "pass\n";
    const auto checked = [](Words words) {
        words.insert(words.begin(), "submit");
        const Result<BatchCommand> command = parse_batch_command(Scheduler::Pbs, words, kNothing);
        return command ? check_program(command->request) : Status(command.error());
    };
    EXPECT_TRUE(checked({there}));
    EXPECT_EQ(checked({missing}).error().code, Errc::NotFound);
    EXPECT_EQ(checked({"--module=cuda", missing}).error().code, Errc::NotFound);
    EXPECT_TRUE(checked({"--setup=make missing.py", missing}));
    EXPECT_FALSE(checked({"no-such-program"}));
    EXPECT_TRUE(checked({"--module=cuda", "no-such-program"})) << "the module may bring it";
    EXPECT_EQ(checked({"--", "--no-python", there}).error().code, Errc::System) << "not executable";
}

TEST(BatchCommandLine, NamesTheOptionAndTheValue) {
    EXPECT_EQ(script(Scheduler::Pbs, {"--nodes", "0", "train"}),
              "error: --nodes: '0' is not between 1 and 1000000");
    EXPECT_EQ(script(Scheduler::Pbs, {"--walltime", "90", "train"}),
              "error: --walltime: '90' is not a walltime (expected HH:MM:SS, D-HH:MM:SS, 90m, 2h or 1d)");
    EXPECT_THAT(script(Scheduler::Pbs, {"--env", "A", "train"}), HasSubstr("'A' is not NAME=VALUE"));
    EXPECT_THAT(script(Scheduler::Pbs, {"--max-restarts=3", "train"}),
                HasSubstr("--max-restarts=3: unknown option of script (options of ddprun come after --)"));
    EXPECT_EQ(parse_batch_command(Scheduler::Pbs, {"list"}, kNothing).error().what,
              "'list' is not script, submit or status");
}

TEST(BatchCommandLine, TakesOneJobForAStatusOrTheCallersOwn) {
    EXPECT_EQ(parse_batch_command(Scheduler::Pbs, {"status", "12"}, kNothing)->job, "12");
    EXPECT_FALSE(parse_batch_command(Scheduler::Pbs, {"status"}, kNothing));
    EXPECT_FALSE(parse_batch_command(Scheduler::Pbs, {"status", "12", "13"}, kNothing));
    const EnvironmentLookup in_job = [](std::string_view name) {
        return name == "PBS_JOBID" ? std::optional<std::string>("7.s") : std::nullopt;
    };
    EXPECT_EQ(parse_batch_command(Scheduler::Pbs, {"status", "--no-follow"}, in_job)->job, "7.s");
    EXPECT_FALSE(parse_batch_command(Scheduler::Slurm, {"status"}, in_job)) << "it is another scheduler's";
}

// ---- sites

TEST(Site, OfAFileOverridesFieldsOfABuiltInOne) {
    const Result<SiteProfile> site = parse_site(
        R"({"like": "derecho", "name": "casper", "queue": "casper", "modules": ["cuda/12", "ncarenv"],
        "environment": {"A": "b c"}, "cpus_per_node": 36 /* per socket: 18 */})");
    ASSERT_TRUE(site) << site.error().what;
    EXPECT_EQ(site->queue, "casper");
    EXPECT_EQ(site->cpus_per_node, 36);
    EXPECT_EQ(site->gpus_per_node, 4) << "as derecho";
    EXPECT_THAT(site->modules, ElementsAre("cuda/12", "ncarenv"));
}

TEST(Site, NamesTheErrorInAFile) {
    const auto why = [](const char* text) { return parse_site(text).error().what; };
    EXPECT_EQ(why("[]"), "expected an object");
    EXPECT_EQ(why(R"({"quene": "x"})"), "quene: unknown field (docs/batch.md lists them)");
    EXPECT_EQ(why(R"({"cpus_per_node": "64"})"), "cpus_per_node: expected a number from 0 to 100000");
    EXPECT_EQ(why(R"({"cpus_per_node": -1})"), "cpus_per_node: expected a number from 0 to 100000");
    EXPECT_EQ(why(R"({"modules": "cuda"})"), "modules: expected a list of texts");
    EXPECT_EQ(why(R"({"setup": ["a\nb"]})"), "setup: expected a list of texts, each one line");
    EXPECT_EQ(why(R"({"environment": {"A": 1}})"), "environment: A: expected a text");
    for (const char* name : {"A B", "", "-x", "A$(cmd)", "1A"}) {
        EXPECT_EQ(why((std::string(R"({"environment": {")") + name + R"(": "4"}})").c_str()),
                  "environment: '" + std::string(name) + "' is no name of a variable");
    }
    EXPECT_EQ(why(R"({"queue": "a\nb"})"), "queue: expected a text of one line");
    EXPECT_EQ(why(R"({"queue": "a b"})"), "queue: 'a b' cannot stand in a directive");
    EXPECT_EQ(why(R"({"environment": {"A$x": "1"}})"), "environment: 'A$x' is no name of a variable");
    EXPECT_EQ(why(R"({"like": "nowhere"})"), "like: expected one of generic, derecho, polaris");
    EXPECT_FALSE(parse_site(""));
    EXPECT_FALSE(parse_site(R"({"queue": "a", "queue": "b"})"));
}

TEST(Site, IsABuiltInOneOrAFile) {
    EXPECT_THAT(
        find_site("nowhere").error().what,
        HasSubstr("'nowhere': there is no such site (expected generic, derecho, polaris, or a FILE.json)"));
    const test::TemporaryDirectory directory;
    EXPECT_THAT(find_site(directory.file("none.json")).error().what, HasSubstr("none.json: No such file"));
}

TEST(Site, TheVariableWinsOverTheHostsFileAndBothOverGeneric) {
    const test::TemporaryDirectory directory;
    const std::string file = directory.file("site.json"), none = directory.file("none.json");
    std::ofstream(file) << R"({"name": "mine", "queue": "long"})";
    EXPECT_EQ(default_site(std::nullopt, {none}), "generic");
    EXPECT_EQ(default_site("", {none, file}), file) << "a variable that is set to nothing is not set";
    EXPECT_EQ(default_site("derecho", {file}), "derecho");
}

TEST(Site, OfTheVariableIsInTheScriptUnlessTheOptionNamesAnother) {
    const auto script_of = [](const std::vector<std::string>& words, const std::string& site) {
        return parse_batch_command(Scheduler::Pbs, words, [&](std::string_view name) {
            return name == "DDPRUN_SITE" ? std::optional(site) : std::nullopt;
        });
    };
    const Result<BatchCommand> from_variable = script_of({"script", "train"}, "derecho");
    ASSERT_TRUE(from_variable);
    EXPECT_EQ(from_variable->request.site.name, "derecho");
    EXPECT_THAT(from_variable->remarks, ElementsAre("--site=derecho is the default here"));
    EXPECT_EQ(script_of({"script", "--site=polaris", "train"}, "derecho")->request.site.name, "polaris");
    EXPECT_THAT(script_of({"script", "train"}, "nowhere").error().what,
                AllOf(StartsWith("the default of --site is wrong: 'nowhere': there is no such site"),
                      HasSubstr("--site=generic goes without it")));
    EXPECT_TRUE(script_of({"script", "--site=generic", "train"}, "nowhere"));
    EXPECT_TRUE(script_of({"status", "12"}, "nowhere")) << "no script is written";
}

// ---- the answers of schedulers

constexpr const char* kRunning =
    "JobId=17 JobName=train\n   UserId=u(1000) GroupId=u(1000) MCS_label=N/A\n   Priority=1 Nice=0 Account=(null) QOS=normal\n"
    "   JobState=RUNNING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n"
    "   Partition=gpu AllocNode:Sid=login:1\n   ReqNodeList=(null) ExcNodeList=(null)\n   NodeList=node[01-02]\n   BatchHost=node01\n"
    "   StdErr=/home/u/my run/train-17.log\n   StdOut=/home/u/my run/train-17.log\n";

std::string with(std::string text, const std::string& old, const std::string& now) {
    return text.replace(text.find(old), old.size(), now);
}

TEST(SlurmJob, NamesItsHostsAndLogWhileItRuns) {
    const Result<BatchStatus> look = parse_scontrol_job(kRunning);
    ASSERT_TRUE(look);
    EXPECT_EQ(look->phase, Phase::Running);
    EXPECT_EQ(look->hosts, "node[01-02]") << "not ReqNodeList";
    EXPECT_EQ(look->log, "/home/u/my run/train-17.log");
    EXPECT_EQ(describe_status("17", *look), "17: running on node[01-02]");
}

TEST(SlurmJob, NamesTheReasonWhileItWaits) {
    BatchStatus look = *parse_scontrol_job(with(kRunning, "RUNNING Reason=None", "PENDING Reason=Resources"));
    look.place = place_in_squeue("4\n17\n18\n", "17");
    EXPECT_EQ(describe_status("17", look), "17: queued in gpu, 2nd of 3: Resources");
    EXPECT_EQ(place_in_squeue("4\n", "17"), std::nullopt);
}

TEST(SlurmJob, HasAnExitCodeAtItsEnd) {
    const auto end = [](const char* state, const char* code) {
        return *parse_scontrol_job(
            with(with(kRunning, "RUNNING", state), "ExitCode=0:0", std::string("ExitCode=") + code));
    };
    EXPECT_EQ(end("COMPLETED", "0:0").exit_code, 0);
    EXPECT_EQ(end("FAILED", "75:0").exit_code, 75);
    EXPECT_EQ(end("FAILED", "0:9").exit_code, 137);
    EXPECT_EQ(describe_status("17", end("TIMEOUT", "0:0")), "17: ended with exit code 1 (TIMEOUT)")
        << "no success";
    EXPECT_EQ(describe_status("17", end("CANCELLED", "0:15")), "17: ended with exit code 143 (CANCELLED)");
    EXPECT_EQ(parse_scontrol_job("slurm_load_jobs error: Invalid job id specified\n").error().code,
              Errc::NotFound);
}

TEST(SlurmJob, WaitsAfterARequeue) {
    for (const char* state : {"REQUEUED", "CONFIGURING"})
        EXPECT_EQ(parse_scontrol_job(with(kRunning, "RUNNING", state))->phase, Phase::Waiting) << state;
    EXPECT_EQ(parse_scontrol_job(with(kRunning, "RUNNING", "COMPLETING"))->phase, Phase::Running);
}

TEST(PbsJob, IsDescribedInTheSameWords) {
    pbs::QueuedJob job;
    job.state = "Q", job.queue = "main", job.comment = "Not Running: no room";
    BatchStatus look = to_batch_status(job);
    look.place = pbs::QueuePlace{11, 23};
    EXPECT_EQ(describe_status("12.s", look), "12.s: queued in main, 11th of 23: Not Running: no room");
    job.state = "R", job.exec_host = "node01/0*64+node02/0*64";
    EXPECT_EQ(describe_status("12.s", to_batch_status(job)), "12.s: running on node01, node02");
    job.state = "F", job.exit_status = 271;
    EXPECT_EQ(describe_status("12.s", to_batch_status(job)), "12.s: ended with exit code 143");
    job.exit_status = -29;
    EXPECT_EQ(describe_status("12.s", to_batch_status(job)),
              "12.s: ended with exit code 1 (the walltime was exceeded)");
    job.exit_status.reset(), job.comment = "Job deleted as result of dependency";
    EXPECT_EQ(describe_status("12.s", to_batch_status(job)),
              "12.s: ended; its exit code is not known (Job deleted as result of dependency)");
    EXPECT_EQ(to_batch_status({}).phase, Phase::Waiting) << "a state that we do not know is no end";
}

TEST(Sbatch, OutputHasTheJobsNumber) {
    EXPECT_EQ(*parse_sbatch("17\n"), "17");
    EXPECT_EQ(*parse_sbatch("hello from a plugin\n17;cluster\n"), "17");
    for (const char* text : {"", "Submitted batch job 17\n", "x", "-1"})
        EXPECT_FALSE(parse_sbatch(text)) << text;
}

TEST(Sbatch, KnowsExpediteFrom2511On) {
    for (const char* version : {"slurm 25.11.0\n", "slurm 26.05.1"})
        EXPECT_TRUE(can_expedite(version)) << version;
    for (const char* version : {"slurm 25.05.3", "slurm-wlm 22.05.8\n", "", "slurm", "slurm 25"})
        EXPECT_FALSE(can_expedite(version)) << version;
}

TEST(Refusal, DiffersFromASchedulerThatDoesNotAnswer) {
    EXPECT_TRUE(is_unreachable("qsub: cannot connect to server pbs01 (errno=15010)"));
    EXPECT_TRUE(is_unreachable(
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"));
    EXPECT_FALSE(is_unreachable("qsub: Unknown queue"));
    EXPECT_FALSE(is_unreachable(
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"));
}

// ---- a scheduler's program

TEST(SchedulerCommand, ReturnsBothStreams) {
    const Result<ToolEnd> outcome =
        run_scheduler_command({"sh", "-c", "echo out; echo err >&2; exit 3"}, 60s);
    ASSERT_TRUE(outcome) << outcome.error().what;
    EXPECT_EQ(outcome->exit_code, 3);
    EXPECT_EQ(outcome->out, "out\n");
    EXPECT_EQ(describe_refusal("sh", *outcome), "sh: err");
}

TEST(SchedulerCommand, NamesAMissingProgram) {
    EXPECT_EQ(run_scheduler_command({"no-such-qsub"}, 60s).error(),
              (Error{Errc::NotFound, "no-such-qsub: not found in PATH", 0}));
}

TEST(SchedulerCommand, IsKilledWithItsChildrenWhenItHangs) {
    const std::string mark = test::unique_name("SCHEDULER_COMMAND");
    ::setenv(mark.c_str(), "1", 1);
    const Result<ToolEnd> outcome = run_scheduler_command({"sh", "-c", "sleep 1000 & sleep 1000"}, 50ms);
    ::unsetenv(mark.c_str());
    EXPECT_EQ(outcome.error().code, Errc::Timeout);
    EXPECT_TRUE(test::all_gone(mark + "=1"));
}

TEST(SchedulerCommand, RunsInADirectoryOfAnyName) {
    const test::TemporaryDirectory directory;
    const std::string odd = directory.file("a $b 'c'");
    ::mkdir(odd.c_str(), 0755);
    EXPECT_EQ(trim(run_scheduler_command({"pwd"}, 60s, odd)->out), odd);
}

TEST(Refusal, IsTheProgramsMessageInOneLine) {
    EXPECT_EQ(describe_refusal("qsub", {170, "", "qsub: Unknown queue\n"}), "qsub: Unknown queue");
    EXPECT_EQ(describe_refusal("sbatch", {1, "", "error: a\nerror: b\n"}), "sbatch: error: a; error: b");
    EXPECT_EQ(describe_refusal("qsub", {7, "said it here\n", ""}), "qsub: said it here");
    EXPECT_EQ(describe_refusal("qsub", {7, "", "\n"}), "qsub ended with exit code 7 and said nothing");
}

}  // namespace
}  // namespace ddprun
