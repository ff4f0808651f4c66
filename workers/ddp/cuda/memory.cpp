#include "ddp/cuda/memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddp::cuda {
namespace {

std::string free_memory() {
    std::size_t free = 0, total = 0;
    if (!succeeded(cudaMemGetInfo(&free, &total))) return "how much is free is not known";
    return fmt::format("{} of {} MiB are free", free >> 20, total >> 20);
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : gpu_(std::move(gpu)), bytes_(bytes) {
    gpu_->make_current();
    void* address = nullptr;
    const cudaError_t code = cudaMalloc(&address, std::max<std::size_t>(bytes, 1));
    if (code != cudaSuccess) {
        const std::string attempt =
            fmt::format("allocating {} bytes on CUDA device {} ({})", bytes, gpu_->index(), free_memory());
        check(code, attempt.c_str());
    }
    memory_ = static_cast<std::byte*>(address);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}

DeviceMemory::~DeviceMemory() {
    if (memory_ != nullptr) cudaFree(memory_);
}

void DeviceMemory::clear(Stream stream) const {
    check(cudaMemsetAsync(memory_, 0, bytes_, stream), "clearing device memory");
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : gpu_(std::move(gpu)), bytes_(bytes) {
    gpu_->make_current();
    void* address = nullptr;
    const std::string attempt = fmt::format("allocating {} bytes of page-locked memory", bytes);
    check(cudaHostAlloc(&address, std::max<std::size_t>(bytes, 1), cudaHostAllocDefault), attempt.c_str());
    memory_ = static_cast<std::byte*>(address);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}

PinnedMemory::~PinnedMemory() {
    if (memory_ != nullptr) cudaFreeHost(memory_);
}

OwnedStream::OwnedStream(std::shared_ptr<const Gpu> gpu, Priority priority) : gpu_(std::move(gpu)) {
    gpu_->make_current();
    stream_ = make_stream(priority, "creating a CUDA stream");
}

OwnedStream::~OwnedStream() { cudaStreamDestroy(stream_); }

void OwnedStream::synchronize() const { cuda::synchronize(stream_); }

void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying on a CUDA stream");
}

void synchronize(Stream stream) { check(cudaStreamSynchronize(stream), "waiting for a CUDA stream"); }

}  // namespace ddp::cuda
