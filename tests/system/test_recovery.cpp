// A failed worker starts again in place, and the others go on (docs/elastic.md, "Recovery in place").
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <map>
#include <regex>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// ddprun with options, and the probe (recover_probe.cpp) with its arguments as the program.
std::vector<std::string> ddprun_recover(std::vector<std::string> options,
                                        const std::vector<std::string>& probe) {
    options.insert(options.begin(), path_of("DDPRUN"));
    options.push_back(path_of("RECOVER_PROBE"));
    options.insert(options.end(), probe.begin(), probe.end());
    return options;
}

/// "rank R runs in generation G as PID from UNITS", by rank and generation.
struct Life {
    pid_t pid = 0;
    int units = 0;
};
std::map<std::pair<int, int>, Life> lives(const std::string& out) {
    static const std::regex line(R"(rank (\d+) runs in generation (\d+) as (\d+) from (\d+))");
    std::map<std::pair<int, int>, Life> found;
    for (std::sregex_iterator it(out.begin(), out.end(), line); it != std::sregex_iterator(); ++it) {
        const std::smatch& one = *it;
        found[{std::stoi(one[1]), std::stoi(one[2])}] = {std::stoi(one[3]), std::stoi(one[4])};
    }
    return found;
}

std::string runs_in(int rank, int generation) {
    return "rank " + std::to_string(rank) + " runs in generation " + std::to_string(generation);
}

/// Waits until a line of the probe says that this rank runs in that generation, and returns its process.
pid_t pid_of(Program& program, const std::string& log_dir, int rank, int generation) {
    const auto find = [&]() -> pid_t {
        for (const auto& [name, text] : log_files(log_dir)) {
            const auto all = lives(text);
            if (const auto one = all.find({rank, generation}); one != all.end()) return one->second.pid;
        }
        return 0;
    };
    (void)program;
    return comes([&] { return find() != 0; }, 60s) ? find() : 0;
}

TEST(Recovery, ReplacesAKilledWorkerWhileTheOthersKeepTheirProcess) {
    const TemporaryDirectory logs;
    Program program(ddprun_recover({"--nproc-per-node=4", "--tee=3", "--log-dir=" + logs.path()}, {"400"}));
    for (int generation = 1; generation <= 3; ++generation) {
        const int rank = generation;
        const pid_t pid = pid_of(program, logs.path(), rank, generation);
        ASSERT_GT(pid, 0) << generation;
        ::kill(pid, SIGKILL);
        ASSERT_TRUE(program.wait_for_output("rank " + std::to_string(rank) + " is back"));
    }
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const auto all = lives(outcome.out);
    for (int generation = 1; generation <= 4; ++generation) {
        EXPECT_EQ(all.at({0, generation}).pid, all.at({0, 1}).pid) << "rank 0 never failed";
        EXPECT_EQ(all.at({1, generation}).pid == all.at({1, 1}).pid, generation == 1);
    }
    EXPECT_GT(all.at({3, 4}).units, 0) << "what the killed process had committed is kept";
    EXPECT_THAT(
        outcome.err,
        AllOf(HasSubstr("signal 9 (SIGKILL): 3 ranks go on in place, rank 1 starts again"),
              HasSubstr("recovered after "), Not(HasSubstr("root cause")), Not(HasSubstr("restart 1"))));
}

}  // namespace
}  // namespace ddprun::test
