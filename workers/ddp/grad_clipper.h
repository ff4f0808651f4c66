#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

class GradScaler;

namespace device {
struct GradClip;
}

struct GradClipperOptions {
    void* stream = nullptr;  ///< cudaStream_t of the steps
    /// The norm is that of the gradients without its scale. Borrowed.
    const GradScaler* scaler = nullptr;
};

/// clip_grad_norm on a CUDA device: the optimizer scales all gradients alike so that their norm together is
/// `max_norm` at most, in the pass that reads them; in memory they stay as they are. A step whose norm is not
/// finite is left out. All of it happens on the device: nothing waits, also in a captured graph.
///
/// All ranks agree without asking: equal gradients give a norm of the same bits.
///
///     model.finish();
///     clipper.measure(model.gradients());    // beside scaler.check, where there is one
///     optimizer->step(model.gradients());    // made with .device = {.clipper = &clipper}
///
/// Not thread-safe. Outlives the optimizers that use it.
class GradClipper {
  public:
    /// Throws InvalidInput for a norm that is not positive and for host memory, Error when the device cannot
    /// be used.
    GradClipper(Device device, double max_norm, GradClipperOptions options = {});
    ~GradClipper();
    GradClipper(const GradClipper&) = delete;
    GradClipper& operator=(const GradClipper&) = delete;

    /// Of all gradients that are clipped together, whatever their groups of parameters. Buffers without
    /// memory are left out. Throws InvalidInput for others than float32, bfloat16 and float16 on the device.
    /// For more than ever before it allocates: that waits, and graphs that were captured with fewer must not
    /// be launched any more.
    void measure(std::span<const Buffer> gradients);

    /// Blocking: of the gradients last measured, before they were clipped.
    [[nodiscard]] double read_norm() const;
    /// Blocking: the steps that were left out so far.
    [[nodiscard]] std::uint64_t read_left_out() const;
    /// For optimizers.
    [[nodiscard]] const device::GradClip* on_device() const;

  private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
