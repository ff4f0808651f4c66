#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/group/backend_choice.h"
#include "ddp/mpi/load.h"
#include "tests/support/temporary_directory.h"

namespace {

using namespace ddp;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Device kGpu{Device::Kind::Cuda, 0};

/// One rank per entry, on those devices.
std::vector<DeviceView> node(const std::vector<std::string>& devices, int version = 22809) {
    std::vector<DeviceView> views;
    for (const std::string& device : devices)
        views.push_back({.rank = static_cast<int>(views.size()),
                         .device = device,
                         .nccl_version = version,
                         .nccl_problem = "",
                         .multi_rank = std::nullopt});
    return views;
}

std::vector<DeviceView> with_multi_rank(std::vector<DeviceView> views, bool value) {
    for (DeviceView& view : views) view.multi_rank = value;
    return views;
}

std::vector<DeviceView> without_nccl(std::vector<DeviceView> views) {
    views.back().nccl_problem = "no libnccl";
    views.back().nccl_version = 0;
    return views;
}

std::string refusal(const BackendQuestion& question) {
    try {
        const BackendChoice choice = choose_backend(question);
        return std::string("chose ") + name_of(choice.backend);
    } catch (const InvalidInput& error) {
        return error.what();
    }
}

TEST(BackendChoice, AutoDependsOnTheBuffers) {
    EXPECT_EQ(choose_backend({}).backend, Backend::Cpu);
    EXPECT_EQ(choose_backend({}).why, "auto: buffers are in host memory");
    const BackendChoice gpu = choose_backend({.device = kGpu, .node = node({"a", "b"})});
    EXPECT_EQ(gpu.backend, Backend::Nccl);
    EXPECT_EQ(gpu.why, "auto: buffers are on a CUDA device");
    EXPECT_FALSE(gpu.enable_multi_rank);
}

TEST(BackendChoice, ARequestedBackendIsUsed) {
    EXPECT_EQ(choose_backend({.requested = "cpu"}).why, "asked for");
    EXPECT_EQ(choose_backend({.requested = "nccl", .node = node({"a"})}).why, "asked for");
    EXPECT_EQ(choose_backend({.requested = "nccl", .node = node({"a"})}).backend, Backend::Nccl);
    const BackendChoice staged =
        choose_backend({.requested = "staged", .device = kGpu, .node = node({"a", "b"})});
    EXPECT_EQ(staged.backend, Backend::Staged);
    EXPECT_EQ(staged.why, "asked for");
    EXPECT_EQ(choose_backend({.requested = "staged", .node = without_nccl(node({"a", "a"}))}).backend,
              Backend::Staged)
        << "the staged backend needs no NCCL";
}

TEST(BackendChoice, RanksThatShareADeviceAreStagedWithAnOldNccl) {
    const BackendChoice choice = choose_backend({.device = kGpu, .node = node({"a", "b", "b"})});
    EXPECT_EQ(choice.backend, Backend::Staged);
    EXPECT_EQ(
        choice.why,
        "auto: ranks 1-2 share GPU b, and NCCL 2.28.9 takes one rank per GPU (2.30 and newer take more)");
    const BackendChoice none = choose_backend({.device = kGpu, .node = without_nccl(node({"b", "b"}))});
    EXPECT_EQ(none.backend, Backend::Staged);
    EXPECT_EQ(none.why, "auto: ranks 0-1 share GPU b, and there is no NCCL here");
}

TEST(BackendChoice, ANewerNcclAcceptsRanksThatShareADeviceUnlessTheUserForbidsIt) {
    const auto views = node({"b", "b"}, 23000);
    const BackendChoice choice = choose_backend({.device = kGpu, .node = views});
    EXPECT_EQ(choice.backend, Backend::Nccl);
    EXPECT_TRUE(choice.enable_multi_rank);
    EXPECT_TRUE(choose_backend({.requested = "nccl", .node = views}).enable_multi_rank);

    const BackendChoice enabled = choose_backend({.device = kGpu, .node = with_multi_rank(views, true)});
    EXPECT_EQ(enabled.backend, Backend::Nccl);
    EXPECT_FALSE(enabled.enable_multi_rank) << "the user has set it already";
    EXPECT_EQ(choose_backend({.device = kGpu, .node = with_multi_rank(views, false)}).backend,
              Backend::Staged);
}

TEST(BackendChoice, TheOldestNcclOfTheNodeDecides) {
    auto views = node({"b", "b"}, 23100);
    views[1].nccl_version = 22900;
    EXPECT_EQ(choose_backend({.device = kGpu, .node = views}).backend, Backend::Staged);
}

TEST(BackendChoice, AnImpossibleRequestIsRefusedWithTheReason) {
    EXPECT_EQ(refusal({.requested = "nccl", .node = without_nccl(node({"a"}))}), "backend nccl: no libnccl");
    EXPECT_EQ(refusal({.device = kGpu, .node = without_nccl(node({"a"}))}), "backend auto: no libnccl");
    EXPECT_THAT(refusal({.requested = "cpu", .device = {Device::Kind::Cuda, 3}}), HasSubstr("CUDA device 3"));
    EXPECT_EQ(refusal({.requested = "gloo"}),
              "no backend 'gloo'; this build has: auto, nccl, staged, cpu, mpi");
    EXPECT_THAT(refusal({.requested = "nccl", .node = node({"b", "b"})}),
                AllOf(HasSubstr("backend nccl: ranks 0-1 share GPU b"), HasSubstr("take backend staged")));
    EXPECT_THAT(refusal({.requested = "staged", .node = node({"b"}), .one_node = false}),
                HasSubstr("backend staged: it covers one node"));
    EXPECT_THAT(
        refusal({.device = kGpu, .node = node({"b", "b"}), .one_node = false}),
        AllOf(HasSubstr("backend auto: ranks 0-1 share GPU b"), HasSubstr("start fewer ranks per node")));
}

TEST(BackendChoice, AViewIsUnchangedByEncodingAndDecoding) {
    for (const std::optional<bool> multi_rank :
         {std::optional<bool>{}, std::optional(true), std::optional(false)}) {
        const DeviceView view{.rank = 17,
                              .device = "0000:41:00.0",
                              .nccl_version = 22809,
                              .nccl_problem = "two\nlines",
                              .multi_rank = multi_rank};
        EXPECT_EQ(decode_view(encode(view)), view);
    }
    EXPECT_THROW(decode_view("17\n0000"), MismatchError);
}

std::string first_module(const std::vector<std::string>& variables) {
    const auto lookup = [&](std::string_view name) -> std::optional<std::string> {
        if (std::ranges::find(variables, name) == variables.end()) return std::nullopt;
        return "0";
    };
    const ddprun::test::TemporaryDirectory empty;
    const std::vector<std::string> names = mpi::module_names(lookup, {empty.path()});
    EXPECT_EQ(names.size(), 2U) << "each family is tried, but no folder that lacks it";
    return names.front();
}

TEST(MpiModule, IsFoundInTheLibraryFolderOfThePrefixThatTheProgramIsInstalledIn) {
    const auto has = [](const char* here, const char* folder) {
        const auto folders = mpi::module_folders(here, "lib/x86_64-linux-gnu", "libexec/ddprun");
        return std::ranges::find(folders, folder) != folders.end();
    };
    EXPECT_TRUE(has("/opt/x/bin", "/opt/x/lib/x86_64-linux-gnu"));
    EXPECT_TRUE(has("/opt/x/libexec/ddprun", "/opt/x/lib/x86_64-linux-gnu"));
    EXPECT_TRUE(has("/opt/x/bin", "/opt/x/bin"));
    EXPECT_FALSE(has("/tmp/mine/build", "/tmp/lib/x86_64-linux-gnu")) << "others may write there";
}

TEST(MpiModule, KeepsTheReasonWhyTheLikeliestWasNotUsed) {
    const auto open = [](const std::string& name) -> ddprun::Result<SharedLibrary> {
        if (name == "/lib/mpich.so" || name == "openmpi.so") return SharedLibrary{name, nullptr};
        return ddprun::Error{ddprun::Errc::NotFound, name + ": undefined symbol: pmix_framework_names"};
    };
    const auto other = mpi::open_likeliest({"/lib/openmpi.so", "/lib/mpich.so"}, open);
    ASSERT_TRUE(other);
    EXPECT_EQ(other->library.name, "/lib/mpich.so");
    EXPECT_EQ(other->passed_over, "/lib/openmpi.so: undefined symbol: pmix_framework_names");
    const auto elsewhere = mpi::open_likeliest({"/lib/openmpi.so", "openmpi.so", "/lib/mpich.so"}, open);
    ASSERT_TRUE(elsewhere);
    EXPECT_EQ(elsewhere->library.name, "openmpi.so");
    EXPECT_EQ(elsewhere->passed_over, "") << "the same module in another place";
}

TEST(MpiModule, BelongsToTheLauncherOfTheProcess) {
    const std::string open_mpi = "libddp-mpi-openmpi.so", mpich = "libddp-mpi-mpich.so";
    EXPECT_EQ(first_module({"OMPI_COMM_WORLD_RANK", "PMIX_RANK"}), open_mpi);
    EXPECT_EQ(first_module({"PMI_RANK", "MPI_LOCALRANKID"}), mpich)
        << "Hydra, Intel's mpiexec and srun --mpi=pmi2 set it";
    EXPECT_EQ(first_module({"PALS_RANKID"}), mpich);
    EXPECT_EQ(first_module({"PMI_RANK", "OMPI_COMM_WORLD_RANK"}), open_mpi) << "mpirun within srun";
    EXPECT_EQ(first_module({}), open_mpi);
}

}  // namespace
