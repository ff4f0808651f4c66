// The hosts of a job, their starters and their orders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "launcher/start/host_starter.h"
#include "launcher/start/start_order.h"
#include "launcher/start/start_plan.h"
#include "launcher/start/starter_command.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Allocation allocation(AllocationSource source, std::vector<std::string> names) {
    Allocation made;
    made.source = source;
    made.job_id = "12.server";
    made.from = "PBS_NODEFILE=/f";
    int line = 0;
    for (std::string& name : names) made.hosts.push_back({std::move(name), 1, std::nullopt, line++});
    return made;
}

StartFacts facts(std::optional<Allocation> allocation, std::vector<std::string> programs,
                 std::string host = "h1") {
    StartFacts known;
    known.allocation = std::move(allocation);
    known.host_name = std::move(host);
    known.find_by_address = [](const std::vector<AllocatedHost>&) { return std::nullopt; };
    known.is_there = [programs = std::move(programs)](std::string_view program) {
        return std::find(programs.begin(), programs.end(), program) != programs.end();
    };
    return known;
}

Result<StartPlan> plan(const StartFacts& known, Starter starter = Starter::Auto,
                       NodesSaid said = NodesSaid::Nothing, Nodes nodes = {}) {
    JobSpec spec;
    spec.nodes = nodes;
    spec.start.starter = starter;
    return plan_start(spec, said, known);
}

TEST(StartPlan, KeepsTheJobHereWithoutAnAllocation) {
    const auto here = plan(facts(std::nullopt, {}));
    ASSERT_TRUE(here);
    EXPECT_EQ(here->kind, StartPlan::Here);
    EXPECT_EQ(here->why, "");
    EXPECT_THAT(plan(facts(std::nullopt, {}), Starter::Ssh).error().what,
                AllOf(HasSubstr("--start=ssh"), HasSubstr("--hostfile")));
}

TEST(StartPlan, PrefersStartersThatKeepTheHostsInThePbsJob) {
    const Allocation job = allocation(AllocationSource::Pbs, {"h1", "h2", "h3"});
    const std::vector<std::pair<std::vector<std::string>, Starter>> cases = {
        {{"ssh", "mpiexec", "pbs_tmrsh", "pbsdsh"}, Starter::Pbsdsh},
        {{"ssh", "mpiexec", "pbs_tmrsh"}, Starter::Tm},
        {{"ssh", "mpiexec"}, Starter::Mpiexec},
        {{"ssh"}, Starter::Ssh}};
    for (const auto& [programs, starter] : cases) {
        const auto all = plan(facts(job, programs));
        ASSERT_TRUE(all);
        EXPECT_EQ(all->kind, StartPlan::All);
        EXPECT_EQ(all->starter, starter);
    }
    EXPECT_EQ(
        plan(facts(job, {"pbsdsh"}))->why,
        "PBS job 12.server (PBS_NODEFILE=/f): 3 hosts h1,h2,h3; starting ddprun on the other 2 by pbsdsh");
    EXPECT_THAT(plan(facts(job, {})).error().what, AllOf(HasSubstr("pbsdsh, pbs_tmrsh, mpiexec, ssh"),
                                                         HasSubstr("--start=none"), HasSubstr("--nnodes=1")));
}

TEST(StartPlan, RefusesAStarterThatDoesNotFitOrIsMissing) {
    const Allocation job = allocation(AllocationSource::Pbs, {"h1", "h2"});
    EXPECT_EQ(plan(facts(job, {"ssh", "pbsdsh"}), Starter::Ssh)->starter, Starter::Ssh);
    EXPECT_THAT(plan(facts(job, {"pbsdsh"}), Starter::Ssh).error().what, HasSubstr("PATH has no ssh"));
    EXPECT_THAT(plan(facts(job, {"srun"}), Starter::Srun).error().what,
                HasSubstr("the hosts are PBS's, not Slurm's"));
    EXPECT_THAT(plan(facts(allocation(AllocationSource::Hostfile, {"h1", "h2"}), {"pbsdsh"}), Starter::Pbsdsh)
                    .error()
                    .what,
                HasSubstr("not a PBS job's"));
    EXPECT_EQ(plan(facts(job, {}), Starter::None)->kind, StartPlan::Wait);
}

TEST(StartPlan, ThisHostIsNodeZeroAndTheOthersKeepTheirOrder) {
    const auto all = plan(facts(allocation(AllocationSource::Hostfile, {"a", "h1.site", "c"}), {"ssh"}));
    ASSERT_TRUE(all);
    ASSERT_EQ(all->hosts.size(), 3u);
    EXPECT_EQ(all->hosts[0].name, "h1.site");
    EXPECT_EQ(all->hosts[1].name, "a");
    EXPECT_EQ(all->hosts[2].name, "c");
}

TEST(StartPlan, MakesAHostOutsideTheUsersOrSlurmsHostsAHeadWithoutWorkers) {
    const auto from_login =
        plan(facts(allocation(AllocationSource::Slurm, {"n1", "n2"}), {"srun"}, "login3"));
    ASSERT_TRUE(from_login) << from_login.error().what;
    EXPECT_TRUE(from_login->is_apart);
    EXPECT_EQ(from_login->hosts[0].name, "n1");
    EXPECT_EQ(from_login->starter, Starter::Srun);
    EXPECT_THAT(
        from_login->why,
        HasSubstr(
            "; this host (login3) is none of them and runs no workers; starting ddprun on all 2 by srun"));
    const auto one = plan(facts(allocation(AllocationSource::Hosts, {"n1:4"}), {"ssh"}, "laptop"));
    ASSERT_TRUE(one) << one.error().what;
    EXPECT_EQ(one->kind, StartPlan::All);
    EXPECT_THAT(one->why, HasSubstr("starting ddprun on it by ssh"));
}

TEST(StartPlan, TellsAHostOutsideThePbsJobOrOneThatWaitsWhatToDo) {
    for (const auto& refused :
         {plan(facts(allocation(AllocationSource::Pbs, {"n1", "n2"}), {"pbsdsh"}, "login3")),
          plan(facts(allocation(AllocationSource::Lsf, {"n1", "n2"}), {"ssh"}, "login3")),
          plan(facts(allocation(AllocationSource::Hosts, {"n1", "n2"}), {"ssh"}, "login3"), Starter::None)}) {
        ASSERT_FALSE(refused);
        EXPECT_THAT(refused.error().what,
                    AllOf(HasSubstr("this host (login3)"), HasSubstr("n1,n2"), HasSubstr("--nnodes=1")));
    }
}

TEST(StartPlan, ThisHostIsKnownByItsAddress) {
    StartFacts by_address = facts(allocation(AllocationSource::Hosts, {"10.0.0.1", "10.0.0.2"}), {"ssh"});
    by_address.find_by_address = [](const std::vector<AllocatedHost>&) {
        return std::optional<std::size_t>(1);
    };
    EXPECT_EQ(plan(by_address)->hosts[0].name, "10.0.0.2");
    by_address.host_name = "10.0.0.1";
    by_address.find_by_address = [](const std::vector<AllocatedHost>&) -> std::optional<std::size_t> {
        ADD_FAILURE() << "the resolver is asked where the name tells enough";
        return std::nullopt;
    };
    EXPECT_EQ(plan(by_address)->hosts[0].name, "10.0.0.1");
}

TEST(StartPlan, ThisHostIsFoundByItsAddressesTheirNamesAndWhatNamesResolveTo) {
    const std::vector<std::string> hosts = {"n1", "n2-ib", "alias", "10.0.0.9"};
    EXPECT_EQ(find_own_place(hosts, {{"10.0.0.2", "127.0.0.1"}, {"n3"}, {{"alias", {"10.0.0.3"}}}}),
              std::nullopt);
    EXPECT_EQ(find_own_place(hosts, {{"10.0.0.2", "10.0.0.9"}, {}, {}}), 3u);
    EXPECT_EQ(find_own_place(hosts, {{"10.0.0.2"}, {"n2-ib.cluster"}, {}}), 1u);
    EXPECT_EQ(find_own_place(hosts, {{"10.0.0.2"}, {}, {{"alias", {"10.0.0.2"}}}}), 2u);
}

TEST(StartPlan, KeepsTheJobOfOneHostHereAndSaysWhy) {
    const auto here = plan(facts(allocation(AllocationSource::Slurm, {"h1"}), {}));
    ASSERT_TRUE(here);
    EXPECT_EQ(here->kind, StartPlan::Here);
    EXPECT_THAT(here->why, HasSubstr("Slurm job 12.server"));
}

TEST(StartPlan, ComparesNodesThatOthersStartWithTheUsersHostsOnly) {
    EXPECT_EQ(plan(facts(allocation(AllocationSource::Pbs, {"h1", "h2"}), {"pbsdsh"}), Starter::Auto,
                   NodesSaid::ByOthers)
                  ->kind,
              StartPlan::Here);
    EXPECT_THAT(plan(facts(allocation(AllocationSource::Hosts, {"h1", "h2"}), {"ssh"}), Starter::Auto,
                     NodesSaid::ByOthers)
                    .error()
                    .what,
                AllOf(HasSubstr("--nnodes=1,"), HasSubstr("2 hosts h1,h2")));
}

TEST(StartPlan, RequiresNnodesToMatchTheSchedulersHosts) {
    const StartFacts job = facts(allocation(AllocationSource::Pbs, {"h1", "h2", "h3"}), {"pbsdsh"});
    for (const Nodes nodes : {Nodes{3, 3}, Nodes{2, 3}}) {
        const auto all = plan(job, Starter::Auto, NodesSaid::Count, nodes);
        ASSERT_TRUE(all) << all.error().what;
        EXPECT_EQ(all->kind, StartPlan::All);
        EXPECT_EQ(all->hosts.size(), 3u);
    }
    EXPECT_THAT(plan(job, Starter::Auto, NodesSaid::Count, {2, 4}).error().what,
                AllOf(HasSubstr("--nnodes=2:4, but PBS job 12.server"), HasSubstr("3 hosts h1,h2,h3"),
                      HasSubstr("leave --nnodes out")));
}

TEST(StartRemarks, NameChunksOnOneHostWhenTheWorkerCountDiffers) {
    Allocation job = allocation(AllocationSource::Pbs, {"h1"});
    job.hosts[0].slots = 3;
    EXPECT_THAT(remarks_on(job, true, 2, 8),
                ElementsAre(AllOf(HasSubstr("h1 has 3 lines in PBS_NODEFILE"), HasSubstr("no place=scatter"),
                                  HasSubstr("--nproc-per-node=2 starts 2 workers there"))));
    EXPECT_THAT(remarks_on(job, true, 3, 8), ElementsAre()) << "mpiprocs=3";
    EXPECT_THAT(remarks_on(job, true, std::nullopt, 8), ElementsAre()) << "--nproc-per-node=auto";
    EXPECT_THAT(remarks_on(job, false, std::nullopt, 8), ElementsAre()) << "three workers";
}

TEST(StartRemarks, NameASingleWorkerPerHostInASchedulersJobWithoutACount) {
    const Allocation job = allocation(AllocationSource::Slurm, {"h1", "h2"});
    EXPECT_THAT(remarks_on(job, false, std::nullopt, 8),
                ElementsAre(HasSubstr("--nproc-per-node is not given")));
    EXPECT_THAT(remarks_on(job, false, std::nullopt, 1), ElementsAre());
    EXPECT_THAT(remarks_on(job, true, 1, 8), ElementsAre());
    EXPECT_THAT(remarks_on(allocation(AllocationSource::Hosts, {"h1", "h2"}), false, std::nullopt, 8),
                ElementsAre());
}

TEST(StartRemarks, NameMoreWorkersThanGrantedCoresInASchedulersJob) {
    EXPECT_EQ(
        remark_on_cores("Slurm", 4, 1),
        "4 workers share 1 core, all that Slurm gave this job on this host; --cpus-per-task=N asks for more");
    EXPECT_THAT(remark_on_cores("PBS", 4, 2), HasSubstr("ncpus=N in -l select asks for more"));
    EXPECT_EQ(remark_on_cores("Slurm", 4, 4), "");
    EXPECT_EQ(remark_on_cores("", 4, 1), "") << "a laptop's user knows the laptop";
}

TEST(StartRemarks, NameUnusedComponentsOfAHeterogeneousSlurmJob) {
    Allocation job = allocation(AllocationSource::Slurm, {"h1"});
    job.other_components = 1;
    EXPECT_THAT(remarks_on(job, true, 1, 8),
                ElementsAre(HasSubstr("1 more component (SLURM_HET_SIZE), whose hosts are not used")));
}

AgentCall call(SecretWay::Kind kind) {
    const SecretWay way{kind, kind == SecretWay::File ? "/home/u/.ddprun-1" : "",
                        kind == SecretWay::Cookie ? "5a17" : ""};
    return {"/opt/dd run", {"h1:4711", "10.0.0.1:4711"}, "12.server", way, -1, false};
}

const std::vector<AllocatedHost> kThree = {
    {"h1", 1, std::nullopt, 0}, {"h2", 4, std::nullopt, 1}, {"h3", 1, std::nullopt, 5}};

TEST(StarterCommand, PbsdshNamesTheFirstLineOfEachHost) {
    const auto commands =
        starter_commands(Starter::Pbsdsh, kThree, {1, 2}, call(SecretWay::Cookie), "12.server", "");
    ASSERT_EQ(commands.size(), 2u);
    EXPECT_THAT(commands[1].words, ElementsAre("pbsdsh", "-n", "5", "--", "/opt/dd run", "agent", "--at",
                                               "h1:4711,10.0.0.1:4711", "--job", "12.server", "--secret",
                                               "cookie:5a17", "--node", "2"));
    EXPECT_EQ(commands[1].nodes, std::vector<int>{2});
}

TEST(StarterCommand, SshGetsOneLineForTheShellOverThereAndNoTerminal) {
    const auto commands = starter_commands(Starter::Ssh, kThree, {1, 2}, call(SecretWay::Stdin), "", "");
    ASSERT_EQ(commands.size(), 2u);
    const auto& words = commands[0].words;
    EXPECT_EQ(words.front(), "ssh");
    EXPECT_EQ(words[words.size() - 2], "h2");
    EXPECT_EQ(words.back(),
              "exec '/opt/dd run' agent --at h1:4711,10.0.0.1:4711 --job 12.server --secret stdin --node 1");
    EXPECT_THAT(words, ::testing::Contains("BatchMode=yes"));
    EXPECT_THAT(words, ::testing::Contains("ControlMaster=no"));
    const auto attached = starter_commands(Starter::Ssh, kThree, {1, 2}, call(SecretWay::Stdin), "12.server",
                                           "/opt/pbs/bin/pbs_attach");
    EXPECT_THAT(attached[0].words.back(),
                HasSubstr("exec /opt/pbs/bin/pbs_attach -j 12.server '/opt/dd run' agent"));
}

TEST(StarterCommand, OneSrunStartsAllOtherHosts) {
    const auto commands = starter_commands(Starter::Srun, kThree, {1, 2}, call(SecretWay::Stdin), "88", "");
    ASSERT_EQ(commands.size(), 1u);
    EXPECT_EQ(commands[0].nodes, (std::vector<int>{1, 2}));
    EXPECT_THAT(commands[0].words,
                AllOf(::testing::Contains("--overlap"), ::testing::Contains("--nodes=2"),
                      ::testing::Contains("--nodelist=h2,h3"), Not(::testing::Contains("--node"))));
}

TEST(StarterCommand, SrunLeavesTheOtherHostsAloneWhenSlurmTakesOneForDown) {
    const auto commands = starter_commands(Starter::Srun, kThree, {1, 2}, call(SecretWay::Stdin), "88", "");
    EXPECT_THAT(commands[0].words, ::testing::Contains("--no-kill"));
    EXPECT_THAT(commands[0].words, ::testing::Contains("--kill-on-bad-exit=0"));
}

TEST(StarterCommand, AHeadOutsideTheHostsStartsTheFirstToo) {
    EXPECT_EQ(starter_commands(Starter::Ssh, kThree, {0, 2}, call(SecretWay::Stdin), "", "")[0].nodes,
              std::vector<int>{0});
    const auto commands = starter_commands(Starter::Srun, kThree, {0, 2}, call(SecretWay::Stdin), "88", "");
    EXPECT_EQ(commands[0].nodes, (std::vector<int>{0, 1, 2}));
    EXPECT_THAT(commands[0].words,
                AllOf(::testing::Contains("--ntasks=3"), ::testing::Contains("--nodelist=h1,h2,h3")));
}

TEST(StarterCommand, IsExplainedWhenAProgramCannotBeRunThere) {
    const StarterCommand pbsdsh =
        starter_commands(Starter::Pbsdsh, kThree, {1, 2}, call(SecretWay::Cookie), "12.server", "")[0];
    EXPECT_EQ(why_ended(pbsdsh, "pbsdsh: task 0x00000000 exit status 254", std::nullopt),
              "pbsdsh: task 0x00000000 exit status 254 (can /opt/dd run be run there?)");
    EXPECT_EQ(why_ended(pbsdsh, "pbsdsh: task 0x00000000 exit status 7", std::nullopt),
              "pbsdsh: task 0x00000000 exit status 7");
    const StarterCommand tm =
        starter_commands(Starter::Tm, kThree, {1, 2}, call(SecretWay::Cookie), "12.server", "")[0];
    EXPECT_EQ(why_ended(tm, "", std::nullopt),
              "pbs_tmrsh ended and said nothing (can /opt/dd run be run there?)");
    const StarterCommand ssh =
        starter_commands(Starter::Ssh, kThree, {1, 2}, call(SecretWay::Stdin), "", "")[0];
    EXPECT_EQ(why_ended(ssh, "", std::nullopt), "ssh ended and said nothing");
}

TEST(StarterCommand, AnExitCodeThatIsNotSshsOwnPointsToALoginFile) {
    const StarterCommand ssh =
        starter_commands(Starter::Ssh, kThree, {1, 2}, call(SecretWay::Stdin), "", "")[0];
    EXPECT_EQ(why_ended(ssh, "", 3),
              "ssh ended with exit code 3 and said nothing: does a login file of that host end the shell?");
    EXPECT_EQ(why_ended(ssh, "Welcome to h2", 0),
              "Welcome to h2; ssh ended with exit code 0: does a login file of that host end the shell?");
    EXPECT_EQ(why_ended(ssh, "ssh: No route to host", 255), "ssh: No route to host");
    EXPECT_EQ(why_ended(ssh, "ddprun: the program differs", 64), "ddprun: the program differs");
    EXPECT_EQ(why_ended(ssh, "", 137), "ssh ended with exit code 137 and said nothing");
}

TEST(StarterCommand, AnMpiexecWithoutPpnIsExplained) {
    const StarterCommand mpiexec =
        starter_commands(Starter::Mpiexec, kThree, {1, 2}, call(SecretWay::File), "", "")[0];
    EXPECT_THAT(why_ended(mpiexec, "mpiexec: Error: unknown option \"--ppn\"", 1),
                HasSubstr("PALS or Hydra is needed"));
    EXPECT_EQ(why_ended(mpiexec, "", 1), "mpiexec ended with exit code 1 and said nothing");
}

TEST(StarterCommand, BlaunchStartsEachHostOfAnLsfJobWithoutOurStandardInput) {
    const auto commands = starter_commands(Starter::Blaunch, kThree, {1, 2}, call(SecretWay::File), "", "");
    ASSERT_EQ(commands.size(), 2u);
    EXPECT_THAT(commands[1].words,
                ElementsAre("blaunch", "-n", "h3", "/opt/dd run", "agent", "--at", "h1:4711,10.0.0.1:4711",
                            "--job", "12.server", "--secret", "file:/home/u/.ddprun-1", "--node", "2"));
    EXPECT_EQ(secret_way(Starter::Blaunch, false), SecretWay::File);
    const Allocation job = allocation(AllocationSource::Lsf, {"h1", "h2"});
    EXPECT_EQ(plan(facts(job, {"ssh", "blaunch"}))->starter, Starter::Blaunch);
    EXPECT_EQ(plan(facts(job, {"ssh"}))->starter, Starter::Ssh);
    EXPECT_THAT(plan(facts(allocation(AllocationSource::Hosts, {"h1", "h2"}), {"blaunch"}), Starter::Blaunch)
                    .error()
                    .what,
                HasSubstr("not an LSF job's"));
}

TEST(StarterCommand, NoSecretIsAmongTheWords) {
    for (const Starter starter :
         {Starter::Pbsdsh, Starter::Tm, Starter::Mpiexec, Starter::Srun, Starter::Blaunch, Starter::Ssh}) {
        AgentCall agent = call(secret_way(starter, true));
        for (const StarterCommand& command : starter_commands(starter, kThree, {1, 2}, agent, "1", ""))
            EXPECT_FALSE(command.words.empty());
    }
    EXPECT_EQ(secret_way(Starter::Ssh, true), SecretWay::Stdin);
    EXPECT_EQ(secret_way(Starter::Pbsdsh, true), SecretWay::Cookie);
    EXPECT_EQ(secret_way(Starter::Pbsdsh, false), SecretWay::File);
    EXPECT_EQ(secret_way(Starter::Mpiexec, true), SecretWay::File)
        << "it forwards the environment only where it likes to";
}

TEST(StarterCommand, AgentWordsAreParsedAsTheyWereWritten) {
    for (const SecretWay::Kind kind : {SecretWay::Stdin, SecretWay::File, SecretWay::Cookie}) {
        AgentCall sent = call(kind);
        sent.node = 7;
        sent.tls = kind == SecretWay::File;
        std::vector<std::string> words = agent_words(sent);
        words.erase(words.begin());
        const auto read = parse_agent_words(words);
        ASSERT_TRUE(read) << read.error().what;
        sent.program = "";
        EXPECT_EQ(*read, sent);
    }
    EXPECT_THAT(parse_agent_words({}).error().what, HasSubstr("--at and --job"));
    EXPECT_THAT(parse_agent_words({"--node", "-1"}).error().what, HasSubstr("--node: '-1'"));
    EXPECT_THAT(parse_agent_words({"--secret", "123"}).error().what, HasSubstr("expected stdin"));
    EXPECT_THAT(parse_agent_words({"--at"}).error().what, HasSubstr("needs a value"));
}

TEST(StartOrder, ArrivesAsItWasSentWhateverItsBytes) {
    StartOrder order;
    order.arguments = {"--nproc-per-node=2", "a b", "", "\xff\xfe", "line\nline"};
    order.directory = "/work/a b";
    order.environment = {"A=1", "EMPTY=", "RAW=\x80", "NAME=x=y"};
    order.head = "login3";
    order.head_is_apart = true;
    order.hosts = {"h1", "h2"};
    order.slots = {4, 0};
    order.run_id = "5[0].server";
    order.environment_is_whole = false;
    order.ddprun = {"/opt/ddprun", 12, "sha256 1"};
    order.program = {"/w/train", 1ull << 40, "sha256 2"};
    const auto read = decode_start_order(encode(order));
    ASSERT_TRUE(read) << read.error().what;
    EXPECT_EQ(*read, order);
    const std::string text = encode(order);
    for (const std::string& broken : {std::string(), text.substr(0, 10), text + std::string(1, '\0'),
                                      std::string("{}") + std::string(1, '\0')})
        EXPECT_FALSE(decode_start_order(broken));
}

TEST(StartOrder, IsSealedInTheStoreAndRefusedWhenChanged) {
    StartOrder order;
    order.arguments = {"--nproc-per-node=2", "train"};
    order.environment = {"WANDB_API_KEY=0123456789abcdef"};
    const std::string sealed = *seal_order(order, "token");
    for (const char* shown : {"0123456789abcdef", "WANDB", "train"})
        EXPECT_THAT(sealed, Not(HasSubstr(shown)));
    EXPECT_EQ(*unseal_order(sealed, "token"), order);
    EXPECT_EQ(unseal_order(sealed, "another").error().code, Errc::Refused);
    for (std::size_t i = 0; i < sealed.size(); ++i) {
        std::string changed = sealed;
        changed[i] = static_cast<char>(changed[i] ^ 1);
        EXPECT_EQ(unseal_order(changed, "token").error().code, Errc::Refused) << i;
    }
    EXPECT_EQ(unseal_order(encode(order), "token").error().code, Errc::Refused)
        << "an order that nobody sealed";
}

bool by_ssh(std::string_view name) { return carries(Starter::Ssh, name); }

TEST(StartOrder, NeverSendsTheSchedulersCookieOrTheUsersTokenEvenIfAskedFor) {
    const std::vector<std::string> head = {"PBS_JOBCOOKIE=c", "DDPRUN_TOKEN=t", "SLURM_JWT=j"};
    for (const Starter starter :
         {Starter::Pbsdsh, Starter::Tm, Starter::Mpiexec, Starter::Srun, Starter::Ssh}) {
        const auto is_carried = [&](std::string_view name) { return carries(starter, name); };
        EXPECT_THAT(environment_to_send(head, {"PBS_JOBCOOKIE", "DDPRUN_TOKEN", "SLURM_JWT"}, is_carried),
                    ElementsAre());
    }
    EXPECT_THAT(environment_here({"A=1"}, {"PBS_JOBCOOKIE=own", "B=2"}, false),
                ElementsAre("PBS_JOBCOOKIE=own", "A=1"));
}

TEST(StartOrder, LeavesOutVariablesThatTheStarterCarries) {
    const std::vector<std::string> head = {"PATH=/conda/bin", "KEY=k", "SLURM_NTASKS=8", "TMPDIR=/tmp/head"};
    const auto sent_by = [&](Starter starter) {
        return environment_to_send(head, {}, [=](std::string_view name) { return carries(starter, name); });
    };
    EXPECT_THAT(sent_by(Starter::Ssh), ElementsAre("PATH=/conda/bin", "KEY=k", "SLURM_NTASKS=8"));
    EXPECT_THAT(sent_by(Starter::Pbsdsh), ElementsAre("PATH=/conda/bin", "KEY=k", "SLURM_NTASKS=8"));
    EXPECT_THAT(sent_by(Starter::Srun), ElementsAre("PATH=/conda/bin", "SLURM_NTASKS=8"));
    EXPECT_THAT(sent_by(Starter::Mpiexec), ElementsAre("PATH=/conda/bin"));
    EXPECT_THAT(environment_here({"PATH=/conda/bin", "SLURM_NTASKS=8"},
                                 {"PATH=/bin", "KEY=k", "SLURM_NTASKS=7"}, true),
                ElementsAre("KEY=k", "PATH=/conda/bin", "SLURM_NTASKS=8"));
}

TEST(StartOrder, LetsAHostKeepItsOwnVariablesAndTakeTheRestFromTheHead) {
    const std::vector<std::string> head = {"PATH=/conda/bin", "TMPDIR=/tmp/head", "HOSTNAME=h1",
                                           "SLURM_PROCID=0",  "SLURM_STEP_ID=1",  "MV2_COMM_WORLD_RANK=0",
                                           "PBS_JOBID=12",    "OMPI_MCA_x=1",     "SSH_CONNECTION=1"};
    const std::vector<std::string> own = {"PATH=/bin", "TMPDIR=/tmp/own", "HOME=/root", "PBS_NODENUM=2"};
    const std::vector<std::string> sent = environment_to_send(head, {}, by_ssh);
    EXPECT_THAT(sent, ElementsAre("PATH=/conda/bin", "PBS_JOBID=12"));
    EXPECT_THAT(environment_here(sent, own, false),
                ElementsAre("TMPDIR=/tmp/own", "PBS_NODENUM=2", "PATH=/conda/bin", "PBS_JOBID=12"));
}

TEST(StartOrder, SendsAHostsVariableThatIsAskedForByName) {
    const std::vector<std::string> sent =
        environment_to_send({"TMPDIR=/tmp/head", "HOSTNAME=h1"}, {"TMPDIR"}, by_ssh);
    EXPECT_THAT(sent, ElementsAre("TMPDIR=/tmp/head"));
    EXPECT_THAT(environment_here(sent, {"TMPDIR=/tmp/own"}, false), ElementsAre("TMPDIR=/tmp/head"));
}

TEST(StartOrder, SendsTheHeadsGpusOnlyWhenAUserWroteThem) {
    EXPECT_THAT(environment_to_send({"CUDA_VISIBLE_DEVICES=0,1"}, {}, by_ssh),
                ElementsAre("CUDA_VISIBLE_DEVICES=0,1"));
    EXPECT_THAT(environment_to_send({"CUDA_VISIBLE_DEVICES=GPU-5f"}, {}, by_ssh), ElementsAre());
    EXPECT_THAT(environment_here({"CUDA_VISIBLE_DEVICES=0,1"}, {}, false),
                ElementsAre("CUDA_VISIBLE_DEVICES=0,1"));
    EXPECT_THAT(environment_here({"CUDA_VISIBLE_DEVICES=0,1"}, {"CUDA_VISIBLE_DEVICES=2"}, false),
                ElementsAre("CUDA_VISIBLE_DEVICES=2"));
}

TEST(StartSecret, DiffersBetweenTwoDdprunsOfOnePbsJobByItsSalt) {
    const EnvironmentLookup job = [](std::string_view name) {
        return name == "PBS_JOBCOOKIE" ? std::optional<std::string>("cookie") : std::nullopt;
    };
    HostStart one, other;
    one.starter = other.starter = Starter::Pbsdsh;
    const std::string first = *make_start_token(one, job), second = *make_start_token(other, job);
    EXPECT_NE(first, second) << "who has recorded the order of one could give it to the hosts of the other";
    EXPECT_NE(one.call.secret.salt, "");
    one.starter = Starter::Ssh;
    one.call.secret.salt = "";
    EXPECT_NE(*make_start_token(one, job), first);
    EXPECT_EQ(one.call.secret.salt, "") << "it travels by ssh and is random";
}

TEST(StartOrder, AHostFindsItselfByItsShortOrLongName) {
    EXPECT_EQ(node_of_host({"h1", "h2.site"}, "h2"), 1);
    EXPECT_EQ(node_of_host({"h1", "h2"}, "h2.site"), 1);
    EXPECT_EQ(node_of_host({"h1", "h2"}, "h3"), -1);
}

TEST(FileIdentity, IsItsSizeAndADigestOfItsBeginning) {
    const auto self = identify_file("/proc/self/exe");
    ASSERT_TRUE(self);
    EXPECT_EQ(identify_file("/proc/self/exe")->id, self->id);
    const test::TemporaryDirectory directory;
    std::ofstream(directory.file("a")) << "echo one";
    std::ofstream(directory.file("b")) << "echo two";
    const auto a = identify_file(directory.file("a")), b = identify_file(directory.file("b"));
    ASSERT_TRUE(a && b);
    EXPECT_THAT(a->id, HasSubstr("sha256 "));
    EXPECT_EQ(difference("the program", *a, *a, "h1"), "");
    EXPECT_THAT(
        difference("the program", *a, *b, "h1"),
        AllOf(HasSubstr("the program differs"), HasSubstr(b->id), HasSubstr("on h1 "), HasSubstr(a->id)));
    EXPECT_FALSE(identify_file(directory.file("c")));
}

}  // namespace
}  // namespace ddprun
