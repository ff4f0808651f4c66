// Gloo's side of bench_collectives (its TCP transport, PyTorch's default on Linux). Forks the ranks and
// prints "bytes microseconds"; nothing for reduce_scatter, which this version of Gloo has only in place.
// Arguments: the number of ranks, the collective, then the sizes.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>

#include <filesystem>
#include <memory>
#include <string>

#include "collective_loop.h"

namespace {

int run_rank(int rank, int ranks, const std::string& directory, bench::Job& job) {
    gloo::rendezvous::FileStore store(directory);
    gloo::transport::tcp::attr where;
    where.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(where);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context->connectFullMesh(store, device);

    float *const from = job.from.data(), *const to = job.to.data();
    unsigned tag = 0;
    const auto with_two_buffers = [&](auto options, std::size_t sent, std::size_t received, auto start) {
        options.setInput(from, sent);
        options.setOutput(to, received);
        options.setTag(++tag);
        start(options);
    };
    bench::print_all(rank, ranks, from, job.sizes, [&](std::size_t count) {
        const std::size_t each = count / static_cast<std::size_t>(ranks);
        if (job.collective == bench::Collective::AllGather)
            return with_two_buffers(gloo::AllgatherOptions(context), each, count,
                                    [](auto& options) { gloo::allgather(options); });
        if (job.collective == bench::Collective::AllToAll)
            return with_two_buffers(gloo::AlltoallOptions(context), count, count,
                                    [](auto& options) { gloo::alltoall(options); });
        if (job.collective == bench::Collective::Broadcast) {
            gloo::BroadcastOptions options(context);
            options.setOutput(from, count);
            options.setRoot(ranks - 1);
            options.setTag(++tag);
            return gloo::broadcast(options);
        }
        gloo::AllreduceOptions options(context);
        options.setOutput(from, count);
        options.setReduceFunction(
            static_cast<void (*)(void*, const void*, const void*, std::size_t)>(&gloo::sum<float>));
        options.setTag(++tag);
        gloo::allreduce(options);
    });
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
    bench::Job job(argc - 1, argv + 1);
    if (job.collective == bench::Collective::ReduceScatter) return 0;
    char name[] = "/tmp/bench-gloo-XXXXXX";
    const std::string directory = ::mkdtemp(name);
    for (int rank = 0; rank < ranks; ++rank) {
        if (::fork() == 0) {
            ::fflush(stdout);
            ::_exit(run_rank(rank, ranks, directory, job));
        }
    }
    int failed = 0;
    for (int status = 0; ::wait(&status) > 0;) failed += status != 0 ? 1 : 0;
    std::filesystem::remove_all(directory);
    return failed;
}
