#include "ddp/reduce/tensor_broadcast.h"

#include <algorithm>
#include <cstring>

#include "ddp/cuda/memory.h"

namespace ddp {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 20;  ///< bytes above which a copy costs more than a call
constexpr std::size_t kBucketBytes = std::size_t{25} << 20;  ///< least size of a full bucket

std::shared_ptr<std::byte> make_scratch(const ProcessGroup& group, std::size_t bytes) {
    if (group.device().kind == Device::Kind::Cuda) {
        const auto memory = std::make_shared<cuda::DeviceMemory>(cuda::Gpu::of(group.device().index), bytes);
        return {memory, memory->get()};
    }
    const auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    return {memory, memory->data()};
}

}  // namespace

TensorBroadcast::TensorBroadcast(ProcessGroup& group, const std::vector<Tensor>& tensors) : group_(group) {
    for (const Tensor& tensor : tensors) add(tensor.memory);
    std::size_t most = 0;
    for (const Bucket& bucket : buckets_) most = std::max(most, bucket.bytes);
    if (most > 0) scratch_ = make_scratch(group, most);
}

void TensorBroadcast::add(const Buffer& tensor) {
    if (tensor.bytes() >= kLarge) {
        large_.push_back(tensor);
        return;
    }
    if (buckets_.empty() || buckets_.back().bytes >= kBucketBytes) buckets_.emplace_back();
    buckets_.back().tensors.push_back(tensor);
    buckets_.back().bytes += tensor.bytes();
}

void TensorBroadcast::run(int root) {
    std::vector<Work> works;
    for (const Buffer& tensor : large_) works.push_back(group_->broadcast(tensor, root));
    for (const Bucket& bucket : buckets_) {
        std::byte* at = scratch_.get();
        for (const Buffer& tensor : bucket.tensors) {
            if (group_->rank() == root) copy(at, static_cast<const std::byte*>(tensor.data), tensor.bytes());
            at += tensor.bytes();
        }
        group_->broadcast({scratch_.get(), bucket.bytes, DType::U8, group_->device()}, root).wait();
        at = scratch_.get();
        for (const Buffer& tensor : bucket.tensors) {
            if (group_->rank() != root) copy(static_cast<std::byte*>(tensor.data), at, tensor.bytes());
            at += tensor.bytes();
        }
    }
    for (Work& work : works) work.wait();
}

void TensorBroadcast::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (bytes == 0) return;
    if (group_->device().kind == Device::Kind::Cuda)
        cuda::copy(to, from, bytes, static_cast<cuda::Stream>(group_->stream()));
    else std::memcpy(to, from, bytes);
}

}  // namespace ddp
