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

/// Keeps small float16 gradients from becoming zero: the loss is multiplied by a scale, and the optimizer
/// divides the gradients by it. A step whose gradients are not finite is skipped and lowers the scale;
/// growth_interval finite steps raise it (torch.cuda.amp.GradScaler). The device does all of it: the host
/// never waits.
///
/// All ranks agree without communication: they check reduced gradients, which are equal everywhere.
///
///     ... backward with the loss times *scaler.scale() (a device address) ...; model.finish();
///     scaler.check(model.gradients());
///     optimizer->step(model.gradients());   // made with .device = {.scaler = &scaler}
///     scaler.update();
///
/// Not thread-safe. It outlives the optimizers that use it.
class GradScaler final : public Stateful {
  public:
    /// Throws InvalidInput for invalid options, Error when the device cannot be used.
    explicit GradScaler(Device device, GradScalerOptions options = {});
    ~GradScaler() override;
    GradScaler(const GradScaler&) = delete;
    GradScaler& operator=(const GradScaler&) = delete;

    /// Device address of the scale, the factor of the loss or of its gradient.
    [[nodiscard]] const float* scale() const;
    /// Looks for an element that is not finite. Buffers without memory are ignored. Throws InvalidInput
    /// unless the others are float32, bfloat16 or float16 on the device.
    void check(std::span<const Buffer> gradients);
    /// Called once per step, after the optimizer.
    void update();

    /// For a checkpoint, in device memory.
    [[nodiscard]] std::vector<Tensor> state() const override;
    /// Blocking: reads the current scale.
    [[nodiscard]] double read_scale() const;
    /// Used by optimizers.
    [[nodiscard]] const device::GradScale* on_device() const;

  private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
