#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "ddp/scalars.h"
#include "ddp/types.h"
#include "tests/support/curves.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"

namespace ddp {
namespace {

using ddprun::test::read_curves;
using ddprun::test::SmallDisk;
using ddprun::test::steps_to;
using ddprun::test::TemporaryDirectory;

TEST(Scalars, AProgramThatResumesGoesOnWithTheSameCurve) {
    const TemporaryDirectory dir;
    for (const std::uint64_t first : {1, 4}) {
        Scalars scalars(dir.path());
        for (std::uint64_t step = first; step < first + 6; ++step)
            scalars.add(step, {{"loss", static_cast<double>(step)}, {"rate", 0.5}});
        EXPECT_EQ(scalars.failure(), "");
    }
    const auto curves = read_curves(dir.path());
    EXPECT_EQ(curves.steps("loss"), steps_to(9));
    EXPECT_EQ(curves.steps("rate"), steps_to(9));
    EXPECT_EQ(curves.files.size(), 2U);
}

TEST(Scalars, FlushWritesWhatWaits) {
    const TemporaryDirectory dir;
    Scalars scalars(dir.path());
    scalars.add(1, {{"loss", 1}});
    scalars.flush();
    EXPECT_EQ(read_curves(dir.path()).steps("loss"), steps_to(1));
}

TEST(Scalars, AFullDiskIsAValueAndTheProgramGoesOn) {
    const SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "no file system may be mounted here";
    Scalars scalars(disk.path());
    std::ofstream(disk.path() + "/filler") << std::string(64 * 1024, 'x');
    scalars.add(1, {{"loss", 1}});
    scalars.flush();
    EXPECT_NE(scalars.failure().find("No space left on device"), std::string::npos) << scalars.failure();
    const std::string first = scalars.failure();
    scalars.add(2, {{"loss", 1}});
    scalars.flush();
    EXPECT_EQ(scalars.failure(), first);
}

TEST(Scalars, ADirectoryThatCannotBeMadeIsRefusedAtOnce) {
    const TemporaryDirectory dir;
    std::ofstream(dir.file("a")) << "text";
    try {
        Scalars scalars(dir.file("a"));
        FAIL() << "no error";
    } catch (const FileError& error) {
        EXPECT_EQ(error.what(), "mkdir " + dir.file("a") + ": Not a directory");
    }
}

}  // namespace
}  // namespace ddp
