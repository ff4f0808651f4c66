#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <time.h>

#include <filesystem>

#include "env/io/file.h"
#include "env/json.h"
#include "launcher/ends/error_file.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

Json written_for(const LauncherFailure& failure) {
    return parse_json_object(render_launcher_error_file(failure)).value_or(Json());
}

TEST(LauncherErrorFile, IsTheWorkersOwnReportWithItsCode) {
    const Json json = written_for(
        {.report =
             R"({"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback", "timestamp": "7"}}, "more": 1})",
         .message = "rank 1 on n: exit code 3",
         .error_code = 3});
    EXPECT_EQ(json,
              (Json{{"message", Json{{"message", "ValueError: no"},
                                     {"extraInfo", Json{{"py_callstack", "Traceback"}, {"timestamp", "7"}}},
                                     {"errorCode", 3}}},
                    {"more", 1}}));
}

TEST(LauncherErrorFile, KeepsAReportWhoseMessageIsTextAsTorchDoes) {
    EXPECT_EQ(written_for({.report = R"({"message": "no"})", .error_code = 3}), (Json{{"message", "no"}}));
}

TEST(LauncherErrorFile, HasTheKnownFactsIfTheWorkerLeftNoReport) {
    for (const char* report : {"", "not json", "[1]", R"({"other": 1})"}) {
        const Json json = written_for({.report = report,
                                       .message = "rank 1 on n: signal 9 (SIGKILL)",
                                       .trace = "#0 main",
                                       .error_code = -9,
                                       .unix_seconds = 12});
        EXPECT_EQ(
            json,
            (Json{{"message", Json{{"message", "rank 1 on n: signal 9 (SIGKILL)"},
                                   {"errorCode", -9},
                                   {"extraInfo", Json{{"py_callstack", "#0 main"}, {"timestamp", "12"}}}}}}))
            << report;
    }
}

TEST(LauncherErrorFile, CanBeReadByALauncherAbove) {
    const std::string text = render_launcher_error_file(
        {.message = "rank 1 on n: exit code 3", .trace = "#0 main", .error_code = 3});
    EXPECT_EQ(readable_error_file(text), "rank 1 on n: exit code 3\n#0 main");
}

TEST(LauncherErrorFile, IsWrittenOnlyIfTheVariableIsSet) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.file("error.json");
    EXPECT_TRUE(leave_error_file([](std::string_view) { return std::nullopt; }, {}));
    EXPECT_TRUE(leave_error_file([](std::string_view) { return ""; }, {}));
    ASSERT_TRUE(write_file_atomically(path, std::string(1000, 'x'), 0600));
    const auto env = [&](std::string_view name) {
        return name == "TORCHELASTIC_ERROR_FILE" ? std::optional(path) : std::nullopt;
    };
    ASSERT_TRUE(leave_error_file(env, {.message = "short"}));
    EXPECT_TRUE(parse_json_object(read_file(path, 4096).value_or(""))) << "what stood there before is gone";
    const Status nowhere =
        leave_error_file([&](std::string_view) { return std::optional(path + "/below"); }, {});
    ASSERT_FALSE(nowhere);
    EXPECT_EQ(nowhere.error().what, "open " + path + "/below: Not a directory");
}

void set_age(const std::string& path, std::chrono::seconds age) {
    const timespec then{::time(nullptr) - age.count(), 0};
    const timespec times[2] = {then, then};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(TimeOfReport, FollowsThisHostsClockWhateverTheFileSystemsClock) {
    using namespace std::chrono_literals;
    const test::TemporaryDirectory directory;
    const std::string path = directory.file("error.json");
    ASSERT_TRUE(write_file_atomically(path, "{}", 0600));
    for (const std::chrono::seconds behind : {100s, -100s}) {
        set_age(path, behind);  // the time stamp of a file server whose clock differs by this
        const TimePoint now = MonotonicClock::now();
        EXPECT_GT(time_of_report(path, "", -behind, {}), now - 50s);
        EXPECT_LE(time_of_report(path, "", -behind, {}), MonotonicClock::now());
    }
    set_age(path, 100s);
    EXPECT_LT(time_of_report(path, "", 0s, {}), MonotonicClock::now() - 50s);
    EXPECT_EQ(time_of_report(directory.file("none"), "", 0s, {}), TimePoint{});
}

TEST(TimeOfReport, LiesInTheSecondThatTorchNamesUnlessThatIsNonsense) {
    using namespace std::chrono_literals;
    const test::TemporaryDirectory directory;
    const std::string path = directory.file("error.json");
    ASSERT_TRUE(write_file_atomically(path, "{}", 0600));
    const auto age = [&](std::int64_t seconds_ago, Duration worker_age) {
        const Json extra{{"timestamp", std::to_string(::time(nullptr) - seconds_ago)}};
        const std::string report = to_text(Json{{"message", Json{{"message", "no"}, {"extraInfo", extra}}}});
        const TimePoint now = MonotonicClock::now();
        return now - time_of_report(path, report, 0s, now - worker_age);
    };
    set_age(path, 0s);
    EXPECT_GT(age(30, 100s), 25s) << "its long trace took 30 s to write";
    EXPECT_LE(age(30, 100s), 30s);
    EXPECT_LT(age(1000, 100s), 5s) << "the worker did not run then";
    EXPECT_LT(age(-1000, 100s), 5s) << "this time will come";
    set_age(path, 60s);
    EXPECT_LT(age(2, 100s), 5s) << "the clock of the file's server is late";
}

TEST(TimeOfReport, NeedsNoCorrectionOnThisHostsFileSystems) {
    const test::TemporaryDirectory directory;
    EXPECT_EQ(clock_lead_of(directory.path()), Duration::zero());
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
    EXPECT_EQ(clock_lead_of(directory.file("nowhere")), Duration::zero());
}

}  // namespace
}  // namespace ddprun
