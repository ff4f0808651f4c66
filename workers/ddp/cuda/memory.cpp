#include "ddp/cuda/memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddp::cuda {
namespace {

std::string free_memory(const Api& api) {
    std::size_t free = 0, total = 0;
    if (!api.succeeded(api.mem_get_info(&free, &total))) return "how much is free is not known";
    return fmt::format("{} of {} MiB are free", free >> 20, total >> 20);
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : gpu_(std::move(gpu)), bytes_(bytes) {
    gpu_->make_current();
    const Api& api = gpu_->api();
    void* address = nullptr;
    const Code code = api.malloc(&address, std::max<std::size_t>(bytes, 1));
    if (code != Code::Success) {
        const std::string attempt =
            fmt::format("allocating {} bytes on CUDA device {} ({})", bytes, gpu_->index(), free_memory(api));
        api.check(code, attempt.c_str());
    }
    memory_ = static_cast<std::byte*>(address);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}

DeviceMemory::~DeviceMemory() {
    if (memory_ != nullptr) gpu_->api().free(memory_);
}

void DeviceMemory::clear(Stream stream) const {
    gpu_->api().check(gpu_->api().memset_async(memory_, 0, bytes_, stream), "clearing device memory");
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes)
    : gpu_(std::move(gpu)), bytes_(bytes) {
    gpu_->make_current();
    void* address = nullptr;
    const std::string attempt = fmt::format("allocating {} bytes of page-locked memory", bytes);
    gpu_->api().check(gpu_->api().host_alloc(&address, std::max<std::size_t>(bytes, 1), 0), attempt.c_str());
    memory_ = static_cast<std::byte*>(address);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}

PinnedMemory::~PinnedMemory() {
    if (memory_ != nullptr) gpu_->api().free_host(memory_);
}

OwnedStream::OwnedStream(std::shared_ptr<const Gpu> gpu, Priority priority) : gpu_(std::move(gpu)) {
    gpu_->make_current();
    stream_ = make_stream(gpu_->api(), priority, "creating a CUDA stream");
}

OwnedStream::~OwnedStream() { gpu_->api().stream_destroy(stream_); }

void OwnedStream::synchronize() const { cuda::synchronize(*gpu_, stream_); }

void copy(const Gpu& gpu, void* to, const void* from, std::size_t bytes, Stream stream) {
    gpu.api().check(gpu.api().memcpy_async(to, from, bytes, CopyKind::Default, stream),
                    "copying on a CUDA stream");
}

void synchronize(const Gpu& gpu, Stream stream) {
    gpu.api().check(gpu.api().stream_synchronize(stream), "waiting for a CUDA stream");
}

}  // namespace ddp::cuda
