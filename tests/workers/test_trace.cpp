// The trace file of one process. A trace lasts to the end of its process, so each test has a child of its
// own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include "ddp/trace/trace.h"
#include "env/io/file.h"
#include "tests/support/environment_variable.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"

namespace ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ddprun::WorkerEnv place(int rank, int ranks) {
    ddprun::WorkerEnv env;
    env.rank = env.local_rank = rank;
    env.world_size = env.local_world_size = ranks;
    return env;
}

/// Runs `act` in a child; returns its exit code, 255 after an exception.
int in_child(const std::function<int()>& act) {
    const pid_t pid = ::fork();
    if (pid == 0) {
        try {
            ::_exit(act());
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            ::_exit(255);
        }
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// The trace files of a directory, as bytes.
std::vector<std::string> files_in(const std::string& directory) {
    std::vector<std::string> files;
    for (const std::string& name : ddprun::names_in(directory))
        files.push_back(*ddprun::read_file(directory + "/" + name, ddprun::kTraceBytes));
    return files;
}
const ddprun::TraceHeader& header_in(const std::string& file) {
    return *reinterpret_cast<const ddprun::TraceHeader*>(file.data());
}
const ddprun::TraceRecord& record_in(const std::string& file, std::size_t index) {
    return reinterpret_cast<const ddprun::TraceRecord*>(file.data() + ddprun::kTraceRecordsOffset)[index];
}

/// The error of a rank that cannot make its trace file.
std::string error_in(const std::string& directory) {
    const testing::Variable variable("DDP_TRACE", directory);
    try {
        trace::enter(place(3, 4));
        return "";
    } catch (const FileError& error) {
        return error.what();
    }
}

TEST(Trace, AProcessWithoutOneWritesNothing) {
    const Span span("forward");
    trace::enter(place(0, 1));
    EXPECT_FALSE(trace::is_on());
    EXPECT_EQ(trace::current_group(), 0);
}

TEST(Trace, ASpanSurvivesAKillAndSoDoesOneThatHadNotEnded) {
    const ddprun::test::TemporaryDirectory directory;
    const testing::Variable variable("DDP_TRACE", directory.file("made/for/it"));
    const auto act = [] {
        trace::enter(place(1, 2));
        { const Span done("forward, with a name that is longer than forty-seven bytes"); }
        const Span open("backward");
        return ::raise(SIGKILL);
    };
    EXPECT_EQ(in_child(act), -1);
    const std::vector<std::string> files = files_in(directory.file("made/for/it"));
    ASSERT_EQ(files.size(), 1U);
    EXPECT_EQ(header_in(files[0]).magic, ddprun::kTraceMagic);
    EXPECT_EQ(header_in(files[0]).begun, 2U);
    const ddprun::TraceRecord &first = record_in(files[0], 0), &second = record_in(files[0], 1);
    EXPECT_EQ(first.number, 1U);
    EXPECT_STREQ(first.name, "forward, with a name that is longer than forty-");
    EXPECT_GE(first.end_ns, first.begin_ns);
    EXPECT_EQ(first.rank, 1U);
    EXPECT_EQ(first.kind, ddprun::TraceKind::Span);
    EXPECT_STREQ(second.name, "backward");
    EXPECT_EQ(second.end_ns, 0);
}

TEST(Trace, ALongNameIsCutBetweenCharacters) {
    const ddprun::test::TemporaryDirectory directory;
    const testing::Variable variable("DDP_TRACE", directory.path());
    const auto act = [] {
        trace::enter(place(0, 1));
        const Span cut("a name whose forty-eighth byte is in a letter: ß");
        return 0;
    };
    EXPECT_EQ(in_child(act), 0);
    const std::vector<std::string> files = files_in(directory.path());
    ASSERT_EQ(files.size(), 1U);
    EXPECT_STREQ(record_in(files[0], 0).name, "a name whose forty-eighth byte is in a letter: ");
}

TEST(Trace, TheOldestSpansMakeRoomAndAnOldOneEndsNoOther) {
    const ddprun::test::TemporaryDirectory directory;
    const testing::Variable variable("DDP_TRACE", directory.path());
    const auto act = [] {
        trace::enter(place(0, 1));
        const Span epoch("epoch");
        std::vector<std::unique_ptr<Span>> open;
        for (std::uint64_t i = 0; i < ddprun::kTraceRecords; ++i)
            open.push_back(std::make_unique<Span>("step"));
        return 0;
    };
    ASSERT_EQ(in_child(act), 0);
    const std::string file = files_in(directory.path()).at(0);
    EXPECT_EQ(header_in(file).begun, ddprun::kTraceRecords + 1);
    EXPECT_EQ(record_in(file, 0).number, ddprun::kTraceRecords + 1);
    EXPECT_STREQ(record_in(file, 0).name, "step");
    EXPECT_EQ(record_in(file, 1).number, 2U);
}

TEST(Trace, AForkedChildWritesNothingIntoTheFileOfItsParent) {
    const ddprun::test::TemporaryDirectory directory;
    const testing::Variable variable("DDP_TRACE", directory.path());
    const auto act = [] {
        trace::enter(place(0, 1));
        return in_child([] {
            const Span span("in the child");
            return trace::is_on() ? 1 : 0;
        });
    };
    EXPECT_EQ(in_child(act), 0);
    EXPECT_EQ(header_in(files_in(directory.path()).at(0)).begun, 0U);
}

TEST(Trace, GroupsOfTheWorldAreCountedAnewInEachGeneration) {
    const ddprun::test::TemporaryDirectory directory;
    const testing::Variable variable("DDP_TRACE", directory.path());
    const auto act = [] {
        ddprun::WorkerEnv env = place(0, 1);
        std::vector<int> groups;
        for (const std::uint64_t generation : {1U, 1U, 2U}) {
            env.generation = generation;
            trace::enter(env);
            groups.push_back(trace::current_group());
        }
        return groups == std::vector{1, 2, 1} ? 0 : 1;
    };
    EXPECT_EQ(in_child(act), 0);
    EXPECT_EQ(files_in(directory.path()).size(), 1U) << "one file for all generations of a process";
}

TEST(Trace, AFullDiskIsAnErrorThatNamesTheRankTheFileAndTheRemedy) {
    const ddprun::test::SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "mounting a file system takes root";
    EXPECT_THAT(error_in(disk.path()),
                AllOf(HasSubstr("rank 3: trace file " + disk.path() + "/rank3-"),
                      HasSubstr("No space left on device"), HasSubstr("run without a trace")));
    EXPECT_TRUE(files_in(disk.path()).empty());
    EXPECT_FALSE(trace::is_on());
}

TEST(Trace, ADirectoryThatCannotBeMadeIsAnError) {
    const ddprun::test::TemporaryDirectory directory;
    std::ofstream(directory.file("file")) << "x";
    EXPECT_THAT(error_in(directory.file("file/below")),
                AllOf(HasSubstr(directory.file("file/below")), HasSubstr("Not a directory")));
}

}  // namespace
}  // namespace ddp
