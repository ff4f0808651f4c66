// Backend "mpi" over a fake MPI (fake_mpi.cpp): what no real one does when it is wanted.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/context.h"
#include "ddp/process_group.h"
#include "fake_mpi.h"
#include "tests/support/environment_variable.h"

namespace ddp {
namespace {

/// Calls a collective that times out, and finds out whether the memory that MPI may yet use was given back.
bool gives_memory_back(std::size_t bytes, const std::function<void(ProcessGroup&)>& call) {
    const char* const module = std::getenv("FAKE_MPI_MODULE");
    const testing::Variable chosen("DDP_MPI_MODULE", module);
    ddprun::WorkerEnv env;
    env.world_size = env.local_world_size = 2;
    const auto group =
        ProcessGroup::create(Context(env), {.timeout = std::chrono::milliseconds(1), .backend = "mpi"});
    EXPECT_THROW(call(*group), TimeoutError);
    void* const library = ::dlopen(module, RTLD_NOW);
    const FakeMpiMemory used =
        reinterpret_cast<decltype(&fake_mpi_memory)>(::dlsym(library, "fake_mpi_memory"))();
    bool given_back = false;
    std::vector<std::unique_ptr<char[]>> again;  // malloc hands out first what was freed last
    for (int i = 0; i < 100; ++i) {
        const char* const memory = again.emplace_back(new char[bytes]).get();
        given_back = given_back || memory == used.in || memory == used.out;
    }
    return given_back;
}

TEST(MpiGroup, KeepsTheMemoryOfRequestsThatItAbandoned) {
    std::vector<std::uint16_t> halves(100);
    std::vector<float> floats(100);
    std::vector<float> both(200);
    EXPECT_FALSE(gives_memory_back(400, [&](ProcessGroup& group) {
        group.all_reduce({halves.data(), halves.size(), DType::BF16, {}}).wait();
    }));
    EXPECT_FALSE(gives_memory_back(400, [&](ProcessGroup& group) {
        group.reduce_scatter(buffer_of(std::span(floats)), buffer_of(std::span(both))).wait();
    }));
    EXPECT_FALSE(gives_memory_back(16, [](ProcessGroup& group) { group.all_gather_bytes("word"); }));
}

}  // namespace
}  // namespace ddp
