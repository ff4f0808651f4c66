#include "ddp/grad_scaler.h"

#include <fmt/core.h>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/memory.h"

namespace ddp {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw InvalidInput(fmt::format("grad scaler: {}", what));
}

void check_options(const Device& device, const GradScalerOptions& options) {
    require(device.kind == Device::Kind::Cuda, "it works on CUDA devices only");
    // Outside this range the scale or its inverse is not a normal float.
    require(options.initial_scale >= 0x1p-126 && options.initial_scale <= 0x1p127,
            "the initial scale is not in [2^-126, 2^127]");
    require(options.growth_factor >= 1 && options.growth_factor <= 0x1p127,
            "the growth factor is not in [1, 2^127]");
    require(options.backoff_factor > 0 && options.backoff_factor < 1, "the backoff factor is not in (0, 1)");
    require(options.growth_interval > 0, "the growth interval is 0");
}

}  // namespace

struct GradScaler::Parts {
    Parts(Device where, const GradScalerOptions& options)
        : device(where),
          stream(static_cast<cuda::Stream>(options.stream)),
          rules{static_cast<float>(options.growth_factor), static_cast<float>(options.backoff_factor),
                options.growth_interval},
          gpu(cuda::Gpu::of(where.index)),
          memory(gpu, sizeof(device::GradScale)) {
        const auto scale = static_cast<float>(options.initial_scale);
        memory.write(device::GradScale{scale, 1 / scale, 0, 0}, stream);
    }
    Device device;
    cuda::Stream stream;
    device::GradScaleRules rules;
    std::shared_ptr<const cuda::Gpu> gpu;
    cuda::DeviceMemory memory;
};

GradScaler::GradScaler(Device device, GradScalerOptions options) {
    check_options(device, options);
    parts_ = std::make_unique<Parts>(device, options);
}

GradScaler::~GradScaler() = default;

const device::GradScale* GradScaler::on_device() const { return parts_->memory.as<device::GradScale>(); }

const float* GradScaler::scale() const { return &on_device()->scale; }

void GradScaler::check(std::span<const Buffer> gradients) {
    cuda::for_gradients(*parts_->gpu, gradients, "grad scaler",
                        [&](const device::GradientBatch& batch, unsigned blocks) {
                            cuda::check(device::find_non_finite(batch, parts_->memory.as<device::GradScale>(),
                                                                blocks, parts_->stream),
                                        "looking for gradients that are not finite");
                        });
}

void GradScaler::update() {
    cuda::check(device::update_scale(parts_->memory.as<device::GradScale>(), parts_->rules, parts_->stream),
                "moving the scale of the loss");
}

std::vector<Tensor> GradScaler::state() const {
    // The struct as four words: a checkpoint holds all of it, with the inverse and the flag.
    const Buffer words{parts_->memory.get(), sizeof(device::GradScale) / sizeof(float), DType::I32,
                       parts_->device};
    return {{"grad_scaler", {static_cast<std::int64_t>(words.count)}, words}};
}

double GradScaler::read_scale() const { return parts_->memory.read<device::GradScale>(parts_->stream).scale; }

}  // namespace ddp
