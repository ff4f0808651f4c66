#include "launcher/job_cgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using testing::HasSubstr;

constexpr std::string_view kProc = "22 28 0:21 / /proc rw,nosuid - proc proc rw\n";
constexpr std::string_view kWhole = "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n";

std::string mounts(std::string_view line) { return std::string(kProc) + std::string(line); }

TEST(OwnCgroup, StandsBelowTheMountPoint) {
    EXPECT_EQ(find_own_cgroup("0::/user.slice/job_12\n", mounts(kWhole)).directory, "/sys/fs/cgroup/user.slice/job_12");
    EXPECT_EQ(find_own_cgroup("0::/\n", mounts(kWhole)).directory, "/sys/fs/cgroup");
}

TEST(OwnCgroup, OfAHybridMachineIsThatOfVersion2) {
    const OwnCgroup own = find_own_cgroup("9:name=systemd:/\n4:memory:/jobs/17\n0::/x\n",
                                          mounts("32 31 0:35 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                                 "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"));
    EXPECT_EQ(own.directory, "/sys/fs/cgroup/unified/x");
}

TEST(OwnCgroup, OfAContainerIsSeenThroughThePartThatIsMounted) {
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
    EXPECT_THAT(find_own_cgroup("0::/\n", mounts("40 31 0:30 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n")).why, HasSubstr("read-only"));
    EXPECT_THAT(find_own_cgroup("0::/\n", mounts("40 31 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup ro\n")).why, HasSubstr("read-only"));
    EXPECT_THAT(find_own_cgroup("4:memory:/jobs/17\n", mounts(kWhole)).why, HasSubstr("version 1"));
    EXPECT_THAT(find_own_cgroup("0::/\n", mounts("")).why, HasSubstr("not mounted"));
    EXPECT_EQ(find_own_cgroup("", "").directory, "");
}

TEST(OwnCgroup, AMountPointWithABlankIsUnderstood) {
    EXPECT_EQ(find_own_cgroup("0::/x\n", mounts("40 31 0:30 / /mnt/my\\040groups rw - cgroup2 cgroup rw\n")).directory, "/mnt/my groups/x");
}

TEST(OwnCgroup, TornTextIsNoCgroup) {
    const std::string whole = mounts(kWhole);
    for (std::size_t cut = 0; cut < whole.size() - 20; ++cut) {
        EXPECT_EQ(find_own_cgroup("0::/\n", whole.substr(0, cut)).directory, "") << whole.substr(0, cut);
    }
}

TEST(JobCgroup, WhatIsNoCgroupIsLeftAsItWas) {
    const test::TemporaryDirectory directory;
    const auto cgroup = JobCgroup::create(directory.file("job"));
    ASSERT_FALSE(cgroup);
    EXPECT_THAT(cgroup.error().what, HasSubstr("cgroup.kill"));
    EXPECT_FALSE(std::filesystem::exists(directory.file("job")));
}

}  // namespace
}  // namespace ddprun
