#include "launcher/guard/job_cgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::HasSubstr;

constexpr std::string_view kProc = "22 28 0:21 / /proc rw,nosuid - proc proc rw\n";
constexpr std::string_view kWhole =
    "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n";

std::string mounts(std::string_view line) { return std::string(kProc) + std::string(line); }

TEST(OwnCgroup, StandsBelowTheMountPoint) {
    EXPECT_EQ(find_own_cgroup("0::/user.slice/job_12\n", mounts(kWhole)).directory,
              "/sys/fs/cgroup/user.slice/job_12");
    EXPECT_EQ(find_own_cgroup("0::/\n", mounts(kWhole)).directory, "/sys/fs/cgroup");
}

TEST(OwnCgroup, IsThatOfVersion2OnAHybridMachine) {
    const OwnCgroup own = find_own_cgroup(
        "9:name=systemd:/\n4:memory:/jobs/17\n0::/x\n",
        mounts("32 31 0:35 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
               "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"));
    EXPECT_EQ(own.directory, "/sys/fs/cgroup/unified/x");
}

TEST(OwnCgroup, IsFoundInTheMountedPartOfAContainer) {
    const std::string mount = mounts("40 31 0:30 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
    EXPECT_EQ(find_own_cgroup("0::/docker/abc\n", mount).directory, "/sys/fs/cgroup");
    EXPECT_EQ(find_own_cgroup("0::/docker/abc/x\n", mount).directory, "/sys/fs/cgroup/x");
    for (const char* elsewhere : {"0::/docker/abcd\n", "0::/docker\n", "0::/../other\n"}) {
        const OwnCgroup own = find_own_cgroup(elsewhere, mount);
        EXPECT_EQ(own.directory, "") << elsewhere;
        EXPECT_THAT(own.why, HasSubstr("/sys/fs/cgroup does not show"));
    }
}

TEST(OwnCgroup, IsNotUsedWhereItIsReadOnlyOrOfVersion1) {
    EXPECT_THAT(
        find_own_cgroup("0::/\n", mounts("40 31 0:30 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n")).why,
        HasSubstr("read-only"));
    EXPECT_THAT(find_own_cgroup("0::/\n", mounts("40 31 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup ro\n")).why,
                HasSubstr("read-only"));
    EXPECT_THAT(find_own_cgroup("4:memory:/jobs/17\n", mounts(kWhole)).why, HasSubstr("version 1"));
    EXPECT_THAT(find_own_cgroup("0::/\n", mounts("")).why, HasSubstr("not mounted"));
    EXPECT_EQ(find_own_cgroup("", "").directory, "");
}

TEST(OwnCgroup, MayHaveABlankInItsMountPoint) {
    EXPECT_EQ(find_own_cgroup("0::/x\n", mounts("40 31 0:30 / /mnt/my\\040groups rw - cgroup2 cgroup rw\n"))
                  .directory,
              "/mnt/my groups/x");
}

TEST(OwnCgroup, TruncatedTextIsNoCgroup) {
    const std::string whole = mounts(kWhole);
    for (std::size_t cut = 0; cut < whole.size() - 20; ++cut) {
        EXPECT_EQ(find_own_cgroup("0::/\n", whole.substr(0, cut)).directory, "") << whole.substr(0, cut);
    }
}

TEST(JobCgroup, LeavesADirectoryThatIsNoCgroupAsItWas) {
    const test::TemporaryDirectory directory;
    const auto cgroup = JobCgroup::create(directory.file("job"));
    ASSERT_FALSE(cgroup);
    EXPECT_THAT(cgroup.error().what, HasSubstr("cgroup.kill"));
    EXPECT_FALSE(std::filesystem::exists(directory.file("job")));
}

TEST(CgroupsOfJobs, AreThoseOfThisUserWithTheWholeName) {
    EXPECT_EQ(job_cgroup_name("0123456789abcdef"), "ddprun-job-0123456789abcdef");
    const std::vector<SiblingCgroup> siblings = {{"ddprun-job-0123456789abcdef", 1000},
                                                 {"ddprun-job-fedcba9876543210", 1001},
                                                 {"ddprun-job-fedcba987654321", 1000},
                                                 {"ddprun-job-fedcba98765432100", 1000},
                                                 {"ddprun-job-fedcba987654321g", 1000},
                                                 {"ddprun-0123456789abcdef", 1000},
                                                 {"ddprun-test-0123456789abcd", 1000},
                                                 {"user.slice", 1000},
                                                 {"", 1000}};
    EXPECT_EQ(cgroups_of_jobs(siblings, 1000), std::vector<std::string>{"ddprun-job-0123456789abcdef"});
    EXPECT_EQ(cgroups_of_jobs(siblings, 0), std::vector<std::string>{}) << "root ends nobody else's";
}

/// Directories and files as in cgroupfs; writing to cgroup.kill kills nothing here.
class AbandonedCgroups : public ::testing::Test {
  protected:
    std::string make(const std::string& name) {
        std::filesystem::create_directory(directory_.file(name));
        std::ofstream(directory_.file(name + "/cgroup.kill"));
        return name;
    }
    [[nodiscard]] bool is_killed(const std::string& name) const {
        std::ifstream file(directory_.file(name + "/cgroup.kill"));
        return !std::string(std::istreambuf_iterator<char>(file), {}).empty();
    }
    test::TemporaryDirectory directory_;
};

TEST_F(AbandonedCgroups, AreKilledAndThoseInUseAreNot) {
    const std::string left = make("ddprun-job-0123456789abcdef"), used = make("ddprun-job-1123456789abcdef"),
                      other = make("users-own");
    const UniqueFd lock(::open(directory_.file(used).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
    EXPECT_TRUE(remove_abandoned_cgroups(directory_.path()).empty())
        << "a plain directory with files cannot be removed";
    EXPECT_TRUE(is_killed(left));
    EXPECT_FALSE(is_killed(used));
    EXPECT_FALSE(is_killed(other));
}

TEST_F(AbandonedCgroups, AreRemovedAndReturnedWhenEmpty) {
    std::filesystem::create_directory(directory_.file("ddprun-job-0123456789abcdef"));
    EXPECT_EQ(remove_abandoned_cgroups(directory_.path()),
              std::vector<std::string>{"ddprun-job-0123456789abcdef"});
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
    EXPECT_TRUE(remove_abandoned_cgroups(directory_.file("nowhere")).empty());
}

TEST_F(AbandonedCgroups, AreFoundAtAnyDepthWithThoseInUse) {
    std::filesystem::create_directory(directory_.file("session"));
    const std::string outer = make("session/ddprun-job-0123456789abcdef"),
                      inner = make(outer + "/ddprun-job-1123456789abcdef");
    const UniqueFd lock(::open(directory_.file(outer).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
    EXPECT_EQ(find_job_cgroups(directory_.path()),
              (std::vector<std::string>{directory_.file(outer), directory_.file(inner)}));
    EXPECT_FALSE(is_abandoned_cgroup(directory_.file(outer)));
    EXPECT_TRUE(is_abandoned_cgroup(directory_.file(inner)));
    EXPECT_FALSE(remove_abandoned_cgroup(directory_.file(outer)));
    EXPECT_FALSE(is_killed(outer));
}

TEST(JobCgroup, IsSearchedInEveryWritableMount) {
    EXPECT_EQ(cgroup2_mounts("30 23 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n"
                             "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                             "32 23 0:26 / /ro ro - cgroup2 cgroup2 rw\n"),
              std::vector<std::string>{"/sys/fs/cgroup/unified"});
}

TEST_F(AbandonedCgroups, AreNotFoundThroughLinks) {
    const std::string target = make("elsewhere");
    std::filesystem::create_directory_symlink(directory_.file(target),
                                              directory_.file("ddprun-job-0123456789abcdef"));
    EXPECT_TRUE(remove_abandoned_cgroups(directory_.path()).empty());
    EXPECT_FALSE(is_killed(target));
}

}  // namespace
}  // namespace ddprun
