// What is installed, without the source tree: headers, libraries and pkg-config files that users compile
// against, and the programs that they run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// The timeout of a compiler that hangs; a busy machine needs a minute.
constexpr auto kPatience = std::chrono::minutes(15);
/// The place of each program among those of docs/libddp.md.
enum PageProgram : std::size_t {
    kFirstProgram,
    kStopping,
    kSharding,
    kLoader,
    kCheckpoints,
    kSpawn,
    kEigenProgram,
    kMpiProgram
};

/// Installs what has this tag below `destination`.
Outcome install(const std::string& tag, const std::string& destination) {
    RunOptions options;
    options.timeout = kPatience;
    return run({path_of("MESON"), "install", "-C", path_of("BUILD_ROOT"), "--no-rebuild", "--quiet", "--tags",
                tag, "--destdir", destination},
               options);
}

/// libddp installed for development, once for all tests here.
class Installed : public ::testing::Test {
  protected:
    static void SetUpTestSuite() {
        tree_ = std::make_unique<TemporaryDirectory>();
        const Outcome installed = install("devel", tree_->file("tree"));
        ASSERT_EQ(installed.status, 0) << installed.out << installed.err;
        for (const auto& entry : fs::recursive_directory_iterator(tree_->path())) {
            if (entry.path().filename() == "ddp.pc") pkgconfig_ = entry.path().parent_path();
            if (entry.path().filename() == "context.h") include_ = entry.path().parent_path();
        }
        ASSERT_FALSE(pkgconfig_.empty());
        ASSERT_FALSE(include_.empty());
        prefix_ = include_.parent_path().parent_path();
    }
    static void TearDownTestSuite() { tree_.reset(); }

    static std::vector<std::string> flags(const std::string& which, const std::string& package) {
        RunOptions options = with_environment({"PKG_CONFIG_PATH=" + pkgconfig_.string()});
        const Outcome told = run({"pkg-config", which, package}, options);
        EXPECT_EQ(told.status, 0) << told.err;
        std::istringstream words(told.out);
        return {std::istream_iterator<std::string>(words), {}};
    }
    static Outcome compile(std::vector<std::string> command, const std::vector<std::string>& more) {
        command.insert(command.end(), more.begin(), more.end());
        RunOptions options;
        options.timeout = kPatience;
        options.directory = tree_->path();
        return run(command, options);
    }
    /// Compiles and links the source with pkg-config's flags, and runs it.
    static Outcome run_user_program(const std::string& source, const std::string& package,
                                    const std::vector<std::string>& more = {}) {
        std::vector<std::string> command{path_of("CXX"),        "-Wall", "-Wextra", "-Werror", source, "-o",
                                         tree_->file("program")};
        command.insert(command.end(), more.begin(), more.end());
        for (const char* which : {"--cflags", "--libs"}) {
            const std::vector<std::string> words = flags(which, package);
            command.insert(command.end(), words.begin(), words.end());
        }
        Outcome made = compile(std::move(command), {});
        if (made.status != 0) return made;
        return run({tree_->file("program")}, in_tree());
    }
    /// All such blocks of a page, in order.
    static std::vector<std::string> blocks_of(const std::string& name, const std::string& fence) {
        std::ifstream file(path_of("SOURCE_ROOT") + "/docs/" + name);
        const std::string page{std::istreambuf_iterator<char>(file), {}};
        std::vector<std::string> blocks;
        for (std::size_t at = page.find(fence); at != std::string::npos; at = page.find(fence, at)) {
            at += fence.size();
            blocks.push_back(page.substr(at, page.find("```", at) - at));
            at += blocks.back().size() + 3;
        }
        return blocks;
    }
    static std::string block_of(const std::string& name, const std::string& fence) {
        return blocks_of(name, fence).at(0);
    }
    static Outcome two_ranks() {
        return run({path_of("BUILD_ROOT") + "/launcher/ddprun", "--nproc-per-node=2", tree_->file("program")},
                   in_tree());
    }
    static RunOptions in_tree() {
        RunOptions options;
        options.directory = tree_->path();
        return options;
    }
    static std::string write(const std::string& name, const std::string& text) {
        std::ofstream(tree_->file(name)) << text;
        return tree_->file(name);
    }

    static std::unique_ptr<TemporaryDirectory> tree_;
    static fs::path pkgconfig_, include_, prefix_;
};
std::unique_ptr<TemporaryDirectory> Installed::tree_;
fs::path Installed::pkgconfig_, Installed::include_, Installed::prefix_;

TEST_F(Installed, EveryHeaderCompilesAlone) {
    std::vector<std::string> sources;
    for (const auto& entry : fs::recursive_directory_iterator(include_)) {
        if (entry.path().extension() != ".h") continue;
        const std::string header = fs::relative(entry.path(), include_.parent_path());
        if (header == "ddp/torch.h") continue;  // needs LibTorch: tests/torch
        std::string name = header + ".cpp";
        std::replace(name.begin(), name.end(), '/', '_');
        sources.push_back(write(name, "#include <" + header + ">\n"));
    }
    EXPECT_GE(sources.size(), 18U);  // twelve, three for CUDA, and three that those include
    std::vector<std::string> command{path_of("CXX"), "-fsyntax-only", "-Wall", "-Wextra", "-Werror"};
    const std::vector<std::string> cflags = flags("--cflags", "ddp");
    command.insert(command.end(), cflags.begin(), cflags.end());
    const Outcome outcome = compile(std::move(command), sources);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(Installed, HeadersHaveNoNamesButThoseUnderDdp) {
    const std::string source = write(
        "names.cpp",
        "#if __has_include(<types.h>) || __has_include(<store.h>) || __has_include(<env/result.h>)\n#error\n#endif\n");
    std::vector<std::string> command{path_of("CXX"), "-fsyntax-only"};
    const std::vector<std::string> cflags = flags("--cflags", "ddp");
    command.insert(command.end(), cflags.begin(), cflags.end());
    EXPECT_EQ(compile(std::move(command), {source}).status, 0);
}

TEST_F(Installed, TheCompilerWarnsOfEveryIgnoredResult) {
    const std::string source = write("ignores.cpp", R"(
        #include <ddp/checkpoint.h>
        #include <ddp/cuda/graph.h>
        #include <ddp/ddp.h>
        #include <ddp/error_report.h>
        #include <ddp/testing.h>

        void ignore(ddp::ProcessGroup& group, ddp::Buffer buffer, ddp::cuda::Stream stream) {
            group.all_reduce(buffer);
            group.barrier();
            ddp::TimeoutScope(group, std::chrono::seconds(1));
            ddp::cuda::Capture{stream};
            ddp::power_sgd();
            ddp::load_weights("weights", {});
            ddp::run_main("program", [] { return 1; });
            ddp::testing::failures_of_ranks(2, [](ddp::ProcessGroup&) {});
        }
    )");
    std::vector<std::string> command{path_of("CXX"), "-fsyntax-only"};
    const std::vector<std::string> cflags = flags("--cflags", "ddp");
    command.insert(command.end(), cflags.begin(), cflags.end());
    const Outcome outcome = compile(std::move(command), {source});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (int line = 9; line <= 16; ++line) {
        const std::string warning = "ignores.cpp:" + std::to_string(line) + ":";
        EXPECT_THAT(outcome.err, ContainsRegex(warning + "[0-9]+: warning: ignoring"));
    }
}

TEST_F(Installed, TheProgramOfTheLibddpPageLinksAndPrintsTheSum) {
    const std::string source = write("page.cpp", blocks_of("libddp.md", "```cpp\n").at(kFirstProgram));
    const Outcome outcome = run_user_program(source, "ddp");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "rank 0 of 1: the ranks' sum is 0\n");
}

/// What the fragments of the libddp page take from their reader.
constexpr const char* kFrame = R"(
    #include <ddp/checkpoint.h>
    #include <ddp/lifeline.h>
    #include <ddp/loader.h>
    #include <ddp/model.h>
    #include <ddp/run.h>
    #include <ddp/sampler.h>
    #include <ddp/spawn.h>
    #include <ddp/stop_vote.h>
    #include <algorithm>
    #include <cstdio>
    #include <cstring>
    struct Batch {};
    const std::vector<Batch> batches(3);
    void fill(std::span<float> one, std::span<float> two) {
        std::fill(one.begin(), one.end(), 1.F), std::fill(two.begin(), two.end(), 2.F);
    }
    void backward(const Batch&, ddp::Model& model) {
        for (std::size_t i = model.parameters().size(); i-- > 0; model.mark_ready(i))
            std::fill(model.gradient_as<float>(i).begin(), model.gradient_as<float>(i).end(), 1.F);
    }
    void train_epoch(ddp::Model& model, ddp::Optimizer& optimizer, ddp::DistributedSampler& sampler) {
        for (std::size_t i = 0; i < sampler.size(); ++i) backward({}, model), model.finish(), optimizer.step();
    }
    constexpr std::size_t kPixels = 4;
    void decode(int file, std::span<std::byte> pixels) {
        const std::vector<float> values(kPixels, static_cast<float>(file));
        std::memcpy(pixels.data(), values.data(), pixels.size());
    }
    void train(ddp::ProcessGroup& group) {
        group.barrier().wait();
        if (group.rank() == 2) throw std::runtime_error("no more");
    }
    void spawn_ranks() {
        SPAWN
    }
    int main(int argc, char**) {
        if (argc > 1) {
            try { spawn_ranks(); } catch (const ddp::SpawnError& error) { std::puts(error.what()); }
            return 0;
        }
        return ddp::run([](ddp::World& world) {
            ddp::ProcessGroup* const group = &world.group();
            {
                ddp::Lifeline& lifeline = world.lifeline();
                ddp::Model model(*group, {{"weight", {1}}});
                const auto optimizer = ddp::make_adamw(model, {});
                const auto save = [] {};
                STOPPING
            }
            SHARDING
            ddp::DistributedSampler sampler(4, world.size(), world.rank());
            {
                const std::vector<int> files{10, 11, 12, 13};
                const std::vector<std::int32_t> labels{0, 1, 2, 3};
                double sum = 0;
                const auto learn = [&](std::span<const float> pixels, std::span<const std::int32_t> digits) {
                    for (std::size_t i = 0; i < digits.size(); ++i) sum += pixels[i * kPixels] - 10 == digits[i];
                };
                ddp::DistributedSampler all(4, world.size(), world.rank());
                ddp::DistributedSampler& sampler = all;
                LOADER
                if (sum * world.size() != 4) std::puts("samples are missing");
            }
            CHECKPOINTS
            std::printf("%d steps\n", static_cast<int>(optimizer->steps()));
            return 0;
        });
    }
)";

TEST_F(Installed, TheFragmentsOfTheLibddpPageMakeAProgram) {
    const std::vector<std::string> blocks = blocks_of("libddp.md", "```cpp\n");
    std::string program = kFrame;
    for (const auto& [place, block] :
         {std::pair("STOPPING", kStopping), std::pair("SHARDING", kSharding), std::pair("LOADER", kLoader),
          std::pair("SPAWN", kSpawn), std::pair("CHECKPOINTS", kCheckpoints)})
        program.replace(program.find(place), std::string(place).size(), blocks.at(block));
    const Outcome outcome = run_user_program(write("fragments.cpp", program), "ddp");
    EXPECT_EQ(outcome.out, "15 steps\n") << outcome.err;  // 3, and 4 in each of 3 epochs
    EXPECT_TRUE(fs::exists(tree_->file("run1/step-000015/model.safetensors")));
    EXPECT_THAT(two_ranks().out, AllOf(HasSubstr("[0]: 15 steps\n"), HasSubstr("[1]: 15 steps\n")))
        << "they resume, and have no epoch left";
    EXPECT_EQ(run({tree_->file("program"), "spawn"}).out, "rank 2: no more\n");
}

TEST_F(Installed, TheProgramOfEigenOnTheLibddpPageSharesMemoryWithACollectiveAndAModel) {
    if (!fs::exists("/usr/include/eigen3")) GTEST_SKIP() << "there is no Eigen";
    const std::string source = write("eigen.cpp", blocks_of("libddp.md", "```cpp\n").at(kEigenProgram));
    const Outcome outcome = run_user_program(source, "ddp", {"-isystem", "/usr/include/eigen3"});
    EXPECT_EQ(outcome.out, "4 2\n") << outcome.err;
    EXPECT_EQ(two_ranks().out, "[0]: 8 2\n");
}

TEST_F(Installed, TheProgramOfMpiOnTheLibddpPageUsesBothAtOnce) {
    const std::string source = write("mpi.cpp", blocks_of("libddp.md", "```cpp\n").at(kMpiProgram));
    if (run({"sh", "-c", "command -v mpicxx mpiexec"}).status != 0) GTEST_SKIP() << "there is no MPI";
    RunOptions with_mpicxx = with_environment({"OMPI_CXX=" + path_of("CXX"), "MPICH_CXX=" + path_of("CXX")});
    std::vector<std::string> command{"mpicxx", source, "-o", tree_->file("program")};
    for (const char* which : {"--cflags", "--libs"}) {
        const std::vector<std::string> words = flags(which, "ddp");
        command.insert(command.end(), words.begin(), words.end());
    }
    with_mpicxx.timeout = kPatience;
    const Outcome made = run(command, with_mpicxx);
    ASSERT_EQ(made.status, 0) << made.err;
    const Outcome outcome =
        run({"mpiexec", "-n", "2", tree_->file("program")},
            with_environment({"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                              "OMPI_MCA_rmaps_base_oversubscribe=1"}));
    EXPECT_EQ(outcome.out, "MPI counts 2, libddp 2\n") << outcome.err;
}

TEST_F(Installed, EveryStepOfTheTutorialCompilesAndFindsTheLine) {
    const std::string line = "y = 3.00 x + -1.00\n", source = tree_->file("line.cpp");
    const std::vector<std::string> programs = blocks_of("tutorial.md", "```cpp\n");
    const std::vector<std::string> changes = blocks_of("tutorial.md", "```diff\n");
    ASSERT_EQ(programs.size(), 2U);
    ASSERT_EQ(changes.size(), 8U);
    write("line.cpp", programs[0]);
    EXPECT_EQ(run_user_program(source, "ddp").out, line);
    const auto apply = [&](const std::string& change) {
        const Outcome patched = run({"patch", "--fuzz=0", source, write("change", change)});
        EXPECT_EQ(patched.status, 0) << patched.out << change;
    };
    for (const std::string& change : std::span(changes).first(7)) {
        apply(change);
        const Outcome alone = run_user_program(source, "ddp");
        EXPECT_EQ(alone.out, line) << alone.err << change;
    }
    const Outcome outcome = two_ranks();
    EXPECT_EQ(outcome.out, "[0]: " + line) << outcome.err;

    write("line.cpp", programs[1]);
    const Outcome alone = run_user_program(source, "ddp");
    EXPECT_THAT(alone.out, HasSubstr("epoch 30 of 30: loss ")) << alone.err;
    EXPECT_THAT(two_ranks().out,
                HasSubstr("line-checkpoints holds the whole run: 30 epochs, 30 were asked for"));

    apply(changes[7]);
    fs::remove_all(tree_->file("line-checkpoints"));
    EXPECT_THAT(run_user_program(source, "ddp").out, HasSubstr("epoch 30 of 30: loss "));
    EXPECT_THAT(two_ranks().out, HasSubstr("line-checkpoints holds the whole run"));
}

TEST_F(Installed, TheChangeOfTheRecoveryPageMakesItsExampleRecover) {
    const std::string change = write("change", block_of("recovery.md", "```diff\n"));
    const std::string source = tree_->file("recovering.cpp");
    const Outcome patched = run({"patch", "--fuzz=0", "-o", source,
                                 path_of("SOURCE_ROOT") + "/examples/linear_regression.cpp", change});
    ASSERT_EQ(patched.status, 0) << patched.out << patched.err;
    const Outcome alone = run_user_program(source, "ddp");
    EXPECT_EQ(alone.out, "1 workers found y = 3.000 x + -1.000\n") << alone.err;
    const Outcome outcome = run({path_of("BUILD_ROOT") + "/launcher/ddprun", "--nproc-per-node=3",
                                 "--rehearse=20", tree_->file("program")});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("3 workers found y = 3.000 x + -1.000"));
    EXPECT_THAT(outcome.err, HasSubstr("all ranks let go and met again"));
}

/// The folder of the package torch of the Python in PYTHON_EXEC; "" unless it has the headers of LibTorch.
std::string torch_of_python() {
    const char* const python = std::getenv("PYTHON_EXEC");
    if (python == nullptr) return "";
    std::string place = run({python, "-c", "import torch; print(torch.__path__[0], end='')"}).out;
    return fs::exists(place + "/include/torch/csrc/api/include") ? place : "";
}

TEST_F(Installed, AProgramOfPyPisLibTorchHasTheLossesOfItsPyTorch) {
    const std::string torch = torch_of_python();
    if (torch.empty()) GTEST_SKIP() << "PYTHON_EXEC names no Python with PyTorch's wheel";
    const std::string source = path_of("SOURCE_ROOT") + "/tests/torch/torch_ranks";
    std::vector<std::string> command{path_of("CXX"),  "-Wall", "-Werror",
                                     source + ".cpp", "-o",    tree_->file("ranks")};
    for (const char* which : {"--cflags", "--libs"}) {
        const std::vector<std::string> words = flags(which, "ddp");
        command.insert(command.end(), words.begin(), words.end());
    }
    const Outcome made =
        compile(std::move(command),
                {"-isystem", torch + "/include", "-isystem", torch + "/include/torch/csrc/api/include",
                 "-L" + torch + "/lib", "-Wl,-rpath," + torch + "/lib", "-ltorch", "-ltorch_cpu", "-lc10"});
    ASSERT_EQ(made.status, 0) << made.err;
    const fs::path place = tree_->file("losses");
    fs::create_directory(place);
    for (const std::string& program : {tree_->file("ranks"), source + ".py"}) {
        const Outcome outcome =
            run({path_of("BUILD_ROOT") + "/launcher/ddprun", "--nproc-per-node=2", program, place, "resume"});
        EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    }
}

TEST_F(Installed, PkgConfigFindsTheTreeWhereverItLiesAndRequiresNoFurtherPackage) {
    const std::string words =
        testing::PrintToString(flags("--cflags", "ddp")) + testing::PrintToString(flags("--libs", "ddp"));
    EXPECT_THAT(words, AllOf(HasSubstr("-I" + std::string(tree_->path())),
                             HasSubstr("-L" + std::string(tree_->path()))));
    EXPECT_THAT(words, Not(AnyOf(HasSubstr("fmt"), HasSubstr(".a\"")))) << "a path of a library is no option";
    const RunOptions options = with_environment({"PKG_CONFIG_PATH=" + pkgconfig_.string()});
    EXPECT_THAT(run({"pkg-config", "--print-requires", "ddp"}, options).out, Not(HasSubstr("fmt")));

    const RunOptions below =
        with_environment({"PKG_CONFIG_LIBDIR=" + pkgconfig_.string() + ":/usr/lib/x86_64-linux-gnu/pkgconfig",
                          "PKG_CONFIG_SYSROOT_DIR=/sysroot"});
    std::istringstream paths(run({"pkg-config", "--libs-only-L", "--cflags-only-I", "ddp"}, below).out);
    for (std::string path; paths >> path;) EXPECT_THAT(path.substr(2), StartsWith("/sysroot"));
}

/// Builds the project of CMakeLists.txt in `source` with the package of `prefix`. Returns the build folder.
fs::path cmake_build(const fs::path& source, const fs::path& prefix, const fs::path& pkgconfig) {
    RunOptions options = with_environment({"PKG_CONFIG_PATH=" + pkgconfig.string(), "CXX=" + path_of("CXX")});
    options.timeout = kPatience;
    const fs::path build = source / "build";
    const Outcome configured =
        run({path_of("CMAKE"), "-S", source, "-B", build, "-DCMAKE_PREFIX_PATH=" + prefix.string()}, options);
    EXPECT_EQ(configured.status, 0) << configured.err;
    const Outcome built = run({path_of("CMAKE"), "--build", build}, options);
    EXPECT_EQ(built.status, 0) << built.out << built.err;
    return build;
}

/// A project of examples/sum_of_ranks.cpp, which each of `programs` is built from. Returns their output.
std::string cmake_project(const fs::path& source, const fs::path& prefix, const std::string& uses,
                          const std::vector<std::string>& programs, const fs::path& pkgconfig) {
    fs::create_directories(source);
    fs::copy_file(path_of("SOURCE_ROOT") + "/examples/sum_of_ranks.cpp", source / "sum.cpp");
    std::ofstream(source / "CMakeLists.txt") << "cmake_minimum_required(VERSION 3.16)\nproject(sum CXX)\n"
                                             << uses;
    const fs::path build = cmake_build(source, prefix, pkgconfig);
    std::string output;
    for (const std::string& program : programs) output += run({build / program}).out;
    return output;
}

constexpr const char* kByPackage = R"(
    find_package(ddp 0.1 REQUIRED)
    add_executable(by_package sum.cpp)
    target_link_libraries(by_package PRIVATE ddp::testing)
)";
constexpr const char* kByPkgConfig = R"(
    find_package(PkgConfig REQUIRED)
    pkg_check_modules(DDP REQUIRED IMPORTED_TARGET ddp)
    add_executable(by_pkgconfig sum.cpp)
    target_link_libraries(by_pkgconfig PRIVATE PkgConfig::DDP)
)";
constexpr const char* kSum = "1 workers, the sum of their ranks is 0\n";

TEST_F(Installed, CMakeFindsThePackageAndThePkgConfigFileAndLinksWithEither) {
    if (path_of("CMAKE").empty()) GTEST_SKIP() << "there is no cmake";
    EXPECT_EQ(cmake_project(tree_->file("static"), prefix_, std::string(kByPackage) + kByPkgConfig,
                            {"by_package", "by_pkgconfig"}, pkgconfig_),
              std::string(kSum) + kSum);
}

TEST_F(Installed, TheCMakeLinesOfTheLibddpPageBuildAProgram) {
    if (path_of("CMAKE").empty()) GTEST_SKIP() << "there is no cmake";
    const fs::path source = tree_->file("page");
    fs::create_directories(source);
    fs::copy_file(path_of("SOURCE_ROOT") + "/examples/sum_of_ranks.cpp", source / "sum.cpp");
    write("page/CMakeLists.txt", block_of("libddp.md", "```cmake\n"));
    EXPECT_EQ(run({cmake_build(source, prefix_, pkgconfig_) / "sum"}).out, kSum);
}

TEST_F(Installed, TheCMakeLinesOfTheLibtorchPageBuildItsExample) {
    if (path_of("CMAKE").empty() || !fs::exists("/usr/include/torch")) GTEST_SKIP() << "no cmake or LibTorch";
    const fs::path source = tree_->file("torch");
    fs::create_directories(source);
    for (const char* file : {"mnist.cpp", "digits.h"})
        fs::copy_file(path_of("SOURCE_ROOT") + "/examples/torch/" + file, source / file);
    write("torch/CMakeLists.txt", block_of("libtorch.md", "```cmake\n"));
    const Outcome outcome = run(
        {cmake_build(source, prefix_, pkgconfig_) / "mnist", path_of("SOURCE_ROOT") + "/workers/train/data"});
    EXPECT_THAT(outcome.out, HasSubstr("% of the digits held out are right")) << outcome.err;
}

TEST_F(Installed, CMakeLinksWithTheSharedLibraryWhereItIsInstalled) {
    if (path_of("CMAKE").empty()) GTEST_SKIP() << "there is no cmake";
    const fs::path prefix = tree_->file("with_shared"), library = path_of("SHARED_LIBRARY");
    fs::copy(prefix_, prefix, fs::copy_options::recursive);
    const fs::path libraries = prefix / fs::relative(pkgconfig_.parent_path(), prefix_);
    fs::copy_file(library, libraries / library.filename());
    fs::create_symlink(library.filename(), libraries / "libddp.so.0");
    fs::create_symlink(library.filename(), libraries / "libddp.so");
    EXPECT_EQ(cmake_project(tree_->file("shared"), prefix, kByPackage, {"by_package"}, pkgconfig_), kSum);
    RunOptions options;
    options.unset = {"LD_LIBRARY_PATH"};
    EXPECT_THAT(run({"ldd", tree_->file("shared/build/by_package")}, options).out,
                HasSubstr("libddp.so.0 => " + libraries.string()));
}

TEST_F(Installed, TheSharedLibraryShowsTheNamesOfNamespaceDdpOnly) {
    const Outcome names = run({"nm", "--dynamic", "--defined-only", "--demangle", path_of("SHARED_LIBRARY")});
    EXPECT_THAT(names.out, HasSubstr(" T ddp::ProcessGroup::create(ddp::Context const&"));
    std::istringstream lines(names.out);
    for (std::string line; std::getline(lines, line);)
        EXPECT_THAT(line,
                    ContainsRegex("^[0-9a-f]+ . (ddp::|(typeinfo|typeinfo name|vtable|non-virtual thunk) "
                                  "(for|to) ddp::)"));
}

TEST_F(Installed, AProgramThatCapturesGraphsAndTestsWithRanksAsThreadsLinksAndRuns) {
    const std::string source = write("user.cpp", R"(
        #include <ddp/cuda/graph.h>
        #include <ddp/testing.h>

        #include <cstdio>
        #include <vector>

        static void capture(void* stream) {
            const auto here = static_cast<ddp::cuda::Stream>(stream);
            ddp::cuda::Capture capture(here);
            capture.end()->launch(here);
        }

        int main(int argc, char** argv) {
            if (argc > 1) capture(argv);
            ddp::testing::run_ranks(2, [](ddp::ProcessGroup& group) {
                std::vector<float> one = {1};
                group.all_reduce(ddp::buffer_of(std::span(one))).wait();
                if (group.rank() == 0) std::printf("%g\n", one[0]);
            });
        }
    )");
    const Outcome outcome = run_user_program(source, "ddp-testing");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "2\n");
}

// ---- for users of ddprun

/// The programs as `pip install` lays them out in a virtual environment, and that environment.
class InstalledInVenv : public ::testing::Test {
  protected:
    static void SetUpTestSuite() {
        tree_ = std::make_unique<TemporaryDirectory>();
        const Outcome installed = install("runtime", tree_->file("tree"));
        ASSERT_EQ(installed.status, 0) << installed.out << installed.err;
        for (const auto& entry : fs::recursive_directory_iterator(tree_->path())) {
            if (entry.path().filename() == "ddprun" && entry.is_regular_file())
                prefix_ = entry.path().parent_path().parent_path();
        }
        ASSERT_FALSE(prefix_.empty());
        // A wheel has no libexec.
        for (const char* program : {"train", "allreduce-check"})
            fs::rename(prefix_ / "libexec/ddprun" / program, prefix_ / "share/ddprun" / program);
        const Outcome made = run({"python3", "-m", "venv", "--without-pip", prefix_});
        ASSERT_EQ(made.status, 0) << made.out << made.err;
    }
    static void TearDownTestSuite() { tree_.reset(); }

    static std::string script(const std::string& text) {
        std::ofstream(tree_->file("script.py")) << text;
        return tree_->file("script.py");
    }
    /// Runs two workers under a ddprun whose environment is not activated.
    static Outcome ddprun(const std::vector<std::string>& program, std::vector<std::string> variables = {},
                          const fs::path& binary = prefix_ / "bin/ddprun") {
        std::vector<std::string> command{binary, "--nproc-per-node=2", "--prefix="};
        command.insert(command.end(), program.begin(), program.end());
        RunOptions options = with_environment(std::move(variables));
        options.unset = {"PYTHON_EXEC", "VIRTUAL_ENV"};
        return run(command, options);
    }

    static std::unique_ptr<TemporaryDirectory> tree_;
    static fs::path prefix_;
};
std::unique_ptr<TemporaryDirectory> InstalledInVenv::tree_;
fs::path InstalledInVenv::prefix_;

constexpr const char* kSaysItsPrefix = "import sys\nprint(sys.prefix)\n";

/// An installation as `meson install` makes it.
TEST(InstalledPrograms, FindTheModuleOfMpiInTheLibraryFolder) {
    const TemporaryDirectory tree;
    const Outcome installed = install("runtime", tree.file("tree"));
    ASSERT_EQ(installed.status, 0) << installed.out << installed.err;
    fs::path train, module;
    for (const auto& entry : fs::recursive_directory_iterator(tree.path())) {
        if (entry.path().filename() == "train") train = entry.path();
        if (entry.path().filename().string().starts_with("libddp-mpi-")) module = entry.path();
    }
    ASSERT_FALSE(train.empty());
    if (module.empty()) GTEST_SKIP() << "this build has no MPI";
    // A module of another release is found like any, and does not start MPI.
    for (const char* name : {"libddp-mpi-openmpi.so", "libddp-mpi-mpich.so"})
        std::ofstream(module.parent_path() / name, std::ios::trunc) << "no library";
    const Outcome outcome =
        run({train, "--backend=mpi", "--epochs=1", "--checkpoint-dir=" + tree.file("c")},
            with_environment({"LD_LIBRARY_PATH="}));  // the modules of the build lie there
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(module.parent_path().string() + "/libddp-mpi-"));
}

TEST_F(InstalledInVenv, FindsTrainAndTrainFindsItsData) {
    const Outcome outcome = ddprun({"train", "--epochs", "1"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out + outcome.err, HasSubstr("digits"));
}

TEST_F(InstalledInVenv, AScriptRunsByThePythonBesideDdprunThoughTheEnvironmentIsNotActivated) {
    const Outcome outcome = ddprun({script(kSaysItsPrefix)});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, prefix_.string() + "\n" + prefix_.string() + "\n");
}

TEST_F(InstalledInVenv, ASymbolicLinkToDdprunMeansTheEnvironmentThatItPointsInto) {
    const fs::path link = tree_->file("ddprun");
    fs::create_symlink(prefix_ / "bin/ddprun", link);
    EXPECT_THAT(ddprun({script(kSaysItsPrefix)}, {}, link).out, StartsWith(prefix_.string() + "\n"));
}

TEST_F(InstalledInVenv, AnEnvironmentOfCondaHasItsOwnPythonToo) {
    const fs::path conda = tree_->file("conda");
    fs::create_directories(conda / "bin");
    fs::create_directory(conda / "conda-meta");
    fs::copy(prefix_ / "bin/ddprun", conda / "bin");
    std::ofstream(conda / "bin/python3") << "#!/bin/sh\necho conda ran $2\n";
    fs::permissions(conda / "bin/python3", fs::perms::owner_all);
    const std::string program = script("");
    EXPECT_THAT(ddprun({program}, {}, conda / "bin/ddprun").out, StartsWith("conda ran " + program + "\n"));
}

TEST_F(InstalledInVenv, PythonExecIsStrongerThanTheEnvironmentOfDdprun) {
    const Outcome outcome = ddprun({script(kSaysItsPrefix)}, {"PYTHON_EXEC=python3"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr(prefix_.string())));
}

TEST_F(InstalledInVenv, AModuleThatIsMissingMakesTheReportNameThePythonThatRan) {
    const Outcome outcome = ddprun({script("import no_torch_here\n")});
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("the Python module no_torch_here is not installed"),
                                   HasSubstr("script.py was run by " + prefix_.string() +
                                             "/bin/python3, of the environment that ddprun is installed in "
                                             "(PYTHON_EXEC names another)")));
}

}  // namespace
}  // namespace ddprun::test
