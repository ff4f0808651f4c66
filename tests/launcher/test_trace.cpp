// The merging of trace files: clocks and the time line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "launcher/tools/trace/trace.h"

namespace ddprun {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kSecond = 1'000'000'000, kMicrosecond = 1000;

/// Collectives of four ranks on two hosts. Clock 1 is ahead by `offset`, and by `drift` more each nanosecond.
std::vector<Meeting> collectives(std::int64_t offset, double drift, int number, std::int64_t apart,
                                 std::mt19937& random) {
    std::uniform_int_distribution<std::int64_t> late(0, 2000 * kMicrosecond),
        leaving(2 * kMicrosecond, 60 * kMicrosecond);
    std::vector<Meeting> meetings;
    for (int i = 0; i < number; ++i) {
        const std::int64_t start = i * apart;
        std::vector<std::int64_t> entered;
        for (int rank = 0; rank < 4; ++rank) entered.push_back(start + late(random));
        const std::int64_t last = std::ranges::max(entered);
        for (std::size_t rank = 0; rank < 4; ++rank) {
            const auto by_clock = [&](std::int64_t at) {
                return rank < 2 ? at
                                : at + offset + static_cast<std::int64_t>(drift * static_cast<double>(at));
            };
            meetings.push_back({static_cast<std::uint64_t>(i), rank / 2, by_clock(entered[rank]),
                                by_clock(last + leaving(random))});
        }
    }
    return meetings;
}

TEST(Align, FindsAnOffsetOfThreeSecondsToFiftyMicroseconds) {
    std::mt19937 random(1);
    for (const std::int64_t offset : {3 * kSecond, -3 * kSecond}) {
        const auto clocks = align(collectives(offset, 0, 200, 5'000'000, random), {0, 0});
        ASSERT_EQ(clocks.size(), 2U);
        EXPECT_EQ(clocks[0].to_reference(7), 7);
        EXPECT_LE(std::abs(clocks[1].to_reference(offset + kSecond) - kSecond), 50 * kMicrosecond);
        EXPECT_EQ(clocks[1].collectives, 200U);
        EXPECT_GE(clocks[1].uncertainty_ns, 0);
    }
}

TEST(Align, KeepsTheTruthWithinItsBoundsAlsoWhereOneRankIsAlwaysLast) {
    std::vector<Meeting> meetings;
    for (std::uint64_t i = 0; i < 20; ++i) {
        const auto at = static_cast<std::int64_t>(i) * kSecond / 100;
        meetings.push_back({i, 0, at, at + 5'000'000 + 30 * kMicrosecond});
        meetings.push_back(
            {i, 1, at + 5'000'000 + 3 * kSecond, at + 5'000'000 + 10 * kMicrosecond + 3 * kSecond});
    }
    const auto clocks = align(meetings, {0, 0});
    EXPECT_LE(std::abs(clocks[1].to_reference(3 * kSecond)), 50 * kMicrosecond);
    EXPECT_GE(clocks[1].uncertainty_ns, 20 * kMicrosecond);
}

TEST(Align, FollowsAClockThatDrifts) {
    std::mt19937 random(2);
    const double drift = 20e-6;  // 2 ms in 100 s
    const auto clocks = align(collectives(3 * kSecond, drift, 20'000, 5'000'000, random), {0, 0});
    for (const std::int64_t at : {10 * kSecond, 55 * kSecond, 90 * kSecond}) {
        const std::int64_t by_clock =
            at + 3 * kSecond + static_cast<std::int64_t>(drift * static_cast<double>(at));
        EXPECT_LE(std::abs(clocks[1].to_reference(by_clock) - at), 50 * kMicrosecond) << at;
    }
}

TEST(Align, TakesTheGuessWhereNoCollectiveJoinsTwoClocks) {
    const auto clocks = align({{1, 0, 10, 20}, {2, 1, 30, 40}}, {0, 500});
    EXPECT_EQ(clocks[1].to_reference(700), 200);
    EXPECT_EQ(clocks[1].uncertainty_ns, -1);
}

TraceSpan span(TraceKind kind, std::string name, std::int64_t begin, std::int64_t end) {
    return {.kind = kind,
            .begin_ns = begin,
            .end_ns = end,
            .generation = 1,
            .thread = 40,
            .name = std::move(name)};
}
TraceSpan all_reduce(std::uint32_t rank, std::int64_t begin, std::int64_t end, std::int64_t waiting) {
    TraceSpan one = span(TraceKind::Collective, "all_reduce", begin, end);
    one.rank = rank, one.waiting_ns = waiting, one.seq = 7, one.bytes = 4096, one.group = 1;
    return one;
}

/// The complete events of that name.
std::vector<Json> events_called(const Json& trace, const std::string& name) {
    std::vector<Json> found;
    for (const Json& event : elements(member(trace, "traceEvents"))) {
        if (text_of(event, "name") == name) found.push_back(event);
    }
    return found;
}
/// The names of processes or threads.
std::vector<std::string> names_of(const Json& trace, const std::string& what) {
    std::vector<std::string> names;
    for (const Json& event : events_called(trace, what))
        names.push_back(text_of(member(event, "args"), "name"));
    return names;
}

TEST(MergedTraces, ShowEachRankAsAProcessWithItsWaitingAndTheRankThatCameLast) {
    const TraceFiles files{.processes = {{.host = "b",
                                          .pid = 41,
                                          .clock = {"clock b", 0},
                                          .spans = {all_reduce(1, 3'000'009'000, 3'000'010'000, 0)}},
                                         {.host = "a",
                                          .pid = 40,
                                          .clock = {"clock a", 0},
                                          .spans = {all_reduce(0, 2'000, 10'000, 7'000)}}}};
    const MergedTrace merged = merge_trace(files);
    const Json trace = *parse_json_object(merged.json);
    EXPECT_THAT(names_of(trace, "process_name"), ElementsAre("rank 0 (a)", "rank 1 (b)"));
    const std::vector<Json> reduces = events_called(trace, "all_reduce");
    ASSERT_EQ(reduces.size(), 2U);
    EXPECT_EQ(reduces[0]["ph"], "X");
    EXPECT_EQ(reduces[0]["pid"], 1);
    EXPECT_EQ(reduces[0]["ts"], 0);
    EXPECT_EQ(reduces[0]["dur"], 8.0);
    EXPECT_EQ(reduces[0]["args"]["seq"], 7);
    EXPECT_EQ(reduces[0]["args"]["bytes"], 4096);
    EXPECT_EQ(reduces[0]["args"]["last_rank"], 1);
    EXPECT_EQ(reduces[1]["ts"], 7.0) << "aligned by the moment of leaving";
    const std::vector<Json> waits = events_called(trace, "wait");
    ASSERT_EQ(waits.size(), 1U);
    EXPECT_EQ(waits[0]["dur"], 7.0);
    EXPECT_THAT(merged.remarks, ElementsAre(HasSubstr("clock of b: 3.000000 s ahead of a")));
}

TEST(MergedTraces, ShowAReplacedRankAsAFurtherPieceOfTheSameRank) {
    TraceSpan before = span(TraceKind::Span, "forward", 1000, 2000),
              after = span(TraceKind::Span, "forward", 9000, 9500);
    after.generation = 2, after.thread = 50;
    const TraceFiles files{.processes = {{.host = "a", .pid = 40, .clock = {"c", 0}, .spans = {before}},
                                         {.host = "b", .pid = 50, .clock = {"c", 0}, .spans = {after}}}};
    const Json trace = *parse_json_object(merge_trace(files).json);
    EXPECT_THAT(names_of(trace, "process_name"), ElementsAre("rank 0 (a, b)"));
    EXPECT_THAT(names_of(trace, "thread_name"), ElementsAre("process", "spans"));
    EXPECT_EQ(events_called(trace, "forward").size(), 2U);
    EXPECT_EQ(events_called(trace, "generation 1").size(), 1U);
    EXPECT_EQ(events_called(trace, "generation 2").at(0)["args"]["pid"], 50);
}

TEST(MergedTraces, ShowASpanThatHadNotEndedUpToTheEndOfItsProcessOrOfItsGeneration) {
    TraceSpan broken = span(TraceKind::Collective, "all_reduce", 2000, 0),
              later = span(TraceKind::Loader, "next batch", 8000, 9000);
    later.world = 2, later.generation = 2;
    TraceFiles files{
        .processes = {
            {"a", 40, {"c", 0}, 0, {span(TraceKind::Span, "forward", 1000, 0)}},
            {"a", 41, {"c", 0}, 0, {broken, span(TraceKind::Loader, "next batch", 3000, 4000), later}}}};
    const auto duration_of = [&](const char* name) {
        const Json event = events_called(*parse_json_object(merge_trace(files).json), name).at(0);
        EXPECT_EQ(event["args"]["unfinished"], true);
        return event["dur"].get<double>();
    };
    EXPECT_EQ(duration_of("forward"), 3.0);
    EXPECT_EQ(duration_of("all_reduce"), 2.0) << "its process goes on in the next generation";
    files.launchers = {{"a", {{6000, {"c", 0}, {{"event", "worker_exited"}, {"on", "a"}, {"pid", 40}}}}}};
    EXPECT_EQ(duration_of("forward"), 5.0);
}

TEST(MergedTraces, PutSpansThatOverlapWithoutNestingOnTracksBesideEachOther) {
    const TraceFiles files{.processes = {{.host = "a",
                                          .pid = 40,
                                          .clock = {"c", 0},
                                          .spans = {span(TraceKind::Span, "one", 1000, 3000),
                                                    span(TraceKind::Span, "inner", 1500, 2000),
                                                    span(TraceKind::Span, "two", 2500, 4000)}}}};
    const Json trace = *parse_json_object(merge_trace(files).json);
    const Json one = events_called(trace, "one").at(0), inner = events_called(trace, "inner").at(0),
               two = events_called(trace, "two").at(0);
    EXPECT_EQ(one["tid"], inner["tid"]);
    EXPECT_NE(one["tid"], two["tid"]);
}

TEST(MergedTraces, ShowTheEventsOfADdprunAndItsGenerations) {
    const auto event = [](const char* name, int generation, std::int64_t at) {
        return TracedEvent{at, {"c", 0}, {{"event", name}, {"generation", generation}, {"what", "\"x\""}}};
    };
    const TraceFiles files{.launchers = {{"a",
                                          {event("job_started", 0, 0), event("generation_started", 1, 1000),
                                           event("node_lost", 1, 5000), event("generation_started", 2, 6000),
                                           event("finished", 2, 9000)}}}};
    const Json trace = *parse_json_object(merge_trace(files).json);
    EXPECT_THAT(names_of(trace, "process_name"), ElementsAre("ddprun (a)"));
    EXPECT_EQ(events_called(trace, "node_lost").at(0)["args"]["what"], "\"x\"");
    EXPECT_EQ(events_called(trace, "generation 1").at(0)["dur"], 5.0);
    EXPECT_EQ(events_called(trace, "generation 2").at(0)["dur"], 3.0);
}

}  // namespace
}  // namespace ddprun
