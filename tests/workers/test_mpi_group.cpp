// Backend "mpi" over a fake MPI (fake_mpi.cpp), for behaviour that a real one does not show on demand.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/context.h"
#include "ddp/process_group.h"
#include "env/worker_env.h"
#include "fake_mpi.h"
#include "tests/support/environment_variable.h"
#include "tests/workers/forked_child.h"

namespace ddp {
namespace {

/// Calls a collective that times out; true when memory that MPI may still use was freed.
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
    std::vector<std::unique_ptr<char[]>> again;  // malloc returns the most recently freed memory first
    for (int i = 0; i < 100; ++i) {
        const char* const memory = again.emplace_back(new char[bytes]).get();
        given_back = given_back || memory == used.in || memory == used.out;
    }
    return given_back;
}

TEST(MpiGroup, KeepsTheMemoryOfAbandonedRequests) {
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

TEST(MpiGroup, RefusesAForkedChildThatExitsWithOrWithoutDestroyingTheGroup) {
    const testing::Variable chosen("DDP_MPI_MODULE", std::getenv("FAKE_MPI_MODULE"));
    ddprun::WorkerEnv env;
    env.world_size = env.local_world_size = 2;
    const auto group = ProcessGroup::create(Context(env), {.backend = "mpi"});
    for (const auto what : {testing::InChild::DestroysGroup, testing::InChild::LeavesGroup})
        EXPECT_EQ(testing::misdeeds_of_child(*group, what), "");
}

}  // namespace
}  // namespace ddp
