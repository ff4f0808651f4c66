#include "ddp/cuda/gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "ddp/types.h"

namespace ddp::cuda {
namespace {

/// Elements that a thread processes at once where it can, and threads per warp.
constexpr std::uint64_t kPack = 8, kLanes = 32;
/// Blocks of 256 threads that fit on a multiprocessor at once.
constexpr std::uint64_t kBlocksPerMultiprocessor = 8;

}  // namespace

std::shared_ptr<const Gpu> Gpu::of(int index) {
    static std::mutex mutex;
    // Never freed: at exit CUDA may end before this.
    static auto* const opened = new std::map<int, std::shared_ptr<const Gpu>>;
    const std::lock_guard lock(mutex);
    std::shared_ptr<const Gpu>& gpu = (*opened)[index];
    if (!gpu) gpu = std::make_shared<const Gpu>(index);
    return gpu;
}

Gpu::Gpu(int index) : index_(index) {
    check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, index),
          fmt::format("opening CUDA device {}", index).c_str());
}

void Gpu::make_current() const { check(cudaSetDevice(index_), "choosing a CUDA device"); }

unsigned Gpu::grid_for(std::uint64_t elements) const { return fill(elements / (kBlockThreads * kPack) + 1); }

unsigned Gpu::grid_for_rows(std::uint64_t rows) const { return fill(rows / (kBlockThreads / kLanes) + 1); }

unsigned Gpu::fill(std::uint64_t blocks) const {
    const auto most = static_cast<std::uint64_t>(multiprocessors_) * kBlocksPerMultiprocessor;
    return static_cast<unsigned>(std::min(blocks, most));
}

}  // namespace ddp::cuda
