#include "ddp/cuda/host_copies.h"

#include <set>
#include <utility>

namespace ddp::cuda {
namespace {

bool is_on_device(const Tensor& tensor) { return tensor.memory.device.kind == Device::Kind::Cuda; }

/// Each copy begins on a cache line.
std::size_t padded_bytes(const Tensor& tensor) {
    constexpr std::size_t kLine = 64;
    return (tensor.memory.bytes() + kLine - 1) / kLine * kLine;
}

}  // namespace

std::byte* HostScratch::reserve(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes) {
    if (!memory_ || memory_->bytes() < bytes) {
        memory_.reset();
        memory_.emplace(gpu, bytes);
    }
    return memory_->get();
}

HostCopies::HostCopies(std::span<const Tensor> tensors, Begin begin, std::shared_ptr<HostScratch> scratch)
    : originals_(tensors.begin(), tensors.end()), copies_(originals_), scratch_(std::move(scratch)) {
    std::size_t total = 0;
    const Tensor* first = nullptr;
    for (const Tensor& tensor : originals_) {
        if (!is_on_device(tensor)) continue;
        total += padded_bytes(tensor);
        if (first == nullptr) first = &tensor;
    }
    if (first == nullptr) return;
    std::byte* at = scratch_->reserve(Gpu::of(first->memory.device.index), total);
    for (Tensor& tensor : copies_) {
        if (!is_on_device(tensor)) continue;
        const std::size_t room_taken = padded_bytes(tensor);
        tensor.memory = {at, tensor.memory.count, tensor.memory.dtype, {}};
        at += room_taken;
    }
    if (begin == Begin::WithContents) copy_all(Direction::ToHost);
}

void HostCopies::upload() const { copy_all(Direction::ToDevice); }

/// Waits for each device once before its copies and once after them.
void HostCopies::copy_all(Direction direction) const {
    std::set<int> devices;
    for (const Tensor& tensor : originals_) {
        if (is_on_device(tensor)) devices.insert(tensor.memory.device.index);
    }
    for (const int device : devices) {
        check(cudaSetDevice(device), "choosing a CUDA device");
        check(cudaDeviceSynchronize(), "waiting for a CUDA device");
        for (std::size_t i = 0; i < originals_.size(); ++i) {
            const Buffer &original = originals_[i].memory, &own = copies_[i].memory;
            if (!is_on_device(originals_[i]) || original.device.index != device) continue;
            if (direction == Direction::ToHost) copy(own.data, original.data, original.bytes(), nullptr);
            else copy(original.data, own.data, original.bytes(), nullptr);
        }
        synchronize(nullptr);
    }
}

}  // namespace ddp::cuda
