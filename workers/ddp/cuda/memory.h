#pragma once

#include <cstddef>
#include <memory>

#include "ddp/cuda/gpu.h"
#include "ddp/types.h"

namespace ddp::cuda {

/// Memory of a CUDA device, at least 256-byte aligned. The destructor frees it: cudaFree waits for the
/// device, so do not use it inside a step.
class DeviceMemory {
  public:
    /// Throws Error naming the size and the free memory of the device. 0 bytes are allowed.
    DeviceMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes);
    ~DeviceMemory();
    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&&) = delete;

    [[nodiscard]] std::byte* get() const { return memory_; }
    template <class T>
    [[nodiscard]] T* as() const {
        return reinterpret_cast<T*>(memory_);
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// Zeroes the memory, queued on `stream`.
    void clear(Stream stream) const;

  private:
    std::shared_ptr<const Gpu> gpu_;
    std::byte* memory_ = nullptr;
    std::size_t bytes_;
};

/// Page-locked host memory, the only kind that is copied to or from a device without blocking.
class PinnedMemory {
  public:
    PinnedMemory(std::shared_ptr<const Gpu> gpu, std::size_t bytes);
    ~PinnedMemory();
    PinnedMemory(PinnedMemory&& other) noexcept;
    PinnedMemory& operator=(PinnedMemory&&) = delete;

    [[nodiscard]] std::byte* get() const { return memory_; }
    template <class T>
    [[nodiscard]] T* as() const {
        return reinterpret_cast<T*>(memory_);
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

  private:
    std::shared_ptr<const Gpu> gpu_;
    std::byte* memory_ = nullptr;
    std::size_t bytes_;
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

}  // namespace ddp::cuda
