#include "pbs/qstat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <time.h>

#include <string>

namespace ddprun::pbs {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

/// A shortened answer of OpenPBS 23.06.
std::string answer(const std::string& timestamp, const std::string& resources_used) {
    return R"({
    "timestamp":)" +
           timestamp + R"(,
    "pbs_version":"23.06.06",
    "pbs_server":"pbs01",
    "Jobs":{
        "4711.pbs01":{
            "Job_Name":"train",
            "Job_Owner":"ann@login1",)" +
           resources_used + R"(
            "job_state":"R",
            "exec_host":"node01/0*64+node02/0*64",
            "Rerunable":"True",
            "Resource_List":{
                "mem":"480gb",
                "ncpus":128,
                "ngpus":8,
                "nodect":2,
                "select":"2:ncpus=64:ngpus=4",
                "walltime":"01:00:00"
            },
            "stime":"Sat Nov 21 14:00:00 2026",
            "session_id":31337,
            "Variable_List":{
                "PBS_O_HOME":"/home/ann",
                "PBS_O_PATH":"/usr/bin:/bin"
            },
            "run_count":1
        }
    }
}
)";
}

constexpr std::int64_t kStart = 1795269600;  // Sat Nov 21 14:00:00 2026 UTC

/// All times of the test are in this zone.
struct InZone {
    explicit InZone(const char* zone) {
        ::setenv("TZ", zone, 1);
        ::tzset();
    }
    ~InZone() {
        ::unsetenv("TZ");
        ::tzset();
    }
    InZone(const InZone&) = delete;
    InZone& operator=(const InZone&) = delete;
};

std::string at(Duration age) {
    return std::to_string(kStart + std::chrono::floor<std::chrono::seconds>(age).count());
}
std::string used(const char* walltime) {
    return std::string("\n\"resources_used\":{\"cpupercent\":98,\"cput\":\"00:18:01\",\"walltime\":\"") +
           walltime + "\"},";
}

TEST(Walltime, IsReadInEveryNotation) {
    EXPECT_EQ(*parse_walltime("01:30:00"), 90min);
    EXPECT_EQ(*parse_walltime("5400"), 90min);
    EXPECT_EQ(*parse_walltime("90:00"), 90min);
    EXPECT_EQ(*parse_walltime("2:01:30:00"), 49h + 30min);
    EXPECT_EQ(*parse_walltime("100:00:00"), 100h);
}

TEST(Walltime, RefusesOtherText) {
    for (const char* text : {"", "soon", "1:2:3:4:5", "-1", "1::2", "99999999999", "99999999:0:0"}) {
        ASSERT_FALSE(parse_walltime(text)) << text;
        EXPECT_THAT(parse_walltime(text).error().what, HasSubstr("HH:MM:SS"));
    }
}

TEST(Qstat, HasTheLimitAndTheAge) {
    const InZone utc("UTC0");
    const Result<JobTime> time = parse_qstat(answer(at(10min), used("00:09:12")));
    ASSERT_TRUE(time) << time.error().what;
    EXPECT_EQ(time->limit, 1h);
    EXPECT_EQ(time->elapsed, 10min);
}

TEST(Qstat, MayLackTheUsedTimeOfAYoungJob) {
    const InZone utc("UTC0");
    EXPECT_EQ(parse_qstat(answer(at(3s), ""))->elapsed, 3s);
}

TEST(Qstat, OfAServerInAnotherZoneIsCorrectedByTheUsedTimeOrTheAge) {
    const InZone elsewhere("XXX-5:30");  // 5 h 30 min east of the server
    EXPECT_EQ(parse_qstat(answer(at(10min), used("00:09:12")))->elapsed, 10min);
    EXPECT_EQ(parse_qstat(answer(at(10min), ""), 598s)->elapsed, 10min);
    EXPECT_EQ(parse_qstat(answer(at(10min), ""))->elapsed, 10min + 5h + 30min) << "nothing to compare with";
}

TEST(Qstat, OfASuspendedJobIsNotTakenForAnotherZone) {
    const InZone utc("UTC0");
    EXPECT_EQ(parse_qstat(answer(at(50min), used("00:42:30")))->elapsed, 50min)
        << "7 min 30 s are no quarters of an hour";
}

TEST(Qstat, MayHaveNumbersInQuotes) {
    const InZone utc("UTC0");
    EXPECT_EQ(parse_qstat(answer("\"" + at(1min) + "\"", ""))->elapsed, 1min);
}

TEST(Qstat, RefusesUnusableAnswers) {
    const auto why = [](const std::string& text) {
        const Result<JobTime> time = parse_qstat(text);
        return time ? std::string("no error") : time.error().what;
    };
    EXPECT_THAT(why(""), HasSubstr("not JSON"));
    EXPECT_THAT(why("qstat: Unknown Job Id 12.pbs01\n"), HasSubstr("not JSON"));
    EXPECT_THAT(why("[]"), HasSubstr("not JSON"));
    EXPECT_THAT(why(R"({"timestamp":1,"Jobs":{}})"), HasSubstr("does not know the job"));
    EXPECT_THAT(why(R"({"timestamp":1,"Jobs":{"1":{"stime":"Sat Nov 21 14:00:00 2026"}}})"),
                HasSubstr("no walltime"));
    EXPECT_THAT(why(R"({"timestamp":1,"Jobs":{"1":{"Resource_List":{"walltime":"01:00:00"}}}})"),
                HasSubstr("not started"));
    EXPECT_THAT(
        why(R"({"Jobs":{"1":{"Resource_List":{"walltime":"01:00:00"},"stime":"Sat Nov 21 14:00:00 2026"}}})"),
        HasSubstr("not started"));
}

TEST(Qstat, RefusesImpossibleTimesWithoutOverflow) {
    for (const char* timestamp : {"57528403267", "9223372036854775807", "-9223372036854775808", "1"}) {
        EXPECT_FALSE(parse_qstat(answer(timestamp, ""))) << timestamp;
    }
}

TEST(Qstat, RefusesATornAnswerWhereverItIsTorn) {
    const std::string whole = answer(at(1min), "");
    for (std::size_t cut = 0; cut + 2 < whole.size(); ++cut)
        EXPECT_FALSE(parse_qstat(whole.substr(0, cut))) << cut;
}

}  // namespace
}  // namespace ddprun::pbs
