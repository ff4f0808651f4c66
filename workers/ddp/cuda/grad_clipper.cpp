#include "ddp/grad_clipper.h"

#include <fmt/core.h>

#include <optional>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/memory.h"
#include "ddp/grad_scaler.h"

namespace ddp {

struct GradClipper::Parts {
    Parts(int index, double max_norm, const GradClipperOptions& options)
        : stream(static_cast<cuda::Stream>(options.stream)),
          scale(options.scaler != nullptr ? options.scaler->on_device() : nullptr),
          gpu(cuda::Gpu::of(index)),
          memory(gpu, sizeof(device::GradClip)) {
        memory.write(device::GradClip{max_norm, 0, 0, 1, 0}, stream);
    }
    void reserve(std::size_t stretches) {
        if (!sums || sums->bytes() < stretches * sizeof(double))
            sums.emplace(gpu, stretches * sizeof(double));
    }
    [[nodiscard]] device::GradClip read() const { return memory.read<device::GradClip>(stream); }
    cuda::Stream stream;
    const device::GradScale* scale;
    std::shared_ptr<const cuda::Gpu> gpu;
    cuda::DeviceMemory memory;
    std::optional<cuda::DeviceMemory> sums;
};

GradClipper::GradClipper(Device device, double max_norm, GradClipperOptions options) {
    if (device.kind != Device::Kind::Cuda)
        throw InvalidInput(
            "grad clipper: it works on CUDA devices only; for host memory there is clip_grad_norm");
    if (!(max_norm > 0))
        throw InvalidInput(
            fmt::format("grad clipper: the largest norm is {}; it has to be positive", max_norm));
    parts_ = std::make_unique<Parts>(device.index, max_norm, options);
}

GradClipper::~GradClipper() = default;

void GradClipper::measure(std::span<const Buffer> gradients) {
    std::uint32_t stretches = 0;
    for (const Buffer& gradient : gradients) {
        if (gradient.data != nullptr) stretches += device::stretches_of(gradient.count);
    }
    parts_->reserve(stretches);
    auto* const sums = parts_->sums->as<double>();
    cuda::for_gradients(
        *parts_->gpu, gradients, "grad clipper", [&](const device::GradientBatch& batch, unsigned) {
            const device::GradientArray& last = batch.arrays[batch.count - 1];
            const std::uint32_t end = last.first_stretch + device::stretches_of(last.count);
            cuda::check(device::sum_squares(batch, sums,
                                            parts_->gpu->grid_for_rows(end - batch.arrays[0].first_stretch),
                                            parts_->stream),
                        "summing the squares of gradients");
        });
    cuda::check(device::update_clip(parts_->memory.as<device::GradClip>(), sums, stretches, parts_->scale,
                                    parts_->stream),
                "taking the norm of gradients");
}

double GradClipper::read_norm() const { return parts_->read().norm; }

std::uint64_t GradClipper::read_skipped_steps() const { return parts_->read().skipped; }

const device::GradClip* GradClipper::on_device() const { return parts_->memory.as<device::GradClip>(); }

}  // namespace ddp
