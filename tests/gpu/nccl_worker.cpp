// A worker over NCCL for tests/gpu/test_nccl_job.cpp: all-reduces its rank STEPS times.
//   nccl_worker STEPS [RANK STEP]     that rank kills itself before that step, in its first life
// WORKER_BACKEND names the backend; the default is nccl. The fake NCCL's device memory is host memory, so
// that the worker can fill and print it.
#include <fmt/core.h>
#include <signal.h>

#include <cstdlib>
#include <string>

#include "ddp/context.h"
#include "ddp/error_report.h"
#include "ddp/process_group.h"
#include "env/clock.h"

namespace {

std::int64_t now_ms() { return ddprun::MonotonicClock::now().time_since_epoch().count() / 1'000'000; }

void say(const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);
}

void die_here(const ddp::Context& context, int rank, int step, int now) {
    if (context.rank() != rank || step != now || context.restart_count() != 0) return;
    say(fmt::format("killed at {}", now_ms()));
    ::raise(SIGKILL);
}

int run(const ddp::Context& context, int steps, int dying_rank, int dying_step) {
    const char* backend = std::getenv("WORKER_BACKEND");
    const auto group = ddp::ProcessGroup::create(context, {.timeout = std::chrono::seconds(20),
                                                           .backend = backend != nullptr ? backend : "nccl",
                                                           .device = {ddp::Device::Kind::Cuda, -1}});
    if (group->rank() == 0) {
        say(fmt::format("{}; backend {}", group->describe(), group->choice()));
        const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
        say(fmt::format("NCCL_MULTI_RANK_GPU_ENABLE={}", shares != nullptr ? shares : ""));
    }
    const auto memory = group->allocate_shared(sizeof(float));
    group->barrier().synchronize();
    auto* const value = reinterpret_cast<float*>(memory.data());
    for (int step = 1; step <= steps; ++step) {
        die_here(context, dying_rank, dying_step, step);
        *value = static_cast<float>(group->rank() + step);
        group->all_reduce({value, 1, ddp::DType::F32, group->device()}).synchronize();
    }
    say(fmt::format("life {} sum {}", context.restart_count(), *value));
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    // The launcher stops survivors, but this one ignores the signal to print its error.
    ::signal(SIGTERM, SIG_IGN);
    const auto number = [&](int at) { return argc > at ? std::atoi(argv[at]) : -1; };
    try {
        return run(ddp::Context::from_env(), number(1), number(2), number(3));
    } catch (const ddp::Error& error) {
        say(fmt::format("heard at {}: {}", now_ms(), error.what()));
        // The program replaces the message, as some programs do.
        ddp::write_error_report("the training step failed");
        return 1;
    }
}
