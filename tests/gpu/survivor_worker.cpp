// A worker whose peer dies in the middle of an all-reduce in device memory; for check_killed_rank.py.
//
//   survivor_worker BACKEND STEPS RANK STEP     that rank kills itself in that step, while the others reduce
//   already
//
// Prints "killed at <ms>" and, on every survivor, "heard at <ms>: <the exception's text>"; the clock is the
// same. Exit code 77, with one line, where there is no CUDA device.
#include <fmt/core.h>
#include <signal.h>

#include <cstdlib>
#include <string>

#include "ddp/context.h"
#include "ddp/cuda/cuda_api.h"
#include "ddp/process_group.h"
#include "env/clock.h"
#include "env/text.h"

namespace {

constexpr int kSkipped = 77;
constexpr std::size_t kBytes = 256UL << 10;

std::int64_t now_ms() { return ddprun::MonotonicClock::now().time_since_epoch().count() / 1'000'000; }

void say(const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);
}

struct Options {
    std::string backend;
    int steps = 0, dying_rank = -1, dying_step = -1;
};

int run(const ddp::Context& context, const Options& options) {
    const auto group = ddp::ProcessGroup::create(context, {.timeout = std::chrono::seconds(30),
                                                           .backend = options.backend,
                                                           .device = {ddp::Device::Kind::Cuda, -1}});
    if (group->rank() == 0) say(group->describe());
    const auto memory = group->allocate_shared(kBytes);
    group->barrier().synchronize();
    for (int step = 1; step <= options.steps; ++step) {
        if (group->rank() == options.dying_rank && step == options.dying_step) {
            say(fmt::format("killed at {}", now_ms()));
            ::raise(SIGKILL);
        }
        group->all_reduce({memory.data(), kBytes / sizeof(float), ddp::DType::F32, group->device()})
            .synchronize();
    }
    say("nobody died");
    return 1;
}

std::string why_no_device() {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess) return ddp::cuda::explain(code);
    return count > 0 ? "" : "no CUDA device";
}

int number(const char* text) {
    return static_cast<int>(ddprun::parse_int_between(text, 0, 1'000'000'000).value_or(0));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        fmt::print(stderr, "usage: survivor_worker BACKEND STEPS RANK STEP\n");
        return 64;
    }
    // The launcher stops survivors, but this one ignores the signal to print its error.
    ::signal(SIGTERM, SIG_IGN);
    if (const std::string why = why_no_device(); !why.empty()) {
        say("skipped: " + why);
        return kSkipped;
    }
    try {
        return run(ddp::Context::from_env(), {argv[1], number(argv[2]), number(argv[3]), number(argv[4])});
    } catch (const ddp::Error& error) {
        say(fmt::format("heard at {}: {}", now_ms(), error.what()));
        return 1;
    }
}
