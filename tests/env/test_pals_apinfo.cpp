#include "env/nodes/host_lists.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

void put(std::string& bytes, std::size_t offset, const void* value, std::size_t size) {
    if (bytes.size() < offset + size) bytes.resize(offset + size);
    std::memcpy(bytes.data() + offset, value, size);
}
void put_number(std::string& bytes, std::size_t offset, std::int32_t number) {
    put(bytes, offset, &number, sizeof number);
}
void put_table(std::string& bytes, int which, std::uint64_t entry, std::uint64_t offset, std::int32_t count) {
    const std::size_t at = 16 + static_cast<std::size_t>(which) * 24;
    put(bytes, at, &entry, sizeof entry);
    put(bytes, at + 8, &offset, sizeof offset);
    put_number(bytes, at + 16, count);
}

/// Four ranks on two hosts, 3 on the first, in the layout of HPE's pals.h on 64 bits.
std::string file_of(std::int32_t version, std::size_t node_bytes = 68) {
    std::string bytes(160, '\0');
    put_number(bytes, 0, version);
    put_table(bytes, 0, 60, 160, 0);
    put_table(bytes, 1, 12, 160, 0);
    put_table(bytes, 2, 12, 160, 4);
    put_table(bytes, 3, node_bytes, 208, 2);
    const std::int32_t ranks[4][3] = {{0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {2, 0, 0}};
    put(bytes, 160, ranks, sizeof ranks);
    bytes.resize(208 + 2 * node_bytes);
    std::memcpy(bytes.data() + 208 + 4, "x1000c0s0b0n0", 13);
    std::memcpy(bytes.data() + 208 + node_bytes + 4, "x1001c0s0b0n0", 13);
    const std::uint64_t size = bytes.size();
    put(bytes, 8, &size, sizeof size);
    return bytes;
}

Placement pals_rank(int rank) {
    Placement placement;
    placement.family = LauncherFamily::Pals;
    placement.rank = rank;
    return placement;
}

TEST(Apinfo, OfBothVersionsHasRanksAndHosts) {
    for (const std::int32_t version : {1, 5}) {
        const Result<PalsApplication> application = parse_apinfo(file_of(version));
        ASSERT_TRUE(application) << application.error().what;
        EXPECT_THAT(application->hosts, ElementsAre("x1000c0s0b0n0", "x1001c0s0b0n0"));
        ASSERT_EQ(application->ranks.size(), 4U);
        EXPECT_EQ(application->ranks[3].local_rank, 2);
        EXPECT_EQ(application->ranks[2].node, 1);
    }
    EXPECT_TRUE(parse_apinfo(file_of(5, 100))) << "entries that are longer than we know";
}

TEST(Apinfo, IsRefusedWhenCutOrMalformed) {
    const std::string whole = file_of(5);
    for (std::size_t length = 0; length < whole.size(); ++length)
        EXPECT_FALSE(parse_apinfo(whole.substr(0, length))) << length;
    EXPECT_THAT(parse_apinfo(file_of(6)).error().what, HasSubstr("version 6"));
    std::string nowhere = whole;
    put_number(nowhere, 160 + 8, 2);
    EXPECT_FALSE(parse_apinfo(nowhere)) << "a rank on a third host";
    std::string nameless = whole;
    nameless[208 + 4] = '\0';
    EXPECT_FALSE(parse_apinfo(nameless));
    std::string huge = whole;
    put_table(huge, 2, std::uint64_t{1} << 62, 160, 8);
    EXPECT_FALSE(parse_apinfo(huge)) << "more than there is";
}

TEST(Apinfo, FillsInFactsThatTheVariablesLack) {
    const PalsApplication application = *parse_apinfo(file_of(5));
    Placement last = pals_rank(3);
    fill_from_apinfo(last, application);
    EXPECT_EQ(describe(last), "launcher=pals rank 3/4 local 2/3 node 0/2");
    Placement alone = pals_rank(2);
    fill_from_apinfo(alone, application);
    EXPECT_EQ(describe(alone), "launcher=pals rank 2/4 local 0/1 node 1/2");
}

TEST(Apinfo, OfAnotherApplicationFillsInNothing) {
    const PalsApplication application = *parse_apinfo(file_of(5));
    Placement larger = pals_rank(1);
    larger.size = 8;
    Placement elsewhere = pals_rank(1);
    elsewhere.node_rank = 1;
    Placement other = pals_rank(1);
    other.family = LauncherFamily::Flux;
    for (Placement& one : {std::ref(larger), std::ref(elsewhere), std::ref(other)}) {
        const Placement before = one;
        fill_from_apinfo(one, application);
        EXPECT_EQ(one, before);
    }
}

TEST(Apinfo, IsReadFromTheFileInTheVariable) {
    const test::TemporaryDirectory directory;
    std::ofstream(directory.file("apinfo"), std::ios::binary) << file_of(1);
    const auto lookup = [&](std::string_view name) -> std::optional<std::string> {
        return name == "PALS_APINFO" ? std::optional(directory.file("apinfo")) : std::nullopt;
    };
    Placement placement = pals_rank(0);
    fill_from_apinfo(placement, lookup);
    EXPECT_EQ(placement.size, 4);
}

}  // namespace
}  // namespace ddprun
