// ddprun --tensorboard: curves of any program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <fstream>

#include "tests/support/comes.h"
#include "tests/support/curves.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

class JobCurves : public ::testing::Test {
  protected:
    std::vector<std::string> ddprun(std::vector<std::string> options,
                                    const std::vector<std::string>& program) {
        options.insert(options.begin(), path_of("DDPRUN"));
        options.insert(options.end(), program.begin(), program.end());
        return options;
    }
    Curves curves_of(const std::string& run) { return read_curves(directory_.file(run + "/ddprun")); }
    double last(const Curves& curves, const std::string& name) {
        const auto found = curves.points.find(name);
        return found == curves.points.end() ? -1 : found->second.back().second;
    }

    TemporaryDirectory directory_;
};

TEST_F(JobCurves, AWorkerThatReportsStepsShowsItsRateAndItsCommunication) {
    Program job(ddprun({"--nproc-per-node=2", "--rdzv-id=my/run", "--tensorboard=" + directory_.path()},
                       {path_of("TRAIN"), "--epochs=1000000", "--checkpoint-dir=" + directory_.file("c")}));
    ASSERT_TRUE(job.wait_for_output("epoch"));
    ASSERT_TRUE(comes([&] { return last(curves_of("my_run"), "steps/per_second") > 0; }));
    job.signal(SIGTERM);
    job.wait();
    const Curves curves = curves_of("my_run");
    EXPECT_EQ(curves.files.size(), 1U);
    EXPECT_EQ(last(curves, "job/workers"), 2);
    EXPECT_EQ(last(curves, "job/generation"), 1);
    EXPECT_EQ(last(curves, "job/restarts"), 0);
    EXPECT_GT(last(curves, "steps/done"), 0);
    EXPECT_GT(last(curves, "communication/percent_of_time"), 0);
    EXPECT_GE(last(curves, "communication/waiting_percent_of_time"), 0);
    EXPECT_GT(last(curves, "cpu/percent_of_a_core_per_worker"), 0);
    EXPECT_GT(last(curves, "memory/mib_of_all_workers"), last(curves, "memory/mib_of_largest_worker"));
    EXPECT_EQ(curves.points.count("gpu/busy_percent"), 0U);
}

TEST_F(JobCurves, ARestartIsSeenInTheSameCurve) {
    Program job(ddprun({"--rdzv-id=r", "--max-restarts=1", "--tensorboard=" + directory_.path()},
                       {path_of("PROBE"), "say", "running", "hold"}));
    ASSERT_TRUE(job.wait_for_output("running"));
    ASSERT_TRUE(comes([&] { return last(curves_of("r"), "job/workers") == 1; }));
    ::kill(children_named(job.pid(), "probe").at(0), SIGKILL);
    ASSERT_TRUE(comes([&] { return last(curves_of("r"), "job/restarts") == 1; }));
    job.signal(SIGTERM);
    job.wait();
    const Curves curves = curves_of("r");
    EXPECT_EQ(curves.points.count("steps/done"), 0U) << "the probe reports no steps";
    const std::vector<std::uint64_t> seconds = curves.steps("job/restarts");
    EXPECT_TRUE(std::is_sorted(seconds.begin(), seconds.end()));
}

TEST_F(JobCurves, WhatRankZeroToldIsOneCurveAlsoWhenItWasKilledAndRepeatsSteps) {
    const Outcome outcome = run(ddprun(
        {"--nproc-per-node=2", "--rdzv-id=r", "--max-restarts=1", "--tensorboard=" + directory_.path()},
        {path_of("PROBE"),
         "rank",
         "1",
         "tell",
         "1",
         "9",
         "other",
         "generation",
         "1",
         "hold",
         "end",
         "end",
         "generation",
         "1",
         "tell",
         "1",
         "0.5",
         "loss",
         "tell",
         "2",
         "0.4",
         "loss",
         "tell",
         "3",
         "0.3",
         "loss",
         "kill",
         "9",
         "end",
         "tell",
         "2",
         "0.25",
         "loss",
         "tell",
         "3",
         "0.2",
         "loss",
         "tell",
         "4",
         "nan",
         "loss"}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Curves curves = read_curves(directory_.file("r"));
    EXPECT_EQ(curves.files.size(), 2U);
    EXPECT_EQ(curves.points.count("other"), 0U) << "rank 1's are not read";
    ASSERT_EQ(curves.steps("loss"), steps_to(4));
    const auto& loss = curves.points.at("loss");
    EXPECT_NEAR(loss[0].second, 0.5, 1e-6);
    EXPECT_NEAR(loss[1].second, 0.25, 1e-6) << "of the second generation";
    EXPECT_TRUE(std::isnan(loss[3].second));
}

TEST_F(JobCurves, AWorkerThatWritesOverTheSegmentsHeaderEndsNoDdprun) {
    const std::string id = unique_name("scribble");
    Program job(ddprun({"--nproc-per-node=2", "--rdzv-id=" + id, "--tensorboard=" + directory_.path()},
                       {path_of("PROBE"), "scribble", "tell", "1", "0.5", "loss", "say", "up", "hold"}));
    ASSERT_TRUE(job.wait_for_output("[0]: up") && job.wait_for_output("[1]: up"));
    EXPECT_TRUE(comes([&] {
        return std::filesystem::exists(directory_.file(id)) &&
               read_curves(directory_.file(id)).steps("loss") == steps_to(1);
    }));
    EXPECT_EQ(run({path_of("DDPRUN"), "drain", "--job=" + id}).status, 0);
    const Outcome outcome = job.wait();
    EXPECT_FALSE(outcome.signaled);
    EXPECT_EQ(outcome.status, 75) << outcome.err;
}

TEST_F(JobCurves, APythonWorkerTellsEveryStepOfABurst) {
    std::ofstream(directory_.file("worker.py"))
        << "import ddprun\n"
           "for n in range(1, 3001):\n"
           "    ddprun.step(n, loss=1 / n, **{'eval/accuracy': n / 3000})\n";
    const Outcome outcome =
        run(ddprun({"--rdzv-id=r", "--tensorboard=" + directory_.path()}, {directory_.file("worker.py")}),
            with_environment({"PYTHONPATH=" + path_of("SOURCE_ROOT") + "/workers/python"}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Curves curves = read_curves(directory_.file("r"));
    EXPECT_EQ(curves.steps("loss"), steps_to(3000));
    EXPECT_EQ(curves.steps("eval/accuracy"), steps_to(3000));
}

TEST_F(JobCurves, ADirectoryThatCannotBeWrittenIsRefusedBeforeTheJobBegins) {
    std::ofstream(directory_.file("notes")) << "text";
    const Outcome outcome = run(ddprun({"--tensorboard=" + directory_.file("notes"), "--rdzv-id=r"},
                                       {path_of("PROBE"), "say", "done"}));
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("--tensorboard: " + directory_.file("notes") + ": "));
}

TEST_F(JobCurves, ADirectoryThatIsLostLaterCostsOneLineAndNotTheJob) {
    std::ofstream(directory_.file("r")) << "text";
    const Outcome outcome =
        run(ddprun({"--tensorboard=" + directory_.path(), "--rdzv-id=r"}, {path_of("PROBE"), "say", "done"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "--tensorboard"), 1) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("--tensorboard: mkdir " + directory_.file("r") +
                          "/ddprun: Not a directory; points of curves are lost, the job goes on"));
}

}  // namespace
}  // namespace ddprun::test
