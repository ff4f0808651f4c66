// Gloo's side of bench_allreduce (its TCP transport, PyTorch's default on Linux). Forks the ranks and prints
// "bytes microseconds". Arguments: the number of ranks, then the sizes.
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>

#include <filesystem>
#include <memory>
#include <string>

#include "allreduce_loop.h"

namespace {

int run_rank(int rank, int ranks, const std::string& directory, const std::vector<std::size_t>& sizes) {
    gloo::rendezvous::FileStore store(directory);
    gloo::transport::tcp::attr where;
    where.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(where);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context->connectFullMesh(store, device);

    std::vector<float> buffer(*std::max_element(sizes.begin(), sizes.end()) / sizeof(float));
    unsigned tag = 0;
    bench::print_all(rank, buffer.data(), sizes, [&](std::size_t count) {
        gloo::AllreduceOptions options(context);
        options.setOutput(buffer.data(), count);
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
    const std::vector<std::size_t> sizes = bench::sizes_from(argc - 1, argv + 1);
    char name[] = "/tmp/bench-gloo-XXXXXX";
    const std::string directory = ::mkdtemp(name);
    for (int rank = 0; rank < ranks; ++rank) {
        if (::fork() == 0) {
            ::fflush(stdout);
            ::_exit(run_rank(rank, ranks, directory, sizes));
        }
    }
    int failed = 0;
    for (int status = 0; ::wait(&status) > 0;) failed += status != 0 ? 1 : 0;
    std::filesystem::remove_all(directory);
    return failed;
}
