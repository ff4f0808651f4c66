#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "env/nodes/launcher_env.h"

namespace ddprun {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string, std::less<>>;

EnvironmentLookup in(const Variables& variables) {
    return [&variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
}

Variables operator+(Variables one, const Variables& other) {
    one.insert(other.begin(), other.end());
    return one;
}

std::string explanation(const Variables& variables) {
    const Result<LauncherChoice> choice = choose_launcher(in(variables));
    return choice ? choice->explanation : "error: " + choice.error().what;
}

const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"OMPI_COMM_WORLD_NODE_RANK", "1"},
                         {"OMPI_UNIVERSE_SIZE", "2"},
                         {"PMIX_RANK", "3"},
                         {"PMIX_NAMESPACE", "1176633345"}};
const Variables kHydra{{"PMI_RANK", "2"},
                       {"PMI_SIZE", "4"},
                       {"PMI_FD", "6"},
                       {"MPI_LOCALRANKID", "0"},
                       {"MPI_LOCALNRANKS", "2"}};
const Variables kStep{{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "4"},  {"SLURM_STEP_NUM_TASKS", "5"},
                      {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "2"},
                      {"SLURM_NTASKS", "9"},  {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"}};
const Variables kBatch{
    {"SLURM_JOB_ID", "77"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}};
const Variables kPbs{{"PBS_JOBID", "12.server"}, {"PBS_NODENUM", "0"}, {"PBS_TASKNUM", "1"}};
const Variables kPals{{"PALS_RANKID", "5"}, {"PALS_LOCAL_RANKID", "1"}, {"PALS_LOCAL_SIZE", "4"},
                      {"PALS_NODEID", "1"}, {"PALS_APID", "abc"},       {"PMI_RANK", "5"},
                      {"PMI_SIZE", "8"},    {"PMI_LOCAL_RANK", "1"}};
const Variables kTorchrun{{"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"TORCHELASTIC_RUN_ID", "x"}};
const Variables kByHand{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}};

struct Case {
    const char* name;
    Variables environment;
    const char* explanation;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& tested) { return tested.param.name; }

class Environments : public ::testing::TestWithParam<Case> {};

TEST_P(Environments, AreReadAs) { EXPECT_EQ(explanation(GetParam().environment), GetParam().explanation); }

INSTANTIATE_TEST_SUITE_P(
    Launchers, Environments,
    ::testing::Values(
        Case{"Nothing", {}, "launcher=none"},
        Case{"Torchrun", kTorchrun, "launcher=torchrun rank 1/2 local 1/2 node 0/1"},
        Case{"OpenMpi", kOpenMpi, "launcher=openmpi rank 3/8 local 1/4"},
        Case{"Hydra", kHydra, "launcher=pmi rank 2/4 local 0/2"},
        Case{"Pals", kPals, "launcher=pals rank 5/8 local 1/4 node 1/?"},
        Case{"Mvapich",
             {{"MV2_COMM_WORLD_RANK", "1"},
              {"MV2_COMM_WORLD_SIZE", "2"},
              {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
              {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
              {"PMI_ID", "1"}},
             "launcher=mvapich rank 1/2 local 1/2 node 0/1"},
        Case{"Jsm",
             {{"JSM_NAMESPACE_RANK", "6"},
              {"JSM_NAMESPACE_SIZE", "12"},
              {"JSM_NAMESPACE_LOCAL_RANK", "0"},
              {"JSM_NAMESPACE_LOCAL_SIZE", "6"},
              {"PMIX_RANK", "6"},
              {"OMPI_COMM_WORLD_RANK", "6"}},
             "launcher=openmpi rank 6/12 local 0/6"},
        Case{"FluxOnOneNode",
             {{"FLUX_TASK_RANK", "2"},
              {"FLUX_JOB_SIZE", "4"},
              {"FLUX_TASK_LOCAL_ID", "2"},
              {"FLUX_JOB_NNODES", "1"}},
             "launcher=flux rank 2/4 local 2/4 node 0/1"},
        Case{"SlurmStepWithUnequalNodes", kStep, "launcher=slurm rank 4/5 local 0/1 node 2/3"},
        Case{"SlurmWithPmi2TakesTheLocalRankFromSlurm",
             kStep + Variables{{"PMI_RANK", "4"}, {"PMI_SIZE", "5"}},
             "launcher=pmi rank 4/5 local 0/1 node 2/3"},
        Case{"SlurmWithPmix", kStep + Variables{{"PMIX_RANK", "4"}, {"PMIX_NAMESPACE", "slurm.pmix.77.0"}},
             "launcher=pmix rank 4/5 local 0/1 node 2/3"},
        Case{
            "SkyPilotRunsOneOnEachMachine",
            {{"SKYPILOT_NODE_RANK", "1"}, {"SKYPILOT_NUM_NODES", "2"}, {"SKYPILOT_TASK_ID", "sky-1_train-3"}},
            "launcher=skypilot rank 1/2 local 0/1 node 1/2"},
        Case{"AnMpirunInsideOfSkyPilotIsTheInnerOne",
             {{"SKYPILOT_NODE_RANK", "0"},
              {"SKYPILOT_NUM_NODES", "2"},
              {"PMI_RANK", "3"},
              {"PMI_SIZE", "8"},
              {"MPI_LOCALRANKID", "3"},
              {"MPI_LOCALNRANKS", "4"}},
             "launcher=pmi rank 3/8 local 3/4; ignored: skypilot (rank 0/2)"},
        Case{"PlainPrterun", {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "prte-1"}}, "launcher=pmix rank 1/?"}),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(
    Nested, Environments,
    ::testing::Values(
        Case{"OpenMpiInsideSbatch", kOpenMpi + kBatch,
             "launcher=openmpi rank 3/8 local 1/4; ignored: slurm (batch script)"},
        Case{"OpenMpiDaemonStartedBySrun",
             kOpenMpi +
                 Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}},
             "launcher=openmpi rank 3/8 local 1/4; ignored: slurm (rank 0/1)"},
        Case{"HydraProxyStartedBySrun",
             kHydra + Variables{{"SLURM_PROCID", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
             "launcher=pmi rank 2/4 local 0/2; ignored: slurm (rank 1/2)"},
        Case{"HydraUnderPbs", kHydra + kPbs,
             "launcher=pmi rank 2/4 local 0/2; ignored: pbs (gives no ranks)"},
        Case{"HydraUnderFlux", kHydra + Variables{{"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "2"}},
             "launcher=pmi rank 2/4 local 0/2; ignored: flux (rank 0/2)"},
        Case{"SbatchScript", kBatch, "launcher=none; ignored: slurm (batch script)"},
        Case{"ShellOfSalloc", kBatch + Variables{{"SLURM_STEP_ID", "4294967290"}},
             "launcher=none; ignored: slurm (interactive shell)"},
        Case{"PbsScript", kPbs, "launcher=none; ignored: pbs (gives no ranks)"},
        Case{"TorchrunUnderOpenMpi", kTorchrun + kOpenMpi,
             "launcher=torchrun rank 1/2 local 1/2 node 0/1; ignored: openmpi (rank 3/8), pmix (rank 3/?)"},
        Case{"HalfAContract", kOpenMpi + Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
             "launcher=openmpi rank 3/8 local 1/4; ignored: torchrun (LOCAL_RANK is not set)"},
        Case{
            "RankByHandInAShellOfSrun",
            kByHand + Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}},
            "launcher=torchrun rank 0/1 local 0/1 node 0/1; ignored: slurm (rank 0/1)"},
        Case{"MalformedOuterVariables", kOpenMpi + Variables{{"SLURM_PROCID", "x"}, {"SLURM_STEP_ID", "0"}},
             "launcher=openmpi rank 3/8 local 1/4; ignored: slurm (SLURM_PROCID='x' is not a number)"}),
    name_of_case);

TEST(LauncherEnv, ContradictingVariablesOfOneLauncherAreRefusedAndBothAreShown) {
    Variables environment = kOpenMpi;
    environment["PMIX_RANK"] = "5";
    const Result<LauncherChoice> choice = choose_launcher(in(environment));
    ASSERT_FALSE(choice);
    EXPECT_EQ(choice.error().code, Errc::Mismatch);
    EXPECT_THAT(choice.error().what, AllOf(HasSubstr("openmpi says rank 3/8 (OMPI_COMM_WORLD_RANK=3)"),
                                           HasSubstr("pmix says rank 5/? (PMIX_RANK=5)")));
    Variables pals = kPals;
    pals["PMI_RANK"] = "4";
    EXPECT_FALSE(choose_launcher(in(pals)));
}

TEST(LauncherEnv, ARankSetByHandThatContradictsTheLauncherIsRefused) {
    const Result<LauncherChoice> choice = choose_launcher(in(kByHand + kOpenMpi));
    ASSERT_FALSE(choice);
    EXPECT_THAT(choice.error().what, AllOf(HasSubstr("torchrun says rank 0/1 (RANK=0)"),
                                           HasSubstr("rank 3/8"), HasSubstr("DDPRUN_LAUNCHER")));
}

TEST(LauncherEnv, TheUserCanNameTheLauncher) {
    const Variables both = kByHand + kOpenMpi;
    EXPECT_THAT(explanation(both + Variables{{"DDPRUN_LAUNCHER", "openmpi"}}),
                HasSubstr("launcher=openmpi rank 3/8"));
    EXPECT_THAT(explanation(both + Variables{{"DDPRUN_LAUNCHER", "torchrun"}}),
                HasSubstr("launcher=torchrun rank 0/1"));
    EXPECT_THAT(explanation(both + Variables{{"DDPRUN_LAUNCHER", "none"}}), HasSubstr("launcher=none"));
    EXPECT_EQ(explanation(kBatch + Variables{{"DDPRUN_LAUNCHER", "slurm"}}),
              "error: DDPRUN_LAUNCHER=slurm: batch script");
    EXPECT_EQ(explanation({{"DDPRUN_LAUNCHER", "flux"}}),
              "error: DDPRUN_LAUNCHER=flux: its variables are not set");
    EXPECT_THAT(explanation({{"DDPRUN_LAUNCHER", "mpi"}}),
                HasSubstr("expected one of none, torchrun, openmpi"));
}

TEST(LauncherEnv, TheOverrideUnderDdprunIsAboutTheOuterLauncher) {
    const Variables worker =
        kTorchrun + kOpenMpi + Variables{{"DDPRUN_GENERATION", "1"}, {"DDPRUN_LAUNCHER", "openmpi"}};
    EXPECT_THAT(explanation(worker), HasSubstr("launcher=torchrun rank 1/2"));
}

TEST(LauncherEnv, MalformedVariablesOfTheChosenLauncherAreAnError) {
    Variables environment = kHydra;
    environment["PMI_RANK"] = "2x";
    EXPECT_EQ(explanation(environment), "error: launcher=pmi: PMI_RANK='2x' is not a number");
    environment["PMI_RANK"] = "4";
    EXPECT_EQ(explanation(environment), "error: launcher=pmi: rank 4 of 4");
}

TEST(LauncherEnv, AMalformedContractIsLeftToItsReader) {
    Variables environment = kTorchrun;
    environment["RANK"] = "x";
    const Result<LauncherChoice> choice = choose_launcher(in(environment));
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->placement->family, LauncherFamily::Torchrun);
}

TEST(LauncherEnv, APlacementBecomesTheContract) {
    const Result<LauncherChoice> choice = choose_launcher(in(kStep));
    ASSERT_TRUE(choice);
    const Result<EnvironmentList> contract = to_contract(*choice->placement);
    ASSERT_TRUE(contract);
    const EnvironmentList expected{{"RANK", "4"},
                                   {"WORLD_SIZE", "5"},
                                   {"LOCAL_RANK", "0"},
                                   {"LOCAL_WORLD_SIZE", "1"},
                                   {"GROUP_RANK", "2"},
                                   {"GROUP_WORLD_SIZE", "3"},
                                   {"TORCHELASTIC_RUN_ID", "slurm-77.0"}};
    EXPECT_EQ(*contract, expected);
}

TEST(LauncherEnv, ALauncherWithoutASizeGivesNoContract) {
    const Variables environment{{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "prte-1"}};
    const Result<LauncherChoice> choice = choose_launcher(in(environment));
    ASSERT_TRUE(choice);
    EXPECT_TRUE(choice->has_pmix);
    const Result<EnvironmentList> contract = to_contract(*choice->placement);
    ASSERT_FALSE(contract);
    EXPECT_THAT(contract.error().what, AllOf(HasSubstr("launcher=pmix rank 1/?"), HasSubstr("WORLD_SIZE")));
}

TEST(LauncherEnv, OneDdprunPerNodeTakesItsNodeRankFromTheTasksRank) {
    Variables environment = kOpenMpi;
    environment["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
    environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
    const Result<std::optional<NodePlace>> place =
        node_place(*choose_launcher(in(environment)), TaskRole::Node);
    ASSERT_TRUE(place);
    EXPECT_EQ(*place, (NodePlace{3, 8}));
}

TEST(LauncherEnv, SeveralDdprunsThatWouldEachStartAllWorkersOfANodeAreRefused) {
    const Result<std::optional<NodePlace>> place = node_place(*choose_launcher(in(kOpenMpi)), TaskRole::Node);
    ASSERT_FALSE(place);
    EXPECT_THAT(place.error().what, AllOf(HasSubstr("4 ddprun"), HasSubstr("--standalone")));
}

TEST(LauncherEnv, SeveralDdprunsOnOneNodeAreOneRankEach) {
    const Result<std::optional<NodePlace>> place = node_place(*choose_launcher(in(kOpenMpi)), TaskRole::Auto);
    ASSERT_TRUE(place);
    EXPECT_EQ(*place, (NodePlace{3, 8, true}));
}

TEST(LauncherEnv, ADdprunWithoutALauncherIsNoNode) {
    for (const Variables& environment : {Variables{}, kBatch, kPbs, kTorchrun}) {
        const Result<std::optional<NodePlace>> place =
            node_place(*choose_launcher(in(environment)), TaskRole::Auto);
        ASSERT_TRUE(place);
        EXPECT_FALSE(*place);
    }
}

TEST(LauncherEnv, PerRankNeedsALauncher) {
    for (const Variables& environment : {Variables{}, kBatch, kPbs, kTorchrun}) {
        const Result<std::optional<NodePlace>> place =
            node_place(*choose_launcher(in(environment)), TaskRole::Rank);
        ASSERT_FALSE(place);
        EXPECT_THAT(place.error().what, HasSubstr("--per-rank"));
    }
}

TEST(LauncherEnv, VariablesWithARankAreKeptFromWorkersAndUsersOnesAreNot) {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_FD", "PMI_RANK",
                             "MPI_LOCALRANKID", "PALS_RANKID", "SLURM_PROCID", "SLURM_LOCALID",
                             "OMPI_MCA_ess", "FLUX_TASK_RANK", "HYDI_CONTROL_FD"}) {
        EXPECT_TRUE(is_rank_variable(name)) << name;
    }
    for (const char* name : {"OMPI_MCA_btl", "PMIX_MCA_gds", "SLURM_JOB_ID", "SLURM_STEP_NODELIST",
                             "PBS_JOBID", "RANK", "PATH"}) {
        EXPECT_FALSE(is_rank_variable(name)) << name;
    }
}

}  // namespace
}  // namespace ddprun
