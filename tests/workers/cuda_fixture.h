#pragma once

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "ddp/cuda/gpu.h"
#include "ddp/cuda/memory.h"
#include "ddp/process_group.h"

/// Device memory for tests. They run on the CUDA runtime that their program is linked with: here the fake.
namespace ddp::testing {

/// A counter of the calling thread's calls; only the fake counts. Null elsewhere.
using Count = long (*)();
inline Count counter(const char* name) { return reinterpret_cast<Count>(::dlsym(RTLD_DEFAULT, name)); }
/// The number of calls that waited for a device.
inline Count blocking_calls() { return counter("fake_cuda_blocking_calls"); }
inline Count launches() { return counter("fake_cuda_launches"); }
inline Count copies() { return counter("fake_cuda_copies"); }

inline std::shared_ptr<const cuda::Gpu> gpu() { return cuda::Gpu::of(0); }

/// Normal numbers, the same for the same seed.
inline std::vector<float> random_floats(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    return values;
}

/// Values in device memory, `offset` elements behind a 256-byte boundary.
template <class T>
class OnDevice {
  public:
    OnDevice(std::shared_ptr<const cuda::Gpu> gpu, const std::vector<T>& values, DType dtype,
             std::size_t offset = 0)
        : gpu_(std::move(gpu)),
          memory_(gpu_, (values.size() + offset) * sizeof(T)),
          offset_(offset),
          count_(values.size()),
          dtype_(dtype) {
        put(values);
    }
    [[nodiscard]] T* data() const { return memory_.as<T>() + offset_; }
    [[nodiscard]] Buffer buffer() const {
        return {data(), count_, dtype_, {Device::Kind::Cuda, gpu_->index()}};
    }
    void put(const std::vector<T>& values) const {
        cuda::copy(data(), values.data(), count_ * sizeof(T), nullptr);
        cuda::synchronize(nullptr);
    }
    /// Reads the values after all work on `stream`.
    [[nodiscard]] std::vector<T> values(cuda::Stream stream = nullptr) const {
        std::vector<T> copied(count_);
        cuda::copy(copied.data(), data(), count_ * sizeof(T), stream);
        cuda::synchronize(stream);
        return copied;
    }

  private:
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::DeviceMemory memory_;
    std::size_t offset_, count_;
    DType dtype_;
};

}  // namespace ddp::testing
