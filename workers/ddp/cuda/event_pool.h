#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "ddp/cuda/cuda_api.h"

namespace ddp::cuda {

/// Reuses events: making and destroying one costs more than recording it. Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
  public:
    static std::shared_ptr<EventPool> make();
    /// A free event; record it before any other use. It returns to the pool with its last owner, who may
    /// outlive the pool's creator. Throws Error.
    std::shared_ptr<const Event> take();

  private:
    EventPool() = default;
    std::mutex mutex_;
    std::vector<std::unique_ptr<const Event>> free_;
};

}  // namespace ddp::cuda
