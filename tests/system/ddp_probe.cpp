// A worker of libddp for the system tests, with a fault on rank 1. Modes:
//   lag      makes 3 collectives, then rank 1 sleeps for ever while the others call the fourth
//   place    prints its rank, local rank and node, and counts all ranks in the job's store
//   await    in the first generation all wait for a key that is never set, and print the error; in later
//            ones they meet in the store
//   join     creates a group with a timeout of 2 s
//   throw    rank 1 throws in a named function
//   segv     rank 1 crashes
//   spans    makes 2,000 collectives, each after a span in a span
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <string_view>

#include "ddp/error_report.h"
#include "ddp/process_group.h"
#include "ddp/span.h"
#include "ddp/store.h"
#include "env/clock.h"
#include "env/worker_env.h"
#include "rendezvous/client/store_client.h"

namespace probe {

[[gnu::noinline, gnu::visibility("default")]] int throw_in_a_named_function();
int throw_in_a_named_function() { throw std::runtime_error("the disk of the moon is full"); }

}  // namespace probe

namespace {

int say_place(const ddp::Context& context) {
    const ddprun::WorkerEnv& env = context.env();
    const auto deadline = ddprun::deadline_after(ddprun::MonotonicClock::now(), std::chrono::seconds(60));
    const auto store = ddprun::rdzv::parse_store_address(env.store);
    auto client = ddprun::rdzv::StoreClient::connect(
        *store, {.job_id = env.run_id, .token = env.token, .generation = env.generation, .name = "probe"},
        deadline);
    if (!client) throw std::runtime_error(client.error().what);
    const auto counted = (*client)->add("count", 1);
    const auto met = (*client)->barrier("counted", env.world_size, deadline);
    if (!counted || !met) throw std::runtime_error("the store");
    std::printf("rank %d/%d local %d/%d node %d/%d master %s counted %s\n", env.rank, env.world_size,
                env.local_rank, env.local_world_size, env.group_rank, env.group_world_size,
                env.master_addr.c_str(), (*client)->try_get("count")->value_or("").c_str());
    // Rank 0 has the store.
    return (*client)->barrier("said", env.world_size, deadline) ? 0 : 1;
}

int await_key(const ddp::Context& context) {
    ddp::Store store(context);
    store.barrier("all");
    if (context.env().generation > 1) return std::puts("met again") < 0 ? 1 : 0;
    ::signal(SIGTERM, SIG_IGN);  // sent when its peers end
    std::puts("running");
    std::fflush(stdout);
    try {
        (void)store.get("never", std::chrono::minutes(2));
    } catch (const ddp::PeerLostError& lost) {
        std::puts(lost.what());
        return 1;
    }
    return 2;
}

[[noreturn]] void wait_for_signals() {
    for (;;) ::pause();
}

int make_spans(ddp::ProcessGroup& group) {
    std::array<float, 4> values = {};
    for (int i = 0; i < 2000; ++i) {
        {
            const ddp::Span outer("forward");
            const ddp::Span inner("inner");
        }
        group.all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    }
    return 0;
}

int run(std::string_view act) {
    const ddp::Context context = ddp::Context::from_env();
    if (act == "place") return say_place(context);
    if (act == "await") return await_key(context);
    ddp::ProcessGroupOptions options;
    if (act == "join") options.timeout = std::chrono::seconds(2);
    const auto group = ddp::ProcessGroup::create(context, options);
    std::array<float, 4> values = {};
    for (int i = 0; act != "spans" && i < 3; ++i)
        group->all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    if (act == "spans") return make_spans(*group);
    if (group->rank() == 1) {
        if (act == "throw") return probe::throw_in_a_named_function();
        if (act == "segv") return ::raise(SIGSEGV);
        if (act == "leave") return 0;
        wait_for_signals();
    }
    group->all_reduce(ddp::buffer_of(std::span<float>(values))).wait();
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return ddp::run_main("probe", [&] { return run(argc > 1 ? argv[1] : "lag"); });
}
