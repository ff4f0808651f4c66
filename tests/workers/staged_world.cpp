#include "tests/workers/staged_world.h"

#include <thread>

#include "ddp/staged_group.h"
#include "ddp/testing.h"
#include "tests/workers/nccl_world.h"

namespace ddp::testing {

std::vector<std::exception_ptr> staged_failures_of(int ranks, const std::function<void(ProcessGroup&)>& fn,
                                                   const StagedWorld& options) {
    const auto cuda = std::make_shared<const cuda::Api>(*cuda::api_from(fake_library()));
    const auto segment =
        std::make_shared<SegmentMap>(make_segment({.local_world_size = static_cast<std::uint32_t>(ranks),
                                                   .world_size = static_cast<std::uint32_t>(ranks)}));
    std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            cuda::Stream stream = nullptr;
            if (options.own_streams) cuda->stream_create_with_priority(&stream, cuda::kStreamNonBlocking, 0);
            try {
                const auto group = make_staged_group({.cuda = cuda, .segment = segment, .device = 0},
                                                     environment_of(rank, ranks),
                                                     {.timeout = options.timeout, .stream = stream});
                fn(*group);
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
            if (stream != nullptr) cuda->stream_destroy(stream);
        });
    }
    for (std::thread& thread : threads) thread.join();
    return failures;
}

}  // namespace ddp::testing
