#include "ddp/reducer_memory.h"

#include <cstring>
#include <span>
#include <utility>

#include "ddp/cuda/device_average.h"
#include "ddp/cuda/device_kernels.h"
#include "ddp/cuda/memory.h"

namespace ddp {
namespace {

class HostGradients final : public GradientMemory {
  public:
    explicit HostGradients(ProcessGroup& group) : group_(group) {}
    void zero(std::byte* at, std::size_t bytes) override { std::memset(at, 0, bytes); }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
    std::shared_ptr<std::byte> temporary(std::size_t bytes) override {
        const auto all = std::make_shared<std::vector<std::byte>>(bytes);
        return {all, all->data()};
    }
    Work start_average(const Buffer& bucket) override { return group_.all_reduce(bucket, ReduceOp::Avg); }
    void agree_on_maximum(std::int32_t* values, std::size_t count) override {
        group_.all_reduce(buffer_of(std::span(values, count)), ReduceOp::Max).wait();
    }

  private:
    ProcessGroup& group_;
};

class DeviceGradients final : public GradientMemory {
  public:
    DeviceGradients(ProcessGroup& group, std::size_t parameters)
        : group_(group),
          gpu_(cuda::Gpu::of(group.device().index)),
          stream_(static_cast<cuda::Stream>(group.stream())),
          words_(group.allocate_shared(parameters * sizeof(std::int32_t))),
          staging_(gpu_, words_.size()) {}

    void zero(std::byte* at, std::size_t bytes) override {
        gpu_->api().check(gpu_->api().memset_async(at, 0, bytes, stream_), "zeroing gradients");
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
        cuda::copy(*gpu_, to, from, bytes, stream_);
    }
    std::shared_ptr<std::byte> temporary(std::size_t bytes) override {
        const auto memory = std::make_shared<cuda::DeviceMemory>(gpu_, bytes);
        return {memory, memory->get()};
    }
    Work start_average(const Buffer& bucket) override { return cuda::start_average(group_, bucket); }
    void agree_on_maximum(std::int32_t* values, std::size_t count) override {
        const std::size_t bytes = count * sizeof(std::int32_t);
        std::memcpy(staging_.get(), values, bytes);
        copy(words_.data(), staging_.get(), bytes);
        group_.all_reduce({words_.data(), count, DType::I32, group_.device()}, ReduceOp::Max).wait();
        copy(staging_.get(), words_.data(), bytes);
        cuda::synchronize(*gpu_, stream_);
        std::memcpy(values, staging_.get(), bytes);
    }

  private:
    ProcessGroup& group_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::Stream stream_;
    std::span<std::byte> words_;
    cuda::PinnedMemory staging_;
};

}  // namespace

std::unique_ptr<GradientMemory> make_gradient_memory(ProcessGroup& group, std::size_t parameters) {
    if (group.device().kind == Device::Kind::Cpu) return std::make_unique<HostGradients>(group);
    return std::make_unique<DeviceGradients>(group, parameters);
}

bool can_be_averaged(const Buffer& memory, const ProcessGroup& group) {
    if (memory.device != group.device()) return false;
    switch (memory.dtype) {
        case DType::F32:
        case DType::F64:
        case DType::BF16:
        case DType::F16:
            return true;
        case DType::I32:
        case DType::I64:
        case DType::U8:
            return false;
    }
    return false;
}

}  // namespace ddp
