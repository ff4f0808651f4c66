#include "ddp/cuda/host_copies.h"

namespace ddp::cuda {
namespace {

bool is_on_device(const Tensor& tensor) { return tensor.memory.device.kind == Device::Kind::Cuda; }

/// Copies between device memory and ours; waits for the device before and for the copy.
void copy_now(const Gpu& gpu, void* to, const void* from, std::size_t bytes) {
    gpu.make_current();
    gpu.api().check(gpu.api().device_synchronize(), "waiting for a CUDA device");
    copy(gpu, to, from, bytes, nullptr);
    synchronize(gpu, nullptr);
}

}  // namespace

HostCopies::HostCopies(std::span<const Tensor> tensors, Begin begin)
    : originals_(tensors.begin(), tensors.end()), copies_(originals_) {
    for (Tensor& tensor : copies_) {
        if (!is_on_device(tensor)) continue;
        const auto gpu = Gpu::of(tensor.memory.device.index);
        const PinnedMemory& room = memory_.emplace_back(gpu, tensor.memory.bytes());
        if (begin == Begin::WithContents)
            copy_now(*gpu, room.get(), tensor.memory.data, tensor.memory.bytes());
        tensor.memory = {room.get(), tensor.memory.count, tensor.memory.dtype, {}};
    }
}

void HostCopies::upload() const {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
        const Buffer& target = originals_[i].memory;
        if (is_on_device(originals_[i]))
            copy_now(*Gpu::of(target.device.index), target.data, copies_[i].memory.data, target.bytes());
    }
}

}  // namespace ddp::cuda
