#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "env/worker_env.h"

namespace ddprun {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string, std::less<>>;

EnvironmentLookup lookup_in(const Variables& variables) {
    return [variables](std::string_view name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
    };
}

Result<WorkerEnv> read(const Variables& variables) { return worker_env_from(lookup_in(variables)); }

Variables written(const WorkerEnv& env) {
    Variables variables;
    for (const auto& [name, value] : to_environment(env)) variables[name] = value;
    return variables;
}

/// Rank 5 of 8 on the second of two nodes, with nothing left at its default.
WorkerEnv full() {
    WorkerEnv env;
    env.rank = 5;
    env.local_rank = 1;
    env.world_size = 8;
    env.local_world_size = 4;
    env.group_rank = 1;
    env.group_world_size = 2;
    env.role_name = "trainer";
    env.role_rank = 5;
    env.role_world_size = 8;
    env.master_addr = "node00";
    env.master_port = 29501;
    env.agent_store = true;
    env.restart_count = 2;
    env.max_restarts = 3;
    env.run_id = "job-17";
    env.error_file = "/tmp/errors/5.json";
    env.omp_num_threads = 6;
    env.generation = 18446744073709551615U;
    env.store = "tcp:node00:29500";
    env.token = "secret";
    env.segment_fd = 3;
    env.segment = "/proc/7/fd/9";
    env.lifeline_fd = 4;
    env.kept_fd = 5;
    return env;
}

TEST(WorkerEnv, IsReadBackAsItWasWritten) {
    const Result<WorkerEnv> env = read(written(full()));
    ASSERT_TRUE(env) << env.error().what;
    EXPECT_EQ(*env, full());
}

TEST(WorkerEnv, WritesTorchrunsNamesAndValues) {
    const Variables variables = written(full());
    EXPECT_EQ(variables.at("RANK"), "5");
    EXPECT_EQ(variables.at("LOCAL_RANK"), "1");
    EXPECT_EQ(variables.at("GROUP_RANK"), "1");
    EXPECT_EQ(variables.at("ROLE_NAME"), "trainer");
    EXPECT_EQ(variables.at("MASTER_ADDR"), "node00");
    EXPECT_EQ(variables.at("TORCHELASTIC_RESTART_COUNT"), "2");
    EXPECT_EQ(variables.at("TORCHELASTIC_USE_AGENT_STORE"), "True") << "as Python writes it";
    EXPECT_EQ(written(WorkerEnv{}).at("TORCHELASTIC_USE_AGENT_STORE"), "False");
    EXPECT_EQ(variables.at("TORCHELASTIC_RUN_ID"), "job-17");
    EXPECT_EQ(variables.at("DDPRUN_SEGMENT_FD"), "3");
}

TEST(WorkerEnv, LeavesOutAbsentValues) {
    const Variables variables = written(WorkerEnv{});
    for (const char* const absent :
         {"OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE", "DDPRUN_STORE", "DDPRUN_TOKEN", "DDPRUN_SEGMENT_FD",
          "DDPRUN_SEGMENT", "DDPRUN_LIFELINE_FD"}) {
        EXPECT_EQ(variables.count(absent), 0U) << absent;
    }
    const Result<WorkerEnv> env = read(variables);
    ASSERT_TRUE(env) << env.error().what;
    EXPECT_EQ(*env, WorkerEnv{});
}

TEST(WorkerEnv, IsAWorldOfOneWithoutVariables) {
    const Result<WorkerEnv> env = read({});
    ASSERT_TRUE(env);
    EXPECT_EQ(*env, WorkerEnv{});
}

TEST(WorkerEnv, NeedsNoLocalRankInAWorldOfOne) {
    const Result<WorkerEnv> env = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
    ASSERT_TRUE(env) << env.error().what;
    EXPECT_EQ(env->local_rank, 0);
    EXPECT_EQ(env->local_world_size, 1);
}

TEST(WorkerEnv, TakesNodesAndRolesFromRanksSetByHand) {
    const Result<WorkerEnv> env = read({{"RANK", "5"},
                                        {"WORLD_SIZE", "8"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"MASTER_ADDR", "node00"}});
    ASSERT_TRUE(env) << env.error().what;
    EXPECT_EQ(env->group_rank, 1);
    EXPECT_EQ(env->group_world_size, 2);
    EXPECT_EQ(env->role_rank, 5);
    EXPECT_EQ(env->role_world_size, 8);
}

void expect_mismatch(const Variables& variables, const std::string& message) {
    const Result<WorkerEnv> env = read(variables);
    ASSERT_FALSE(env) << message;
    EXPECT_EQ(env.error().code, Errc::Mismatch);
    EXPECT_EQ(env.error().what, message);
}

TEST(WorkerEnv, RefusesHalfAContractWithTheRemedy) {
    expect_mismatch({{"RANK", "0"}}, "RANK is set but WORLD_SIZE is not: start it with ddprun, or set both");
    expect_mismatch({{"WORLD_SIZE", "2"}},
                    "WORLD_SIZE is set but RANK is not: start it with ddprun, or set both");
    expect_mismatch(
        {{"LOCAL_RANK", "0"}},
        "LOCAL_RANK is set but RANK and WORLD_SIZE are not: start it with ddprun, or set all of them");
    expect_mismatch({{"RANK", "0"}, {"WORLD_SIZE", "2"}},
                    "WORLD_SIZE=2 but LOCAL_RANK is not set: start it with ddprun, or set LOCAL_RANK");
    expect_mismatch(
        {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
        "WORLD_SIZE=2 but LOCAL_WORLD_SIZE is not set: start it with ddprun, or set LOCAL_WORLD_SIZE");
}

TEST(WorkerEnv, NeverTakesLocalhostForRankZeroOfSeveralNodes) {
    const Variables variables{
        {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
    expect_mismatch(variables,
                    "WORLD_SIZE=2 and LOCAL_WORLD_SIZE=1 mean several nodes but MASTER_ADDR is not set: "
                    "start it with ddprun, or set MASTER_ADDR to the host of rank 0");
}

TEST(WorkerEnv, RefusesNumbersThatContradict) {
    Variables variables = written(full());
    const auto with = [&](const char* name, const char* value) {
        Variables changed = variables;
        changed[name] = value;
        return changed;
    };
    expect_mismatch(with("WORLD_SIZE", "4"), "RANK=5 must be below WORLD_SIZE=4");
    expect_mismatch(with("LOCAL_RANK", "4"), "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4");
    expect_mismatch(with("GROUP_RANK", "2"), "GROUP_RANK=2 must be below GROUP_WORLD_SIZE=2");
    expect_mismatch(with("ROLE_RANK", "8"), "ROLE_RANK=8 must be below ROLE_WORLD_SIZE=8");
    expect_mismatch(with("LOCAL_WORLD_SIZE", "9"), "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8");
}

TEST(WorkerEnv, NamesTheVariableOfEveryMalformedNumber) {
    const std::set<std::string> texts{"ROLE_NAME",
                                      "MASTER_ADDR",
                                      "TORCHELASTIC_RUN_ID",
                                      "TORCHELASTIC_USE_AGENT_STORE",
                                      "TORCHELASTIC_ERROR_FILE",
                                      "OMP_NUM_THREADS",
                                      "DDPRUN_STORE",
                                      "DDPRUN_SEGMENT",
                                      "DDPRUN_TOKEN"};
    int numbers = 0;
    for (const auto& [name, value] : written(full())) {
        if (texts.count(name) != 0) continue;
        ++numbers;
        for (const char* const bad : {"eight", "", "-1", "1 "}) {
            Variables variables = written(full());
            variables[name] = bad;
            const Result<WorkerEnv> env = read(variables);
            ASSERT_FALSE(env) << name << "=" << bad;
            EXPECT_EQ(env.error().code, Errc::InvalidArgument);
            EXPECT_THAT(env.error().what, HasSubstr(name + "='" + bad + "' is not")) << name;
        }
    }
    EXPECT_EQ(numbers, 15);
}

TEST(WorkerEnv, LeavesTheComplaintAboutOpenMpsOwnVariableToOpenMp) {
    EXPECT_EQ(read({{"OMP_NUM_THREADS", "8,2"}})->omp_num_threads, 8);
    EXPECT_EQ(read({{"OMP_NUM_THREADS", "many"}})->omp_num_threads, std::nullopt);
}

TEST(EnvironmentContract, ListsEveryVariableWrittenOnceAndWithAMeaning) {
    const EnvironmentList list = to_environment(full());
    const std::vector<EnvironmentRow>& rows = environment_contract();
    ASSERT_EQ(rows.size(), list.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(rows[i].name, list[i].first);
        EXPECT_FALSE(rows[i].meaning.empty()) << rows[i].name;
    }
}

TEST(EnvironmentContract, KeepsOnlyTheTokenSecret) {
    for (const EnvironmentRow& row : environment_contract())
        EXPECT_EQ(row.is_secret, row.name == "DDPRUN_TOKEN");
}

TEST(ProcessEnvironment, DistinguishesUnsetFromEmpty) {
    ::setenv("DDPRUN_TEST_EMPTY", "", 1);
    EXPECT_EQ(process_environment("DDPRUN_TEST_EMPTY"), "");
    ::unsetenv("DDPRUN_TEST_EMPTY");
    EXPECT_EQ(process_environment("DDPRUN_TEST_EMPTY"), std::nullopt);
}

}  // namespace
}  // namespace ddprun
