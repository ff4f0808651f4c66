// cuda-trace.so over a fake CUPTI, and check_trace.py over made-up traces. test_run_script.cpp runs both over
// the fake CUDA.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "env/io/file.h"
#include "tests/gpu/cupti_api.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using cupti::Domain;
using cupti::Site;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

/// A process with cuda-trace.so loaded; only for the child of a death test.
class Injected {
  public:
    Injected() {
        void* const library = ::dlopen(path_of("CUDA_TRACE_LIBRARY").c_str(), RTLD_NOW | RTLD_LOCAL);
        const auto inject = reinterpret_cast<int (*)()>(::dlsym(library, "InitializeInjection"));
        if (inject() != 1) std::exit(3);
        void* const fake = ::dlopen(path_of("FAKE_CUPTI_LIBRARY").c_str(), RTLD_NOW | RTLD_LOCAL);
        play_ = reinterpret_cast<decltype(play_)>(::dlsym(fake, "fake_cupti_play"));
        synchronized_ = reinterpret_cast<decltype(synchronized_)>(::dlsym(fake, "fake_cupti_synchronized"));
    }
    void enter(Domain domain, const char* function, const char* symbol = nullptr) {
        play_(domain, Site::Enter, function, symbol);
    }
    void exit(Domain domain, const char* function, const char* symbol = nullptr) {
        play_(domain, Site::Exit, function, symbol);
    }
    void synchronized() { synchronized_(cupti::kStreamSynchronized); }

  private:
    void (*play_)(Domain, Site, const char*, const char*) = nullptr;
    void (*synchronized_)(std::uint32_t) = nullptr;
};

class CudaTrace : public ::testing::Test {
  protected:
    void SetUp() override {
        ::setenv("CUDA_TRACE_CUPTI", path_of("FAKE_CUPTI_LIBRARY").c_str(), 1);
        ::setenv("CUDA_TRACE_FILE", file_.c_str(), 1);
    }
    /// The lines of the file, each without its thread and times.
    [[nodiscard]] std::vector<std::string> calls() const {
        std::ifstream in(file_);
        std::string line;
        std::vector<std::string> found;
        std::getline(in, line);
        EXPECT_EQ(line, "# cuda-trace 1");
        int thread = 0, depth = 0;
        std::uint64_t start = 0, end = 0;
        while (in >> thread >> depth >> start >> end && std::getline(in, line)) {
            EXPECT_GT(thread, 0);
            EXPECT_LE(start, end);
            found.push_back(std::to_string(depth) + line);
        }
        return found;
    }
    TemporaryDirectory directory_;
    std::string file_ = directory_.file("trace");
};
using CudaTraceDeathTest = CudaTrace;

TEST_F(CudaTraceDeathTest, WritesEveryCallWithTheDriverCallsInsideAndTheNameOfTheKernel) {
    const auto program = [] {
        Injected cuda;
        cuda.exit(Domain::Driver, "cuInit");  // began before the subscription
        cuda.enter(Domain::Driver, "cuLaunchKernel", "BeginStep");
        cuda.exit(Domain::Driver, "cuLaunchKernel", "BeginStep");
        cuda.enter(Domain::Runtime, "cudaStreamSynchronize");
        cuda.enter(Domain::Driver, "cuStreamSynchronize");
        cuda.synchronized();
        cuda.exit(Domain::Driver, "cuStreamSynchronize");
        cuda.exit(Domain::Runtime, "cudaStreamSynchronize");
        std::thread([&] {
            cuda.enter(Domain::Driver, "cuEventQuery");
            cuda.exit(Domain::Driver, "cuEventQuery");
        }).join();
        std::exit(0);
    };
    EXPECT_EXIT(program(), ::testing::ExitedWithCode(0), "");
    EXPECT_THAT(calls(),
                ::testing::ElementsAre("0 cuLaunchKernel BeginStep", "2 synchronized:stream",
                                       "1 cuStreamSynchronize", "0 cudaStreamSynchronize", "0 cuEventQuery"));
}

TEST_F(CudaTraceDeathTest, WritesAFileForEachProcessIfTheNameHasAPlaceholder) {
    ::setenv("CUDA_TRACE_FILE", directory_.file("trace-%p").c_str(), 1);
    const auto program = [] {
        Injected cuda;
        cuda.enter(Domain::Driver, "cuEventQuery");
        cuda.exit(Domain::Driver, "cuEventQuery");
        std::exit(0);
    };
    EXPECT_EXIT(program(), ::testing::ExitedWithCode(0), "");
    EXPECT_THAT(run({"/bin/sh", "-c", "ls " + directory_.path()}).out, MatchesRegex("trace-[0-9]+\n"));
}

TEST_F(CudaTraceDeathTest, LetsTheProgramRunAndPrintsTheReasonWhenItCannotTrace) {
    const auto program = [] {
        const Injected cuda;
        std::exit(0);
    };
    ::setenv("FAKE_CUPTI_REFUSES", "1", 1);
    EXPECT_EXIT(program(), ::testing::ExitedWithCode(0),
                "cuda-trace: cuptiSubscribe: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS");
    ::unsetenv("FAKE_CUPTI_REFUSES");
    ::unsetenv("CUDA_TRACE_FILE");
    EXPECT_EXIT(program(), ::testing::ExitedWithCode(0),
                "cuda-trace: CUDA_TRACE_FILE is not set; not tracing");
    ::setenv("CUDA_TRACE_FILE", file_.c_str(), 1);
    ::setenv("CUDA_TRACE_CUPTI", directory_.file("libcupti.so").c_str(), 1);
    EXPECT_EXIT(program(), ::testing::ExitedWithCode(0),
                "cuda-trace: loading CUPTI .CUDA_TRACE_CUPTI names another file.: ");
    EXPECT_FALSE(read_file(file_, 1).has_value());
}

/// The lines of a trace; each call takes 5 us, and calls begin 10 us apart.
class MadeUpTrace {
  public:
    MadeUpTrace& call(const std::string& name, int thread = 1, int depth = 0) {
        if (depth == 0) now_ += 10000;
        text_ += std::to_string(thread) + " " + std::to_string(depth) + " " + std::to_string(now_ + depth) +
                 " " + std::to_string(now_ + 5000 - depth) + " " + name + "\n";
        return *this;
    }
    MadeUpTrace& steps(int count, const std::vector<std::string>& calls) {
        for (int step = 0; step < count; ++step) {
            for (const std::string& name : calls) call(name);
        }
        return *this;
    }
    [[nodiscard]] std::string text() const { return "# cuda-trace 1\n" + text_; }

  private:
    std::uint64_t now_ = 1'000'000;
    std::string text_;
};

const std::vector<std::string> kStep = {"cuLaunchKernel train_stage_f32",
                                        "cudaLaunchKernelExC_v11060 gemm",
                                        "cudaStreamWaitEvent_ptsz",
                                        "cudaMemsetAsync",
                                        "cuMemcpyDtoDAsync_v2",
                                        "cuLaunchKernel BeginStep",
                                        "cuLaunchKernel update_sgd_float_float"};

class CheckTrace : public ::testing::Test {
  protected:
    void SetUp() override {
        if (::access("/usr/bin/python3", X_OK) != 0 && ::access("/usr/local/bin/python3", X_OK) != 0)
            GTEST_SKIP() << "needs python3";
    }
    Outcome check(const MadeUpTrace& trace, const std::vector<std::string>& options = {}) {
        std::ofstream(directory_.file("trace")) << trace.text();
        std::vector<std::string> command{path_of("CHECK_TRACE"), directory_.file("trace")};
        command.insert(command.end(), options.begin(), options.end());
        return run(command);
    }
    TemporaryDirectory directory_;
};

TEST_F(CheckTrace, AcceptsATrainingWhoseStepsOnlyQueueWork) {
    MadeUpTrace trace;
    trace.steps(20, kStep).call("cudaMalloc").steps(200, kStep);
    // The host may wait after the last step, at the end of the epoch.
    trace.call("cudaStreamSynchronize_v3020").call("cuMemFree_v2");
    const Outcome outcome = check(trace);
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    EXPECT_THAT(
        outcome.out,
        EndsWith("199 steps of 7.0 calls, 0 of them wait for the device; 35 us per step inside calls\n"));
    EXPECT_THAT(outcome.out, HasSubstr("a step takes 70.0 us, 35.0 us of them inside calls"));
}

TEST_F(CheckTrace, FindsEveryCallThatWaits) {
    const std::vector<std::string> waiting = {"cudaStreamSynchronize",
                                              "cudaStreamSynchronize_ptsz",
                                              "cuStreamSynchronize_ptsz",
                                              "cuEventSynchronize",
                                              "cudaEventSynchronize",
                                              "cuCtxSynchronize",
                                              "cuCtxSynchronize_v2",
                                              "cudaDeviceSynchronize",
                                              "cudaMemcpy",
                                              "cuMemcpyDtoH_v2",
                                              "cuMemcpyHtoD_v2_ptds",
                                              "cuMemcpy2D_v2",
                                              "cuMemsetD8_v2",
                                              "cudaMemset",
                                              "cudaMemcpyAsync",
                                              "cuMemcpyDtoHAsync_v2_ptsz",
                                              "cuMemcpyHtoDAsync_v2",
                                              "cuMemcpyAsync_ptsz",
                                              "cudaMalloc",
                                              "cuMemAlloc_v2",
                                              "cuMemFree_v2",
                                              "cuMemHostAlloc",
                                              "cuMemAllocHost_v2",
                                              "cudaFreeHost",
                                              "cuMemHostRegister_v2",
                                              "cuMemCreate",
                                              "cuModuleLoadData",
                                              "cuModuleLoadDataEx",
                                              "cuLibraryLoadData",
                                              "synchronized:context"};
    MadeUpTrace trace;
    trace.steps(60, kStep).steps(1, waiting).steps(61, kStep);
    const Outcome outcome = check(trace);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, HasSubstr("\nFAILED: " + std::to_string(waiting.size()) +
                                       " calls wait for the device in 100 steps: "));
}

TEST_F(CheckTrace, AcceptsCallsThatOnlyQueueOrQuery) {
    MadeUpTrace trace;
    trace.steps(60, kStep)
        .steps(1, {"cuEventQuery",
                   "cuStreamQuery",
                   "cudaEventCreateWithFlags",
                   "cuEventDestroy_v2",
                   "cuEventRecord_ptsz",
                   "cuStreamWaitEvent",
                   "cuMemcpyDtoDAsync_v2_ptsz",
                   "cuMemsetD32Async",
                   "cuMemAllocAsync",
                   "cudaMallocAsync",
                   "cudaFreeAsync",
                   "cuMemGetInfo_v2",
                   "cuModuleGetFunction",
                   "cudaHostGetDevicePointer",
                   "cuMemHostGetDevicePointer_v2",
                   "cuMemGetAddressRange_v2",
                   "cuGraphLaunch",
                   "cuCtxGetCurrent",
                   "cuStreamIsCapturing",
                   "cudaGetLastError",
                   "cuLaunchHostFunc",
                   "cuStreamGetCtx_v2"})
        .steps(61, kStep);
    const Outcome outcome = check(trace);
    EXPECT_EQ(outcome.status, 0) << outcome.out;
}

TEST_F(CheckTrace, JudgesACopyByTheDriverCallInsideTheRuntimeCall) {
    MadeUpTrace on_device, to_host;
    on_device.steps(60, kStep).call("cudaMemcpyAsync").call("cuMemcpyDtoDAsync_v2", 1, 1).steps(61, kStep);
    EXPECT_EQ(check(on_device).status, 0);
    to_host.steps(60, kStep).call("cudaMemcpyAsync").call("cuMemcpyDtoHAsync_v2", 1, 1).steps(61, kStep);
    EXPECT_THAT(check(to_host).out,
                HasSubstr("FAILED: 1 calls wait for the device in 100 steps: 1 cuMemcpyDtoHAsync"));
}

TEST_F(CheckTrace, FindsAWaitInsideAnotherCallAndOnAnotherThread) {
    MadeUpTrace inside, elsewhere;
    inside.steps(60, kStep).call("cudaLaunchKernel gemm").call("synchronized:stream", 1, 1).steps(61, kStep);
    EXPECT_THAT(check(inside).out,
                HasSubstr("FAILED: 1 calls wait for the device in 100 steps: 1 synchronized:stream"));
    elsewhere.steps(60, kStep).call("cudaStreamSynchronize", 2).steps(61, kStep);
    EXPECT_THAT(check(elsewhere).out, HasSubstr("1 cudaStreamSynchronize (another thread)"));
}

TEST_F(CheckTrace, FindsAStepThatWaitsByPolling) {
    std::vector<std::string> step = kStep;
    step.insert(step.end(), 2, "cuEventQuery");
    MadeUpTrace looks, polls;
    EXPECT_EQ(check(looks.steps(121, step)).status, 0);
    step.insert(step.end(), 20, "cudaEventQuery");
    EXPECT_THAT(
        check(polls.steps(121, step)).out,
        HasSubstr("FAILED: a step asks the device 22 times whether it is done: that is to wait for it"));
}

TEST_F(CheckTrace, CountsGraphLaunchesAsStepsInGraphMode) {
    const std::vector<std::string> step = {"cuLaunchKernel train_stage_f32", "cudaGraphLaunch_v10000"};
    MadeUpTrace trace;
    // Steps before the capture; the capture itself instantiates a graph.
    trace.steps(3, kStep).call("cudaGraphInstantiateWithFlags").steps(150, step);
    const Outcome outcome = check(trace, {"--graph"});
    EXPECT_EQ(outcome.status, 0) << outcome.out;
    EXPECT_THAT(outcome.out, HasSubstr("129 steps of 2.0 calls, 0 of them wait"));
    EXPECT_THAT(check(trace).out, StartsWith("FAILED: the trace shows 0 steps after the first 20, not 100"));
}

TEST_F(CheckTrace, FailsIfTheTraceHasTooFewSteps) {
    MadeUpTrace few;
    few.steps(50, kStep);
    EXPECT_EQ(check(few).out, "FAILED: the trace shows 29 steps after the first 20, not 100\n");
    EXPECT_EQ(check(few, {"--at-least", "29"}).status, 0);
    EXPECT_EQ(check(MadeUpTrace()).out, "FAILED: the trace shows 0 steps after the first 20, not 100\n");
    std::ofstream(directory_.file("other")) << "anything\n";
    EXPECT_THAT(run({path_of("CHECK_TRACE"), directory_.file("other")}).out,
                AllOf(StartsWith("FAILED: "), EndsWith(": not a trace\n")));
    const Outcome missing = run({path_of("CHECK_TRACE"), directory_.file("missing")});
    EXPECT_EQ(missing.status, 1);
    EXPECT_THAT(missing.out, HasSubstr("FAILED: "));
    EXPECT_THAT(missing.err, IsEmpty());
}

}  // namespace
}  // namespace ddprun::test
