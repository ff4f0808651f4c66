#include "tests/workers/staged_world.h"
#include "env/worker_env.h"

#include <thread>

#include "ddp/group/create.h"
#include "ddp/testing.h"
#include "tests/workers/nccl_world.h"

namespace ddp::testing {

std::vector<std::exception_ptr> staged_failures_of(int ranks, const std::function<void(ProcessGroup&)>& fn,
                                                   const StagedWorld& options) {
    const auto segment =
        std::make_shared<SegmentMap>(make_segment({.local_world_size = static_cast<std::uint32_t>(ranks),
                                                   .world_size = static_cast<std::uint32_t>(ranks)}));
    std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            cuda::Stream stream = nullptr;
            if (options.own_streams) cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
            try {
                const auto group =
                    make_staged_group({.segment = segment, .device = 0}, environment_of(rank, ranks),
                                      {.timeout = options.timeout, .stream = stream});
                fn(*group);
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
            if (stream != nullptr) cudaStreamDestroy(stream);
        });
    }
    for (std::thread& thread : threads) thread.join();
    return failures;
}

}  // namespace ddp::testing
