#include "ddp/cuda/event_pool.h"

#include <utility>

namespace ddp::cuda {

std::shared_ptr<EventPool> EventPool::make() { return std::shared_ptr<EventPool>(new EventPool); }

std::shared_ptr<const Event> EventPool::take() {
    std::unique_ptr<const Event> event;
    {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            event = std::move(free_.back());
            free_.pop_back();
        }
    }
    if (!event) event = std::make_unique<const Event>();
    return {event.release(), [pool = shared_from_this()](const Event* returned) {
                const std::lock_guard lock(pool->mutex_);
                pool->free_.emplace_back(returned);
            }};
}

}  // namespace ddp::cuda
