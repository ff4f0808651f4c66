#include "ddp/cuda/memory.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddp::cuda {
namespace {

std::string free_memory() {
    std::size_t free = 0, total = 0;
    if (!succeeded(cudaMemGetInfo(&free, &total))) return "how much is free is not known";
    return fmt::format("{} of {} MiB are free", free >> 20, total >> 20);
}

void* allocate_on_device(const Gpu& gpu, std::size_t bytes) {
    gpu.make_current();
    void* address = nullptr;
    const cudaError_t code = cudaMalloc(&address, std::max<std::size_t>(bytes, 1));
    if (code != cudaSuccess) {
        const std::string attempt =
            fmt::format("allocating {} bytes on CUDA device {} ({})", bytes, gpu.index(), free_memory());
        check(code, attempt.c_str());
    }
    return address;
}

void* allocate_pinned(const Gpu& gpu, std::size_t bytes) {
    gpu.make_current();
    void* address = nullptr;
    const std::string attempt = fmt::format("allocating {} bytes of page-locked memory", bytes);
    check(cudaHostAlloc(&address, std::max<std::size_t>(bytes, 1), cudaHostAllocDefault), attempt.c_str());
    return address;
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : OwnedMemory(gpu, bytes, allocate_on_device(*gpu, bytes), cudaFree) {}

void DeviceMemory::clear(Stream stream) const {
    check(cudaMemsetAsync(get(), 0, bytes(), stream), "clearing device memory");
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : OwnedMemory(gpu, bytes, allocate_pinned(*gpu, bytes), cudaFreeHost) {}

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
