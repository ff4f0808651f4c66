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
    /// The norm is taken without this scale. Borrowed; null without one.
    const GradScaler* scaler = nullptr;
};

/// clip_grad_norm on a CUDA device: the optimizer scales all gradients by one factor so that their joint norm
/// is at most `max_norm`, in the pass that reads them; gradients in memory stay unchanged. A step whose norm
/// is not finite is skipped. The device does all of it: the host never waits, also in a captured graph.
///
/// All ranks agree without communication: equal gradients give a norm of the same bits.
///
///     model.finish();
///     clipper.measure(model.gradients());    // beside scaler.check, where there is one
///     optimizer->step(model.gradients());    // made with .device = {.clipper = &clipper}
///
/// Not thread-safe. It outlives the optimizers that use it.
class GradClipper {
  public:
    /// Throws InvalidInput for a norm that is not positive and for host memory, Error when the device cannot
    /// be used.
    GradClipper(Device device, double max_norm, GradClipperOptions options = {});
    ~GradClipper();
    GradClipper(const GradClipper&) = delete;
    GradClipper& operator=(const GradClipper&) = delete;

    /// Takes all gradients that are clipped together, whatever their parameter groups. Buffers without memory
    /// are ignored. Throws InvalidInput unless the others are float32, bfloat16 or float16 on the device. A
    /// call with more gradients than any before allocates: it waits for the device, and graphs captured with
    /// fewer must not be launched any more.
    void measure(std::span<const Buffer> gradients);

    /// Blocking: the norm of the gradients last measured, before clipping.
    [[nodiscard]] double read_norm() const;
    /// Blocking: the number of steps skipped so far.
    [[nodiscard]] std::uint64_t read_skipped_steps() const;
    /// Used by optimizers.
    [[nodiscard]] const device::GradClip* on_device() const;

  private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
