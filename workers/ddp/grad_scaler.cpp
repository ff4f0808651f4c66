#include "ddp/grad_scaler.h"

#include <fmt/core.h>

#include <string>

#include "ddp/cuda/chunk_table.h"
#include "ddp/cuda/device_kernels.h"
#include "ddp/cuda/memory.h"

namespace ddp {
namespace {

/// Room for the gradients of most models; those of larger ones make some at the first check.
constexpr std::size_t kChunks = 8192;

void require(bool holds, const char* what) {
    if (!holds) throw InvalidInput(fmt::format("grad scaler: {}", what));
}

std::string place(const Device& device) {
    if (device.kind == Device::Kind::Cpu) return "host memory";
    return fmt::format("memory of CUDA device {}", device.index);
}

void check_options(const Device& device, const GradScalerOptions& options) {
    require(device.kind == Device::Kind::Cuda, "it works on CUDA devices only");
    require(options.initial_scale > 0 && options.initial_scale <= 0x1p127,
            "the initial scale is not in (0, 2^127]");
    require(options.growth_factor >= 1, "the growth factor is below 1");
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
          kernels(cuda::DeviceKernels::of(gpu)),
          memory(gpu, sizeof(device::GradScale)),
          table(gpu, "grad scaler", kChunks) {
        const auto scale = static_cast<float>(options.initial_scale);
        const device::GradScale initial{scale, 1 / scale, 0, 0};
        cuda::copy(*gpu, memory.get(), &initial, sizeof initial, stream);
        cuda::synchronize(*gpu, stream);
    }
    [[nodiscard]] std::vector<device::GradientChunk> chunks_of(std::span<const Buffer> gradients) const {
        std::uint64_t all = 0;
        for (const Buffer& gradient : gradients) {
            if (gradient.data == nullptr) continue;
            check_gradient(gradient);
            all += gradient.count;
        }
        return cuda::gradient_chunks(gradients, cuda::chunk_elements(all, gpu->grid_for(all)));
    }
    void check_gradient(const Buffer& gradient) const {
        if (gradient.device == device && cuda::has_kernels(gradient.dtype)) return;
        throw InvalidInput(fmt::format(
            "grad scaler: a gradient of {} elements of {} in {} cannot be checked; it takes float32, "
            "bfloat16 and float16 in {}",
            gradient.count, name_of(gradient.dtype), place(gradient.device), place(device)));
    }
    Device device;
    cuda::Stream stream;
    device::GradScaleRules rules;
    std::shared_ptr<const cuda::Gpu> gpu;
    const cuda::DeviceKernels& kernels;
    cuda::DeviceMemory memory;
    cuda::ChunkTable<device::GradientChunk> table;
};

GradScaler::GradScaler(Device device, GradScalerOptions options) {
    check_options(device, options);
    parts_ = std::make_unique<Parts>(device, options);
}

GradScaler::~GradScaler() = default;

const device::GradScale* GradScaler::on_device() const { return parts_->memory.as<device::GradScale>(); }

const float* GradScaler::scale() const { return &on_device()->scale; }

void GradScaler::check(std::span<const Buffer> gradients) {
    const auto chunks =
        parts_->table.of(gradients, parts_->stream, [&] { return parts_->chunks_of(gradients); });
    parts_->kernels.find_non_finite(chunks, parts_->memory.as<device::GradScale>(), parts_->stream);
}

void GradScaler::update() {
    parts_->kernels.update(parts_->memory.as<device::GradScale>(), parts_->rules, parts_->stream);
}

std::vector<Tensor> GradScaler::state() const {
    // The struct as four words: a checkpoint holds all of it, the inverse and the flag too.
    const Buffer words{parts_->memory.get(), sizeof(device::GradScale) / sizeof(float), DType::I32,
                       parts_->device};
    return {{"grad_scaler", {static_cast<std::int64_t>(words.count)}, words}};
}

double GradScaler::read_scale() const {
    device::GradScale now{};
    cuda::copy(*parts_->gpu, &now, parts_->memory.get(), sizeof now, parts_->stream);
    cuda::synchronize(*parts_->gpu, parts_->stream);
    return now.scale;
}

}  // namespace ddp
