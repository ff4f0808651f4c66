#include "tests/workers/nccl_world.h"
#include "env/worker_env.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "ddp/cuda/memory.h"
#include "ddp/group/create.h"
#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "tests/support/environment_variable.h"

namespace ddp::testing {

namespace {

/// The store, in memory.
class MemoryBoard {
  public:
    BootstrapStore bootstrap() {
        BootstrapStore made;
        made.put = [this](const std::string& key, const std::string& value) {
            {
                const std::lock_guard lock(mutex_);
                values_[key] = value;
            }
            changed_.notify_all();
        };
        made.get = [this](const std::string& key, ddprun::TimePoint until) -> std::string {
            std::unique_lock lock(mutex_);
            const auto span = until - ddprun::MonotonicClock::now();
            changed_.wait_for(lock, span, [&] { return values_.contains(key); });
            return values_.contains(key) ? values_[key] : "";
        };
        return made;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, std::string> values_;
};

/// The memory does not belong to a group, so allocating it is not a collective.
std::shared_ptr<std::byte> device_memory(std::size_t bytes) {
    void* address = nullptr;
    cuda::check(cudaMalloc(&address, bytes + 1), "allocating for a test");
    return {static_cast<std::byte*>(address), [](std::byte* at) { cudaFree(at); }};
}

int nccl_misuses() { return reinterpret_cast<int (*)()>(fake_library().resolve("fake_nccl_misuses"))(); }

}  // namespace

SharedLibrary fake_library() { return *open_library({std::getenv("FAKE_NCCL_LIBRARY")}); }

SharedLibrary fake_without(std::vector<std::string> names) {
    SharedLibrary library = fake_library();
    library.resolve = [all = library.resolve, names = std::move(names)](const char* name) -> void* {
        return std::find(names.begin(), names.end(), name) != names.end() ? nullptr : all(name);
    };
    return library;
}

void LostDevice::lose(int code) {
    reinterpret_cast<int (*)(int)>(fake_library().resolve("fake_cuda_lose_device"))(code);
}

Buffer NcclRank::filled(std::vector<float> values) {
    const auto* const first = reinterpret_cast<const std::byte*>(values.data());
    return holding({first, first + values.size() * sizeof(float)}, DType::F32);
}

Buffer NcclRank::holding(const std::vector<std::byte>& bytes, DType type) {
    group.barrier().synchronize();
    memory.push_back(device_memory(bytes.size()));
    std::byte* const address = memory.back().get();
    std::copy(bytes.begin(), bytes.end(), address);
    return {address, bytes.size() / size_of(type), type, group.device()};
}

std::vector<std::byte> NcclRank::bytes_of(const Buffer& buffer) const {
    const auto* const first = static_cast<const std::byte*>(buffer.data);
    return {first, first + buffer.bytes()};
}

std::vector<float> NcclRank::values_of(const Buffer& buffer) const {
    const auto* const first = static_cast<const float*>(buffer.data);
    return {first, first + buffer.count};
}

std::vector<std::exception_ptr> failures_of(int ranks, const std::function<void(NcclRank&)>& fn,
                                            const NcclWorldOptions& options) {
    const Variable faults("FAKE_NCCL", options.faults);
    const auto nccl = std::make_shared<const nccl::Api>(*nccl::api_from(fake_without(options.hidden)));
    const auto segment =
        std::make_shared<SegmentMap>(make_segment({.local_world_size = static_cast<std::uint32_t>(ranks),
                                                   .world_size = static_cast<std::uint32_t>(ranks),
                                                   .generation = options.generation}));
    segment->header().aborted = static_cast<std::uint32_t>(options.lost_rank + 1);
    MemoryBoard bootstrap;
    const int misuses = nccl_misuses();
    std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                ddprun::WorkerEnv env = environment_of(rank, ranks);
                env.generation = options.generation;
                std::optional<cuda::OwnedStream> stream;
                if (options.own_stream) stream.emplace(cuda::Gpu::of(rank));
                const Device wanted{Device::Kind::Cuda, options.device};
                const ProcessGroupOptions group_options{.timeout = options.timeout,
                                                        .backend = "nccl",
                                                        .device = wanted,
                                                        .stream = stream ? stream->get() : nullptr};
                const auto group = make_nccl_group({.nccl = nccl,
                                                    .segment = segment,
                                                    .device = choose_device(env, wanted, Sharing::Never),
                                                    .bootstrap = bootstrap.bootstrap()},
                                                   env, group_options);
                NcclRank mine{*group, *segment};
                fn(mine);
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(nccl_misuses(), misuses) << "NCCL would have crashed";
    return failures;
}

void wait_until_reached(const std::atomic<std::uint64_t>& last, std::uint64_t seq) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (last.load() < seq && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
}

}  // namespace ddp::testing
