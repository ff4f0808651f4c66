#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "env/io/file.h"
#include "env/unique_fd.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using test::TemporaryDirectory;
using testing::HasSubstr;

std::size_t entries_in(const std::string& directory) {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++count;
    return count;
}

mode_t mode_of(const std::string& path) {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 07777U : 0;
}

TEST(ReadFile, GivesEveryByteBack) {
    const TemporaryDirectory dir;
    std::string content(300'000, 'x');
    content[150'000] = '\0';
    ASSERT_TRUE(write_file_atomically(dir.file("a"), content, 0644));
    EXPECT_EQ(*read_file(dir.file("a"), 1 << 20), content);
}

TEST(ReadFile, TakesExactlyTheLimitAndNotOneByteMore) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("a"), "12345", 0644));
    EXPECT_EQ(*read_file(dir.file("a"), 5), "12345");
    EXPECT_EQ(*read_file(dir.file("a"), SIZE_MAX), "12345");
    const Result<std::string> longer = read_file(dir.file("a"), 4);
    ASSERT_FALSE(longer);
    EXPECT_EQ(longer.error().code, Errc::Limit);
    EXPECT_EQ(longer.error().what, "read " + dir.file("a") + ": longer than 4 bytes");
}

TEST(RegularFile, IsReadAsAWhole) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("a"), "12345", 0644));
    EXPECT_EQ(read_regular_file(dir.file("a"), 5).value_or("?"), "12345");
    EXPECT_EQ(read_regular_file(dir.file("a"), 4).error().code, Errc::Limit);
    EXPECT_EQ(read_regular_file(dir.file("absent"), 4).error(), Error::system(dir.file("absent"), ENOENT));
}

TEST(RegularFile, APipeWithoutAWriterIsRefusedWithoutWaiting) {
    const TemporaryDirectory dir;
    ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
    EXPECT_EQ(open_regular_file(dir.file("fifo")).error().what, dir.file("fifo") + ": is a pipe, not a file");
    EXPECT_EQ(open_regular_file(dir.path()).error().what, dir.path() + ": is a directory, not a file");
    EXPECT_EQ(open_regular_file("/dev/zero").error().what, "/dev/zero: is a device, not a file");
}

TEST(ReadFile, ReadsAPipeToItsEnd) {
    const TemporaryDirectory dir;
    ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
    std::thread writer([&] {
        const UniqueFd fd(::open(dir.file("fifo").c_str(), O_WRONLY | O_CLOEXEC));
        for (const char* const piece : {"node00\n", "node01\n"}) EXPECT_EQ(::write(fd.get(), piece, 7), 7);
    });
    const Result<std::string> content = read_file(dir.file("fifo"), 1000);
    writer.join();
    ASSERT_TRUE(content);
    EXPECT_EQ(*content, "node00\nnode01\n");
}

TEST(ReadFile, NamesAFileThatItCannotRead) {
    const TemporaryDirectory dir;
    EXPECT_EQ(read_file(dir.file("none"), 10).error().what,
              "read " + dir.file("none") + ": No such file or directory");
    EXPECT_EQ(read_file(dir.path(), 10).error().what, "read " + dir.path() + ": Is a directory");
}

TEST(WriteFile, ReplacesTheOldContentAndLeavesNothingBeside) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("a"), "a long old content", 0644));
    ASSERT_TRUE(write_file_atomically(dir.file("a"), "new", 0600));
    EXPECT_EQ(*read_file(dir.file("a"), 100), "new");
    EXPECT_EQ(mode_of(dir.file("a")), 0600U);
    EXPECT_EQ(entries_in(dir.path()), 1U);
}

TEST(WriteFile, GivesTheModeThatTheUmaskLeaves) {
    const TemporaryDirectory dir;
    const mode_t before = ::umask(0077);
    const Status script = write_file_atomically(dir.file("script"), "export KEY='secret'", 0755);
    const Status report = write_file_atomically(dir.file("report"), "x", 0644);
    ::umask(022);
    const Status open_script = write_file_atomically(dir.file("open"), "x", 0755);
    ::umask(before);
    ASSERT_TRUE(script && report && open_script);
    EXPECT_EQ(mode_of(dir.file("script")), 0700U);
    EXPECT_EQ(mode_of(dir.file("report")), 0600U);
    EXPECT_EQ(mode_of(dir.file("open")), 0755U);
}

TEST(WriteFile, ReplacesALinkAndNotItsTarget) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("target"), "precious", 0644));
    ASSERT_EQ(::symlink("target", dir.file("link").c_str()), 0);
    ASSERT_TRUE(write_file_atomically(dir.file("link"), "new", 0644));
    EXPECT_EQ(*read_file(dir.file("target"), 100), "precious");
    EXPECT_EQ(*read_file(dir.file("link"), 100), "new");
}

TEST(WriteFile, KeepsTheOldFileWhenItCannotBeReplaced) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(make_directories(dir.file("a/full")));
    // The target is a directory that is not empty: the temporary file can be written and the rename fails.
    const Status written = write_file_atomically(dir.file("a"), "x", 0644);
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().what, "write " + dir.file("a") + ": Is a directory");
    EXPECT_EQ(entries_in(dir.path()), 1U);
}

TEST(WriteFile, KeepsTheOldFileAndRemovesItsOwnOnAFullDisk) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("a"), "old", 0644));
    // A limit on file sizes replaces the full disk: write(2) fails half-way, too.
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit small{4096, before.rlim_max};
    ::signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const Status written = write_file_atomically(dir.file("a"), std::string(100'000, 'x'), 0644);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    ::signal(SIGXFSZ, SIG_DFL);
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().sys, EFBIG);
    EXPECT_EQ(*read_file(dir.file("a"), 100), "old");
    EXPECT_EQ(entries_in(dir.path()), 1U);
}

TEST(WriteFile, NamesADirectoryThatDoesNotExist) {
    const TemporaryDirectory dir;
    const std::string path = dir.file("none/a");
    EXPECT_EQ(write_file_atomically(path, "x", 0644).error().what,
              "write " + path + ": No such file or directory");
}

TEST(CheckReplaceable, RefusesAPathThatCouldNotBeWritten) {
    const TemporaryDirectory dir;
    EXPECT_TRUE(check_replaceable(dir.file("new")));
    ASSERT_TRUE(write_file_atomically(dir.file("old"), "x", 0644));
    EXPECT_TRUE(check_replaceable(dir.file("old")));
    EXPECT_EQ(check_replaceable(dir.file("none/r.json")).error().what,
              dir.file("none/r.json") + ": the directory " + dir.file("none") +
                  ": No such file or directory (make it first, or name another)");
    EXPECT_THAT(check_replaceable(dir.file("old/r.json")).error().what, HasSubstr("is no directory"));
    for (const char* other : {"/dev/null", "/dev/stderr", "/tmp"}) {
        EXPECT_THAT(check_replaceable(other).error().what, HasSubstr("no regular file")) << other;
    }
}

TEST(MakeDirectories, MakesMissingDirectoriesAndAcceptsExistingOnes) {
    const TemporaryDirectory dir;
    for (const char* const path : {"a/b/c", "a/b/c", "a/b/", "a//b/d"}) {
        ASSERT_TRUE(make_directories(dir.file(path))) << path;
        EXPECT_TRUE(std::filesystem::is_directory(dir.file(path))) << path;
    }
    EXPECT_TRUE(make_directories("/"));
}

TEST(MakeDirectories, SaysThatANameIsMissing) {
    EXPECT_EQ(make_directories("").error().what, "the directory has no name");
}

TEST(MakeDirectories, NamesTheDirectoryThatFails) {
    const TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("file"), "x", 0644));
    EXPECT_EQ(make_directories(dir.file("file")).error().what,
              "mkdir " + dir.file("file") + ": Not a directory");
    EXPECT_EQ(make_directories(dir.file("file/b/c")).error().what,
              "mkdir " + dir.file("file/b") + ": Not a directory");
    EXPECT_FALSE(make_directories(""));
}

}  // namespace
}  // namespace ddprun
