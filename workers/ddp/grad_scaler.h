#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

namespace device {
struct GradScale;
}

struct GradScalerOptions {
    double initial_scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    std::uint32_t growth_interval = 2000;  ///< steps with finite gradients until the scale grows
    void* stream = nullptr;                ///< cudaStream_t of the steps
};

/// Keeps small float16 gradients from becoming zero: the loss is multiplied by a scale, the optimizer divides
/// the gradients by it. A step whose gradients are not finite is left out, and the scale is lowered; after
/// many good ones it is raised (torch.cuda.amp.GradScaler). All of it happens on the device: nothing waits.
///
/// All ranks agree without asking: they look at gradients that were reduced, and are equal everywhere.
///
///     ... backward with the loss times *scaler.scale() (a device address) ...; model.finish();
///     scaler.check(model.gradients());
///     optimizer->step(model.gradients());   // made with .device = {.scaler = &scaler}
///     scaler.update();
///
/// Not thread-safe. Outlives the optimizers that use it.
class GradScaler final : public Stateful {
  public:
    /// Throws InvalidInput for options that make no sense, Error when the device cannot be used.
    explicit GradScaler(Device device, GradScalerOptions options = {});
    ~GradScaler() override;
    GradScaler(const GradScaler&) = delete;
    GradScaler& operator=(const GradScaler&) = delete;

    /// Device address of the scale: what the loss, or its gradient, is multiplied by.
    [[nodiscard]] const float* scale() const;
    /// Looks for an element that is not finite. Buffers without memory are left out. Throws InvalidInput for
    /// others than float32, bfloat16 and float16 on the device.
    void check(std::span<const Buffer> gradients);
    /// Once per step, after the optimizer.
    void update();

    /// For a checkpoint, in device memory.
    [[nodiscard]] std::vector<Tensor> state() const override;
    /// Blocking: the scale as it is now.
    [[nodiscard]] double read_scale() const;
    /// For optimizers.
    [[nodiscard]] const device::GradScale* on_device() const;

  private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
