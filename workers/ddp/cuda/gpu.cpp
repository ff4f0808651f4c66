#include "ddp/cuda/gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "ddp/cuda/kernel_dialect.h"
#include "ddp/types.h"

namespace ddp::cuda {
namespace {

using device::kBlockThreads, device::kPack;
constexpr std::uint64_t kLanes = 32;  ///< of a device; the dialect's host has one
/// Blocks of 256 threads that a multiprocessor holds at once.
constexpr std::uint64_t kBlocksPerMultiprocessor = 8;

template <class Table>
std::shared_ptr<const Table> required(ddprun::Result<Table> found) {
    if (!found) throw Error(found.error().what);
    return std::make_shared<const Table>(*std::move(found));
}

}  // namespace

std::shared_ptr<const Gpu> Gpu::of(int index) {
    static std::mutex mutex;
    // Never freed: at exit CUDA may be gone before us.
    static auto* const opened = new std::map<int, std::shared_ptr<const Gpu>>;
    const std::lock_guard lock(mutex);
    std::shared_ptr<const Gpu>& gpu = (*opened)[index];
    if (!gpu) gpu = std::make_shared<const Gpu>(required(load_api()), required(load_driver_api()), index);
    return gpu;
}

Gpu::Gpu(std::shared_ptr<const Api> api, std::shared_ptr<const DriverApi> driver, int index)
    : api_(std::move(api)), driver_(std::move(driver)), index_(index) {
    int device = 0;
    driver_->check(driver_->init(0), "initialising the CUDA driver");
    driver_->check(driver_->device_get(&device, index), fmt::format("opening CUDA device {}", index));
    driver_->check(driver_->primary_context_retain(&context_, device),
                   fmt::format("making a context on CUDA device {}", index));
    api_->check(api_->device_get_attribute(&multiprocessors_, Attribute::Multiprocessors, index),
                "counting the multiprocessors of a CUDA device");
}

void Gpu::make_current() const {
    api_->check(api_->set_device(index_), "choosing a CUDA device");
    // What set_device leaves to the first allocation before CUDA 12, a kernel launch needs at once.
    driver_->check(driver_->context_set_current(context_), "entering the context of a CUDA device");
}

unsigned Gpu::grid_for(std::uint64_t elements) const { return fill(elements / (kBlockThreads * kPack) + 1); }

unsigned Gpu::grid_for_rows(std::uint64_t rows) const { return fill(rows / (kBlockThreads / kLanes) + 1); }

unsigned Gpu::fill(std::uint64_t blocks) const {
    const auto most = static_cast<std::uint64_t>(multiprocessors_) * kBlocksPerMultiprocessor;
    return static_cast<unsigned>(std::min(blocks, most));
}

}  // namespace ddp::cuda
