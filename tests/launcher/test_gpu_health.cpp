#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/machine/gpu/gpu_health.h"

namespace ddprun {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

GpuFacts healthy() {
    GpuFacts gpu;
    gpu.index = 3;
    gpu.name = "H100";
    gpu.total_bytes = 80ULL << 30;
    gpu.used_bytes = 600ULL << 20;
    gpu.ecc = true;
    gpu.uncorrected_now = gpu.uncorrected_ever = 0;
    gpu.remap_pending = gpu.remap_failed = gpu.pages_pending = gpu.mig = false;
    gpu.persistence = true;
    gpu.compute_mode = ComputeMode::Shared;
    gpu.recovery_action = 0;
    gpu.throttle_reasons = 1;  // idle
    gpu.pcie_width = gpu.pcie_max_width = 16;
    gpu.links = gpu.links_up = 18;
    return gpu;
}

struct Case {
    const char* name;
    void (*spoil)(GpuFacts&);
    Severity severity;
    const char* says;
};

// Each fault gives exactly one finding.
const Case kCases[] = {
    {"Lost", [](GpuFacts& g) { g.lost = "the GPU has fallen off the bus"; }, Severity::Error,
     "fallen off the bus"},
    {"EccErrors", [](GpuFacts& g) { g.uncorrected_now = g.uncorrected_ever = 2; }, Severity::Error,
     "since the driver was loaded: 2"},
    {"OldEccErrors", [](GpuFacts& g) { g.uncorrected_ever = 5; }, Severity::Note, "in its life: 5"},
    {"EccOff", [](GpuFacts& g) { g.ecc = false; }, Severity::Note, "ECC is off"},
    {"RemapPending", [](GpuFacts& g) { g.remap_pending = true; }, Severity::Error, "wait to be replaced"},
    {"RemapFailed", [](GpuFacts& g) { g.remap_failed = true; }, Severity::Error, "could not be replaced"},
    {"PagesPending", [](GpuFacts& g) { g.pages_pending = true; }, Severity::Error, "wait to be retired"},
    {"Reset", [](GpuFacts& g) { g.recovery_action = 1; }, Severity::Error, "asks for a reset"},
    {"Reboot", [](GpuFacts& g) { g.recovery_action = 2; }, Severity::Error, "asks for a reboot"},
    {"Drain", [](GpuFacts& g) { g.recovery_action = 3; }, Severity::Error, "stop all programs"},
    {"DrainAndReset", [](GpuFacts& g) { g.recovery_action = 4; }, Severity::Error, "then to reset"},
    {"InUse",
     [](GpuFacts& g) {
         g.processes = {{4171, 5ULL << 30, "python3"}};
     },
     Severity::Warning, "in use by python3 4171 (5 GiB)"},
    {"InUseUnseen", [](GpuFacts& g) { g.used_bytes = 20ULL << 30; }, Severity::Warning,
     "cannot be seen from here"},
    {"ExclusiveAndInUse",
     [](GpuFacts& g) {
         g.processes = {{7, std::nullopt, ""}};
         g.compute_mode = ComputeMode::ExclusiveProcess;
     },
     Severity::Error, "process 7, and its compute mode admits only one"},
    {"SharedByMps",
     [](GpuFacts& g) {
         g.processes = {{9, std::nullopt, "nvidia-cuda-mps"}};
         g.compute_mode = ComputeMode::ExclusiveProcess;
     },
     Severity::Note, "shared through MPS"},
    {"Prohibited", [](GpuFacts& g) { g.compute_mode = ComputeMode::Prohibited; }, Severity::Error,
     "forbids CUDA"},
    {"Mig", [](GpuFacts& g) { g.mig = true; }, Severity::Note, "MIG is on"},
    {"Hot",
     [](GpuFacts& g) {
         g.throttle_reasons = 0x40;
         g.celsius = 91;
     },
     Severity::Warning, "by heat at 91 C"},
    {"PowerBrake", [](GpuFacts& g) { g.throttle_reasons = 0x80; }, Severity::Warning, "by its power supply"},
    {"LinksDown", [](GpuFacts& g) { g.links_up = 16; }, Severity::Warning, "2 of 18 NVLinks are down"},
    {"NarrowPcie", [](GpuFacts& g) { g.pcie_width = 8; }, Severity::Note, "PCIe x8 where the GPU can x16"},
    {"NoPersistence", [](GpuFacts& g) { g.persistence = false; }, Severity::Note, "persistence mode is off"},
    {"Xid",
     [](GpuFacts& g) {
         g.xids = {{"", 79, ""}, {"", 79, ""}};
     },
     Severity::Warning, "XID 79 in the kernel's log (2 times): the GPU fell off the bus"},
};

class GpuHealth : public ::testing::TestWithParam<Case> {};

TEST_P(GpuHealth, GivesOneFindingPerFault) {
    GpuFacts gpu = healthy();
    GetParam().spoil(gpu);
    const std::vector<Finding> findings = gpu_health(gpu);
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].severity, GetParam().severity);
    EXPECT_EQ(findings[0].subject, "GPU 3");
    EXPECT_THAT(findings[0].what, HasSubstr(GetParam().says));
    if (findings[0].severity >= Severity::Warning) {
        EXPECT_NE(findings[0].remedy, "");
    }
    EXPECT_THAT(findings[0].remedy, ::testing::Not(HasSubstr("INDEX")));
}

INSTANTIATE_TEST_SUITE_P(Troubles, GpuHealth, ::testing::ValuesIn(kCases),
                         [](const auto& one) { return one.param.name; });

TEST(GpuHealthAlone, AHealthyGpuGivesNoFinding) { EXPECT_THAT(gpu_health(healthy()), IsEmpty()); }

TEST(GpuHealthAlone, UnknownFactsGiveNoFinding) { EXPECT_THAT(gpu_health(GpuFacts{}), IsEmpty()); }

TEST(GpuHealthAlone, AProgramsOwnFaultsInTheLogGiveNoFinding) {
    GpuFacts gpu = healthy();
    gpu.xids = {{"", 13, ""}, {"", 31, ""}, {"", 43, ""}, {"", 45, ""}};
    EXPECT_THAT(gpu_health(gpu), IsEmpty());
}

TEST(XidLine, IsReadFromTheKernelsLog) {
    const auto xid = parse_xid(
        "4,1234,5678,-;NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n");
    ASSERT_TRUE(xid);
    EXPECT_EQ(xid->bus_id, "0000:3b:00.0");
    EXPECT_EQ(xid->number, 79);
    EXPECT_EQ(xid->text, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.");
    EXPECT_FALSE(parse_xid("6,1,2,-;eth0: link up"));
    EXPECT_FALSE(parse_xid("NVRM: Xid (PCI:0000:3b:00): ninety, x"));
    EXPECT_FALSE(parse_xid("NVRM: Xid (PCI:0000:3b:00"));
}

TEST(CudaVersion, IsWrittenAsMajorDotMinor) {
    EXPECT_EQ(cuda_version_text(12040), "12.4");
    EXPECT_EQ(cuda_version_text(13000), "13.0");
}

}  // namespace
}  // namespace ddprun
