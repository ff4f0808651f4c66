#include "layer_kernels.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ddp/cuda/kernel_dialect.h"

DDP_KERNEL_IMAGE(train_kernels)

namespace train {
namespace {

using U64 = unsigned long long;  // as the kernels take them

constexpr std::size_t kPack = ddp::device::kPack;

std::size_t packs_of(std::size_t columns) { return (columns + kPack - 1) / kPack; }

/// The most runs of rows that a bias gradient of that width is summed in before the runs are: as many threads
/// as keep a large device's memory busy, each with a pack of columns of one run. It does not ask the device:
/// the order of sums, and with it their bits, would be another on another one.
std::size_t most_parts_for(std::size_t columns) {
    constexpr std::size_t kThreads = std::size_t{1} << 17, kMost = 1024;
    return std::clamp<std::size_t>(kThreads / packs_of(columns), 1, kMost);
}
/// For runs that are not worth a thread there are fewer.
std::size_t parts_for(std::size_t rows, std::size_t columns) {
    constexpr std::size_t kRowsOfARun = 16;
    return std::clamp<std::size_t>(rows / kRowsOfARun, 1, most_parts_for(columns));
}

const char* suffix_of(ddp::DType type) {
    switch (type) {
        case ddp::DType::BF16:
            return "_bf16";
        case ddp::DType::F16:
            return "_f16";
        default:
            return "_f32";
    }
}

}  // namespace

LayerKernels::LayerKernels(std::shared_ptr<const ddp::cuda::Gpu> gpu, ddp::cuda::Stream stream,
                           ddp::DType type)
    : gpu_(std::move(gpu)), stream_(stream), module_(gpu_, {"train_kernels", train_kernels_image}) {
    const auto find = [&](const char* name) { return module_.function(std::string(name) + suffix_of(type)); };
    stage_ = find("train_stage");
    stage_labels_ = module_.function("train_stage_labels");
    cross_entropy_ = find("train_cross_entropy");
    add_bias_ = find("train_add_bias");
    relu_gradient_ = find("train_relu_gradient");
    column_sums_ = find("train_column_sums");
    sum_parts_ = find("train_sum_parts");
}

void LayerKernels::stage(const float* from, const std::uint32_t* order, const Matrix& to) const {
    stage_.launch(gpu_->grid_for(to.rows * to.columns), stream_, from, order, to.data, U64{to.rows},
                  U64{to.columns}, U64{to.stride});
}

void LayerKernels::stage_labels(const BatchSource& from, std::int32_t* to) const {
    stage_labels_.launch(gpu_->grid_for(from.count), stream_, from.labels, from.order, to, U64{from.count});
}

void LayerKernels::cross_entropy(const Compute::CrossEntropy& loss, double* losses, U64* hits) const {
    if (loss.logits.rows == 0) return;
    cross_entropy_.launch(gpu_->grid_for_rows(std::min(loss.logits.rows, kSlots)), stream_,
                          static_cast<const void*>(loss.logits.data), U64{loss.logits.stride}, loss.labels,
                          loss.delta.data, U64{loss.delta.stride}, U64{loss.logits.rows},
                          U64{loss.logits.columns}, loss.loss_scale, losses, hits, U64{kSlots});
}

void LayerKernels::add_bias(const Matrix& output, const void* bias, Activation activation) const {
    add_bias_.launch(gpu_->grid_for(output.rows * output.columns), stream_, output.data, U64{output.stride},
                     bias, U64{output.rows}, U64{output.columns}, int{activation == Activation::Relu});
}

void LayerKernels::relu_gradient(const Matrix& delta, const void* output) const {
    relu_gradient_.launch(gpu_->grid_for(delta.rows * delta.columns), stream_, delta.data, output,
                          U64{delta.stride}, U64{delta.rows}, U64{delta.columns});
}

void LayerKernels::bias_gradient(const Matrix& delta, void* to) {
    const std::size_t packs = packs_of(delta.columns), parts = parts_for(delta.rows, delta.columns);
    // One for each width, for good: a captured step goes on using it.
    const auto [found, is_new] = parts_.try_emplace(
        delta.columns, gpu_, most_parts_for(delta.columns) * packs * kPack * sizeof(float));
    const ddp::cuda::DeviceMemory& sums = found->second;
    // grid_for gives every thread a pack.
    column_sums_.launch(gpu_->grid_for(parts * packs * kPack), stream_, static_cast<const void*>(delta.data),
                        U64{delta.stride}, U64{delta.rows}, U64{delta.columns}, sums.as<float>(), U64{parts});
    sum_parts_.launch(gpu_->grid_for_rows(packs), stream_, sums.as<const float>(), U64{parts},
                      U64{delta.columns}, to);
}

}  // namespace train
