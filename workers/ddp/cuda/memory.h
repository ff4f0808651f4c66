#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "ddp/cuda/gpu.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Memory from CUDA, freed by the destructor.
class OwnedMemory {
  public:
    [[nodiscard]] std::byte* get() const { return memory_.get(); }
    template <class T>
    [[nodiscard]] T* as() const {
        return reinterpret_cast<T*>(get());
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

  protected:
    using Free = cudaError_t (*)(void* memory);
    OwnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes, void* memory, Free free)
        : gpu_(std::move(gpu)), memory_(static_cast<std::byte*>(memory), free), bytes_(bytes) {}

  private:
    std::shared_ptr<const Gpu> gpu_;
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_;
};

/// Memory of a CUDA device, at least 256-byte aligned. cudaFree waits for the device, so do not destroy it
/// inside a step.
class DeviceMemory : public OwnedMemory {
  public:
    /// Throws Error naming the size and the free memory of the device. 0 bytes are allowed.
    DeviceMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes);
    /// Zeroes the memory, queued on `stream`.
    void clear(Stream stream) const;
    /// Copies one value there or from there. Blocks until the work on `stream` is done.
    template <class T>
    void write(const T& value, Stream stream) const;
    template <class T>
    [[nodiscard]] T read(Stream stream) const;
};

/// Page-locked host memory, the only kind that is copied to or from a device without blocking.
class PinnedMemory : public OwnedMemory {
  public:
    PinnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes);
};

/// A stream of its own that does not wait for the default stream. The destructor does not wait for queued
/// work.
class OwnedStream {
  public:
    explicit OwnedStream(std::shared_ptr<const Gpu> gpu, Priority priority = Priority::Normal);
    ~OwnedStream();
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;

    [[nodiscard]] Stream get() const { return stream_; }
    /// Blocks until all queued work is done. Throws Error with the device's failure.
    void synchronize() const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    Stream stream_ = nullptr;
};

/// Queues a copy between any two places on `stream`. Does not block when host memory is pinned.
void copy(void* to, const void* from, std::size_t bytes, Stream stream);
/// Blocks until all work queued on `stream` is done. Throws Error with the device's failure.
void synchronize(Stream stream);

template <class T>
void DeviceMemory::write(const T& value, Stream stream) const {
    copy(get(), &value, sizeof value, stream);
    synchronize(stream);
}
template <class T>
T DeviceMemory::read(Stream stream) const {
    T value{};
    copy(&value, get(), sizeof value, stream);
    synchronize(stream);
    return value;
}

}  // namespace ddp::cuda
