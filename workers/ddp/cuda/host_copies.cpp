#include "ddp/cuda/host_copies.h"

#include <cstring>
#include <set>
#include <utility>

#include "ddp/worker/slices.h"

namespace ddp::cuda {
namespace {

bool is_on_device(const Tensor& tensor) { return tensor.memory.device.kind == Device::Kind::Cuda; }

/// Each copy begins on a cache line.
std::size_t padded_bytes(const Tensor& tensor) { return round_up(tensor.memory.bytes(), 64); }

}  // namespace

std::byte* HostScratch::reserve(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes) {
    if (!gpu) {
        if (plain_bytes_ < bytes) {
            plain_.reset();
            plain_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
            plain_bytes_ = bytes;
        }
        return plain_.get();
    }
    if (!pinned_ || pinned_->bytes() < bytes) {
        pinned_.reset();
        pinned_.emplace(gpu, bytes);
    }
    return pinned_->get();
}

HostCopies::HostCopies(std::span<const Tensor> tensors, Begin begin, std::shared_ptr<HostScratch> scratch,
                       Of of)
    : originals_(tensors.begin(), tensors.end()), copies_(originals_), scratch_(std::move(scratch)), of_(of) {
    std::size_t total = 0;
    std::shared_ptr<const Gpu> gpu;
    for (const Tensor& tensor : originals_) {
        if (is_copied(tensor)) total += padded_bytes(tensor);
        if (is_on_device(tensor) && !gpu) gpu = Gpu::of(tensor.memory.device.index);
    }
    if (!gpu && of_ == Of::Device) return;
    std::byte* at = scratch_->reserve(gpu, total);
    for (Tensor& tensor : copies_) {
        if (!is_copied(tensor)) continue;
        const std::size_t room_taken = padded_bytes(tensor);
        tensor.memory = {at, tensor.memory.count, tensor.memory.dtype, {}};
        at += room_taken;
    }
    if (begin == Begin::WithContents) copy_all(Direction::ToHost);
}

bool HostCopies::is_copied(const Tensor& tensor) const { return of_ == Of::All || is_on_device(tensor); }

void HostCopies::upload() const { copy_all(Direction::ToDevice); }

/// Waits for each device once before its copies and once after them.
void HostCopies::copy_all(Direction direction) const {
    std::set<int> devices;
    for (std::size_t i = 0; i < originals_.size(); ++i) {
        const Buffer& original = originals_[i].memory;
        if (is_on_device(originals_[i])) devices.insert(original.device.index);
        else if (of_ == Of::All && original.count > 0 && direction == Direction::ToHost)
            std::memcpy(copies_[i].memory.data, original.data, original.bytes());
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
