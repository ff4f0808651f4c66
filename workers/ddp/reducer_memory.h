#pragma once

#include <cstddef>
#include <memory>

#include "ddp/process_group.h"

namespace ddp {

/// What the reducer does to gradients in place, on the host or on a device. On a device all of it happens in
/// the order of the group's stream, and nothing waits for it.
class GradientMemory {
  public:
    virtual ~GradientMemory() = default;
    virtual void zero(std::byte* at, std::size_t bytes) = 0;
    virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
    /// Memory of the same kind for the time of a layout. May wait.
    virtual std::shared_ptr<std::byte> temporary(std::size_t bytes) = 0;
    /// Starts the averaging of a bucket over all ranks, in the way that is fastest there.
    virtual Work start_average(const Buffer& bucket) = 0;
    /// Everyone's maximum of each of `count` numbers. Waits for it.
    virtual void agree_on_maximum(std::int32_t* values, std::size_t count) = 0;
};

/// For memory that the group gave. The group is borrowed. Collective for a device.
std::unique_ptr<GradientMemory> make_gradient_memory(ProcessGroup& group, std::size_t parameters);

/// Whether the group averages gradients of this memory.
[[nodiscard]] bool can_be_averaged(const Buffer& memory, const ProcessGroup& group);

}  // namespace ddp
