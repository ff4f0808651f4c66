#include "ddp/cuda/host_copies.h"

namespace ddp::cuda {
namespace {

bool is_on_device(const Tensor& tensor) { return tensor.memory.device.kind == Device::Kind::Cuda; }

/// Copies between device memory and ours; waits for the device before and for the copy.
void copy_now(int device, void* to, const void* from, std::size_t bytes) {
    check(cudaSetDevice(device), "choosing a CUDA device");
    check(cudaDeviceSynchronize(), "waiting for a CUDA device");
    copy(to, from, bytes, nullptr);
    synchronize(nullptr);
}

}  // namespace

HostCopies::HostCopies(std::span<const Tensor> tensors, Begin begin)
    : originals_(tensors.begin(), tensors.end()), copies_(originals_) {
    for (Tensor& tensor : copies_) {
        if (!is_on_device(tensor)) continue;
        const auto gpu = Gpu::of(tensor.memory.device.index);
        const PinnedMemory& room = memory_.emplace_back(gpu, tensor.memory.bytes());
        if (begin == Begin::WithContents)
            copy_now(gpu->index(), room.get(), tensor.memory.data, tensor.memory.bytes());
        tensor.memory = {room.get(), tensor.memory.count, tensor.memory.dtype, {}};
    }
}

void HostCopies::upload() const {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
        const Buffer& target = originals_[i].memory;
        if (is_on_device(originals_[i]))
            copy_now(target.device.index, target.data, copies_[i].memory.data, target.bytes());
    }
}

}  // namespace ddp::cuda
