#include "ddp/staged_queue.h"

#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/own_thread.h"
#include "env/text.h"

namespace ddp::staged {

using ddprun::MonotonicClock;

namespace {

constexpr std::chrono::microseconds kLook{50};  ///< between two looks at a copy that is under way
constexpr int kYields = 64;                     ///< before that: small copies are quicker than a sleep

cuda::Stream make_stream(const cuda::Api& cuda) {
    return cuda::make_stream(cuda, cuda::Priority::High, "creating a stream for copies");
}

bool overlap(const Buffer& a, const Buffer& b) {
    const auto* const first = static_cast<const std::byte*>(a.data);
    const auto* const second = static_cast<const std::byte*>(b.data);
    return first < second + b.bytes() && second < first + a.bytes();
}

}  // namespace

PinnedPool::~PinnedPool() {
    for (const auto& [bytes, address] : free_) cuda_->free_host(address);
}

// Sizes are rounded up to powers of two, so that later requests fit what there is.
std::shared_ptr<std::byte> PinnedPool::take(std::size_t bytes) {
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    const auto give_back = [this, size](std::byte* address) {
        const std::lock_guard lock(mutex_);
        free_.emplace(size, address);
    };
    {
        const std::lock_guard lock(mutex_);
        if (const auto found = free_.find(size); found != free_.end()) {
            std::byte* const address = found->second;
            free_.erase(found);
            return {address, give_back};
        }
    }
    void* address = nullptr;
    cuda_->check(cuda_->host_alloc(&address, size, 0),
                 fmt::format("allocating {} of page-locked memory", ddprun::format_bytes(size)).c_str());
    return {static_cast<std::byte*>(address), give_back};
}

namespace {

/// The copy back of a collective, for those who wait before it is done.
struct Arrival {
    cuda::Event event;
    std::mutex mutex;
    std::condition_variable changed;
    bool queued = false;
    std::exception_ptr failure;

    explicit Arrival(const std::shared_ptr<const cuda::Api>& cuda) : event(cuda) {}
    void settle(std::exception_ptr with) {
        {
            const std::lock_guard lock(mutex);
            queued = true;
            failure = std::move(with);
        }
        changed.notify_all();
    }
    void hold_back(cuda::Stream stream) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return queued; });
        if (failure) std::rethrow_exception(failure);
        event.hold_back(stream);
    }
};

}  // namespace

/// A collective on its way.
struct Queue::Operation {
    std::string name;
    std::vector<Part> parts;
    std::function<void()> collective;
    std::shared_ptr<Work::State> work = std::make_shared<Work::State>();
    cuda::Event ready, copied;          ///< the user's stream has come so far; the host has the input
    std::shared_ptr<Arrival> returned;  ///< the device has the output
    bool is_copied_in = false;

    explicit Operation(const std::shared_ptr<const cuda::Api>& cuda)
        : ready(cuda), copied(cuda), returned(std::make_shared<Arrival>(cuda)) {}
};

Queue::Queue(QueueParts parts)
    : parts_(std::move(parts)), in_(make_stream(*parts_.cuda)), out_(make_stream(*parts_.cuda)) {
    thread_ = start_own_thread("ddp-staged", [this] { work(); });
}

Queue::~Queue() {
    {
        const std::lock_guard lock(mutex_);
        leaving_ = true;
    }
    changed_.notify_all();
    thread_.join();
    parts_.cuda->stream_destroy(in_);
    parts_.cuda->stream_destroy(out_);
}

Work Queue::start(std::string name, std::vector<Part> parts, std::function<void()> collective) {
    // Whoever calls may work on another device, or be a thread that never chose one.
    const cuda::DeviceScope here(*parts_.cuda, parts_.device);
    const auto operation = std::make_shared<Operation>(parts_.cuda);
    operation->name = std::move(name);
    operation->parts = std::move(parts);
    operation->collective = std::move(collective);
    operation->ready.record(parts_.user_stream);
    operation->work->hold_back = [returned = operation->returned, stream = parts_.user_stream] {
        returned->hold_back(stream);
    };
    {
        const std::lock_guard lock(mutex_);
        // Ahead of its turn, while others are still on the host: unless it reads what they write.
        if (may_copy_now(*operation)) copy_in(*operation);
        waiting_.push_back(operation);
    }
    changed_.notify_all();
    return Work(operation->work);
}

void Queue::run(std::string name, std::function<void()> task) {
    start(std::move(name), {}, std::move(task)).synchronize();
}

void Queue::clear(void* address, std::size_t bytes) {
    run("clearing device memory", [&] {
        parts_.cuda->check(parts_.cuda->memset_async(address, 0, bytes, out_), "clearing device memory");
    });
}

bool Queue::may_copy_now(const Operation& operation) const {
    for (const Part& mine : operation.parts) {
        for (const auto& earlier : waiting_) {
            const bool waits =
                std::any_of(earlier->parts.begin(), earlier->parts.end(), [&](const Part& theirs) {
                    return theirs.comes_out && mine.goes_in && overlap(mine.device, theirs.device);
                });
            // A host copy that is a fixed one has its last user in the queue too.
            const bool shares =
                std::any_of(earlier->parts.begin(), earlier->parts.end(),
                            [&](const Part& theirs) { return overlap(mine.host, theirs.host); });
            if (waits || shares) return false;
        }
    }
    return true;
}

// Behind the user's stream, and behind every copy back: one of them may have written what is read here.
void Queue::copy_in(Operation& operation) const {
    operation.ready.hold_back(in_);
    if (last_out_) last_out_->hold_back(in_);
    for (const Part& part : operation.parts) {
        if (!part.goes_in || part.device.bytes() == 0) continue;
        parts_.cuda->check(parts_.cuda->memcpy_async(part.host.data, part.device.data, part.device.bytes(),
                                                     cuda::CopyKind::DeviceToHost, in_),
                           operation.name.c_str());
    }
    operation.copied.record(in_);
    operation.is_copied_in = true;
}

void Queue::copy_out(Operation& operation) const {
    for (const Part& part : operation.parts) {
        if (!part.comes_out || part.device.bytes() == 0) continue;
        parts_.cuda->check(parts_.cuda->memcpy_async(part.device.data, part.host.data, part.device.bytes(),
                                                     cuda::CopyKind::HostToDevice, out_),
                           operation.name.c_str());
    }
    operation.returned->event.record(out_);
}

void Queue::wait_for(const cuda::Event& event, const std::string& name) const {
    const auto deadline = ddprun::deadline_after(MonotonicClock::now(), parts_.timeout);
    for (int turn = 0;; ++turn) {
        const cuda::Code code = event.query();
        if (code == cuda::Code::Success) return;
        if (code != cuda::Code::NotReady) parts_.cuda->check(code, name.c_str());
        if (turn < kYields) {
            ::sched_yield();
            continue;
        }
        parts_.throw_if_lost();
        if (MonotonicClock::now() >= deadline) {
            throw TimeoutError(fmt::format("{}: the device did not come to it within {}", name,
                                           ddprun::format_duration(parts_.timeout)));
        }
        std::this_thread::sleep_for(kLook);
    }
}

bool Queue::execute(Operation& operation) {
    std::exception_ptr failure;
    try {
        {
            const std::lock_guard lock(mutex_);
            if (!operation.is_copied_in) copy_in(operation);
        }
        wait_for(operation.copied, operation.name);
        wait_for(operation.ready, operation.name);  // reached: tells whether the program's own work failed
        operation.collective();
        copy_out(operation);
    } catch (...) {
        failure = std::current_exception();
    }
    {
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
        if (!failure) last_out_ = {operation.returned, &operation.returned->event};
    }
    if (failure) parts_.give_up(failure);
    operation.returned->settle(failure);
    if (failure) operation.work->finish(failure);
    return failure == nullptr;
}

/// Tells those whose output is on the device; the last look at an event that failed tells why.
void Queue::finish_returned(std::deque<std::shared_ptr<Operation>>& returning) const {
    while (!returning.empty()) {
        const cuda::Code code = returning.front()->returned->event.query();
        if (code == cuda::Code::NotReady) return;
        std::exception_ptr failure;
        try {
            parts_.cuda->check(code, returning.front()->name.c_str());
        } catch (...) {
            failure = std::current_exception();
        }
        returning.front()->work->finish(failure);
        returning.pop_front();
    }
}

void Queue::work() {
    parts_.cuda->set_device(parts_.device);
    cuda::leave_captures_alone(*parts_.cuda);
    std::deque<std::shared_ptr<Operation>> returning;
    std::unique_lock lock(mutex_);
    while (!leaving_ || !waiting_.empty() || !returning.empty()) {
        if (waiting_.empty()) {
            if (returning.empty()) changed_.wait(lock, [this] { return leaving_ || !waiting_.empty(); });
            else changed_.wait_for(lock, kLook, [this] { return !waiting_.empty(); });
        }
        const std::shared_ptr<Operation> next = waiting_.empty() ? nullptr : waiting_.front();
        lock.unlock();
        if (next) {
            if (execute(*next)) returning.push_back(next);
        }
        finish_returned(returning);
        lock.lock();
    }
}

}  // namespace ddp::staged
