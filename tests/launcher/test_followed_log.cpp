#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "launcher/output/kept_output.h"
#include "launcher/tools/logs.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A log file that is rotated after every second line of four bytes, and its follower.
class FollowedLogTest : public ::testing::Test {
  protected:
    void SetUp() override {
        Result<LogFile> log = LogFile::open(path_, 8);
        ASSERT_TRUE(log);
        log_ = *std::move(log);
    }
    /// Writes the lines `from` to `to`, of four bytes each: "101\n".
    void write(int from, int to) {
        for (int number = from; number <= to; ++number) log_.write(std::to_string(100 + number) + "\n");
    }
    static std::string lines(int from, int to) {
        std::string text;
        for (int number = from; number <= to; ++number) text += std::to_string(100 + number) + "\n";
        return text;
    }

    TemporaryDirectory directory_;
    std::string path_ = directory_.file("stdout.log");
    LogFile log_;
    std::string read_;
    std::vector<std::string> losses_;
    FollowedLog followed_{path_, [this](std::string_view lines) { read_ += lines; },
                          [this](const std::string& what) { losses_.push_back(what); }};
};

TEST_F(FollowedLogTest, BeginsWithTheOldestPieceThatIsKept) {
    write(1, 7);  // 101 102 | 103 104 | 105 106 | 107
    EXPECT_TRUE(followed_.read_new());
    EXPECT_EQ(read_, lines(1, 7));
    EXPECT_THAT(losses_, ElementsAre());
}

TEST_F(FollowedLogTest, FollowsThroughSeveralRotationsBetweenTwoReads) {
    write(1, 1);
    EXPECT_TRUE(followed_.read_new());
    for (int at = 2; at < 40; at += 6) {
        write(at, at + 5);
        EXPECT_TRUE(followed_.read_new());
        EXPECT_EQ(read_, lines(1, at + 5));
    }
    EXPECT_THAT(losses_, ElementsAre());
}

TEST_F(FollowedLogTest, ReportsLostLinesAndGoesOnWithTheOldestPieceThatIsLeft) {
    write(1, 2);
    followed_.read_new();
    write(3, 20);  // four pieces are kept: 113 ... 120
    followed_.read_new();
    EXPECT_EQ(read_, lines(1, 2) + lines(13, 20));
    EXPECT_THAT(losses_, ElementsAre(HasSubstr("stdout.log: some lines were rotated away")));
}

TEST_F(FollowedLogTest, AHalfLineWaitsForItsEndOrTheEndOfTheFile) {
    log_.write("ha");
    followed_.read_new();
    EXPECT_EQ(read_, "");
    log_.write("lf\nno");
    followed_.read_new();
    EXPECT_EQ(read_, "half\n");
    followed_.read_rest();
    EXPECT_EQ(read_, "half\nno\n");
}

TEST(FollowedLog, AFileThatDoesNotExistYetIsWaitedFor) {
    const TemporaryDirectory directory;
    std::string read;
    FollowedLog followed(
        directory.file("later"), [&](std::string_view lines) { read += lines; }, [](const std::string&) {});
    EXPECT_FALSE(followed.read_new());
    std::ofstream(directory.file("later")) << "here\n";
    EXPECT_TRUE(followed.read_new());
    EXPECT_EQ(read, "here\n");
}

}  // namespace
}  // namespace ddprun::test
