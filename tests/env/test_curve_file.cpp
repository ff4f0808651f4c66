#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "env/io/curve_file.h"
#include "tests/support/curves.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using test::Curves;
using test::read_curves;
using test::steps_to;
using test::TemporaryDirectory;

constexpr double kTime = 1700000000.5;

std::string hex_of(const std::string& bytes) {
    std::string text;
    for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
}

TEST(CurveFile, SumsAreCastagnolis) {
    EXPECT_EQ(crc32c("123456789"), 0xe3069283U);  // the check value of CRC-32C in RFC 3720's polynomial
    EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);  // RFC 3720, B.4
}

TEST(CurveFile, RecordsAreThoseOfTensorBoardsOwnWriter) {
    // Printed by RecordWriter and event_pb2 of tensorboard 2.21 for the same events.
    std::string version, start, scalars;
    append_version(version, kTime);
    append_start(start, kTime, 300);
    append_scalars(scalars, kTime, 300, std::array<Scalar, 2>{{{"loss", 0.25}, {"rate", 3}}});
    EXPECT_EQ(hex_of(version),
              "1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b353110");
    EXPECT_EQ(hex_of(start), "100000000000000095fbfe180900002040fc54d94110ac023a020801b94512a3");
    EXPECT_EQ(hex_of(scalars),
              "2800000000000000ff70164a0900002040fc54d94110ac022a1a0a0b0a046c6f7373150000803e0a0b0a04726174"
              "651500004040b40680d7");
}

TEST(CurveFile, ValuesStepsAndNamesOfAnySizeAreReadBack) {
    const TemporaryDirectory dir;
    const std::string name(300, 'n');
    {
        auto file = *CurveFile::create(dir.file("a/b"));
        ASSERT_TRUE(file->add(kTime, 1, std::array<Scalar, 2>{{{name, NAN}, {"\xce\xbb", -1e30}}}));
        ASSERT_TRUE(file->add(kTime, 1ULL << 40, std::array<Scalar, 1>{{{"\xce\xbb", INFINITY}}}));
    }
    const Curves curves = read_curves(dir.file("a/b"));
    EXPECT_EQ(curves.steps(name), steps_to(1));
    EXPECT_TRUE(std::isnan(curves.points.at(name)[0].second));
    EXPECT_FLOAT_EQ(static_cast<float>(curves.points.at("\xce\xbb")[0].second), -1e30F);
    EXPECT_EQ(curves.points.at("\xce\xbb")[1], (std::pair<std::uint64_t, double>{1ULL << 40, INFINITY}));
}

TEST(CurveFile, AResumedRunIsOneCurveThoughTheEarlierFileEndsInsideARecord) {
    const TemporaryDirectory dir;
    const auto write = [&](std::uint64_t first, std::uint64_t last, double value) {
        auto file = *CurveFile::create(dir.path());
        for (std::uint64_t step = first; step <= last; ++step)
            ASSERT_TRUE(file->add(kTime, step, std::array<Scalar, 1>{{{"loss", value}}}));
    };
    write(1, 10, 1);
    const std::string first = dir.file(read_curves(dir.path()).files[0]);
    std::filesystem::resize_file(first, std::filesystem::file_size(first) - 9);
    EXPECT_EQ(read_curves(dir.path()).steps("loss"), steps_to(9));
    write(6, 8, 2);
    write(8, 12, 3);
    const Curves curves = read_curves(dir.path());
    EXPECT_EQ(curves.files.size(), 3U);
    EXPECT_EQ(curves.steps("loss"), steps_to(12));
    EXPECT_EQ(curves.points.at("loss")[4].second, 1);
    EXPECT_EQ(curves.points.at("loss")[6].second, 2);
    EXPECT_EQ(curves.points.at("loss")[7].second, 3);
}

TEST(CurveFile, TheNameOfANewFileIsTheLastAlsoBehindAHostWhoseClockIsAhead) {
    const std::vector<std::string> names = {
        "events.out.tfevents.0000000050.a.1", "events.out.tfevents.0000000200.b.1",
        "events.out.tfevents.12345678901.c.1", "events.out.tfevents.x", "model"};
    EXPECT_EQ(curve_file_times(names, 100).own, 201U);
    EXPECT_EQ(curve_file_times(names, 100).first, 50U);
    EXPECT_EQ(curve_file_times(names, 300).own, 300U);
    EXPECT_EQ(curve_file_times({}, 300).first, 300U);
}

TEST(CurveFile, PointsWaitForASecondAndForTheDestructor) {
    const TemporaryDirectory dir;
    auto file = *CurveFile::create(dir.path());
    const std::array<Scalar, 1> loss{{{"loss", 1}}};
    ASSERT_TRUE(file->add(kTime, 1, loss));
    ASSERT_TRUE(file->add(kTime + 0.9, 2, loss));
    EXPECT_EQ(read_curves(dir.path()).steps("loss"), steps_to(0));
    ASSERT_TRUE(file->add(kTime + 1, 3, loss));
    EXPECT_EQ(read_curves(dir.path()).steps("loss"), steps_to(3));
    ASSERT_TRUE(file->add(kTime + 2, 4, loss));
    file.reset();
    EXPECT_EQ(read_curves(dir.path()).steps("loss"), steps_to(4));
}

TEST(CurveFile, AFullDiskLosesPointsAndThoseAfterItAreReadAgain) {
    const test::SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "no file system may be mounted here";
    auto file = *CurveFile::create(disk.path() + "/run");
    const std::array<Scalar, 1> loss{{{"loss", 1}}};
    ASSERT_TRUE(file->add(kTime, 1, loss));
    ASSERT_TRUE(file->flush());
    std::ofstream(disk.path() + "/filler") << std::string(52 * 1024, 'x');
    for (std::uint64_t step = 2; step < 400; ++step) ASSERT_TRUE(file->add(kTime, step, loss));
    const Status written = file->flush();
    ASSERT_FALSE(written);
    EXPECT_NE(written.error().what.find(disk.path() + "/run/events.out.tfevents."), std::string::npos);
    std::filesystem::remove(disk.path() + "/filler");
    ASSERT_TRUE(file->add(kTime, 400, loss));
    ASSERT_TRUE(file->flush());
    EXPECT_EQ(read_curves(disk.path() + "/run").steps("loss"), (std::vector<std::uint64_t>{1, 400}));
}

TEST(CurveFile, ADirectoryThatIsAFileIsNamed) {
    const TemporaryDirectory dir;
    std::ofstream(dir.file("a")) << "text";
    EXPECT_EQ(CurveFile::create(dir.file("a")).error().what, "mkdir " + dir.file("a") + ": Not a directory");
}

}  // namespace
}  // namespace ddprun
