#include "ddp/nccl/communicator.h"

#include <fmt/core.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <thread>
#include <utility>

#include "ddp/worker/device_error.h"
#include "ddp/worker/work.h"

namespace ddp::nccl {

using ddprun::MonotonicClock;

namespace {

constexpr std::chrono::milliseconds kExplainLimit{100};
constexpr std::chrono::seconds kAbortLimit{2};
constexpr std::chrono::seconds kDestroyLimit{5};
constexpr std::chrono::milliseconds kLossGrace{500};

std::atomic<int> aborts_running{0};

/// The communicator's own state: InProgress when its call has only begun.
Code state_of(const Api& api, Handle handle) {
    Code state = Code::Success;
    const Code code = api.comm_get_async_error(handle, &state);
    return code == Code::Success ? state : code;
}

/// True once the predicate holds, false after the deadline.
template <class Predicate>
bool poll_until(ddprun::TimePoint deadline, Predicate predicate) {
    for (Backoff backoff; !predicate(); backoff.next()) {
        if (MonotonicClock::now() >= deadline) return false;
    }
    return true;
}

}  // namespace

void Backoff::next() {
    constexpr timespec kPause{.tv_sec = 0, .tv_nsec = 200'000};
    constexpr std::chrono::microseconds kYielding{
        300};  // a yield lets other threads of this core run for their slices
    MonotonicClock::now() - begin_ >= kYielding ? (void)::nanosleep(&kPause, nullptr) : (void)::sched_yield();
}

bool returns_within(std::chrono::nanoseconds limit, std::function<void()> task) {
    struct Shared {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
    };
    const auto shared = std::make_shared<Shared>();
    std::thread thread = start_own_thread("ddp-nccl", [shared, task = std::move(task)]() mutable {
        task();
        task = nullptr;  // frees its captures before the end is published
        const std::lock_guard lock(shared->mutex);
        shared->done = true;
        shared->changed.notify_all();
    });
    std::unique_lock lock(shared->mutex);
    const bool done = shared->changed.wait_for(lock, limit, [&] { return shared->done; });
    lock.unlock();
    done ? thread.join() : thread.detach();
    return done;
}

bool aborts_return_within(std::chrono::nanoseconds limit) {
    return poll_until(ddprun::deadline_after(MonotonicClock::now(), limit),
                      [] { return aborts_running == 0; });
}

void throw_late_loss(const WaitBounds& bounds) {
    if (bounds.ranks == 1) return;
    poll_until(MonotonicClock::now() + kLossGrace, [&] { return bounds.throw_if_lost(), false; });
}

Communicator::~Communicator() = default;

std::shared_ptr<Communicator> Communicator::join(std::shared_ptr<const Api> api, std::vector<UniqueId> ids,
                                                 int rank, int ranks, const WaitBounds& bounds,
                                                 const std::string& attempt) {
    const auto made = std::make_shared<Communicator>(std::move(api));
    const Code code = made->start_joining(ids, rank, ranks);
    try {
        made->wait_until_joined(code, bounds, attempt);
    } catch (...) {
        made->stop(kAbortLimit);
        throw;
    }
    return made;
}

void Communicator::wait_until_joined(Code code, const WaitBounds& bounds, const std::string& attempt) {
    for (Backoff backoff; code == Code::InProgress; backoff.next()) {
        bounds.throw_if_lost();
        if (MonotonicClock::now() >= bounds.deadline) {
            throw TimeoutError(attempt + ": NCCL was not done within the time-out");
        }
        code = state().value_or(Code::InProgress);
    }
    if (code == Code::Success) return;
    const std::string what = fmt::format("{}: {}; NCCL_DEBUG=INFO shows more", attempt, explain(code));
    throw_late_loss(bounds);
    throw Error(what);
}

// The old communicator tells when the new one exists, and the new one when it is ready.
std::shared_ptr<Communicator> Communicator::split(int color, int key, const WaitBounds& bounds,
                                                  const std::string& attempt) {
    const auto made = std::make_shared<Communicator>(api_);
    Config config;
    config.blocking = 0;
    const std::optional<Code> code = call([&](Handle handle) {
        splitting_ = made;
        return api_->comm_split(handle, color, key, &made->handle_, &config);
    });
    wait_until_joined(code.value_or(Code::InProgress), bounds, attempt);
    {
        const std::lock_guard lock(mutex_);
        if (handle_ != nullptr) splitting_ = nullptr;  // else it was stopped in between, with the split
    }
    if (color == kNoColor) return nullptr;
    if (made->handle_ == nullptr) throw Error(attempt + ": NCCL made no communicator");
    try {
        made->wait_until_joined(Code::InProgress, bounds, attempt);
    } catch (...) {
        made->stop(kAbortLimit);
        throw;
    }
    return made;
}

Code Communicator::start_joining(std::vector<UniqueId>& ids, int rank, int ranks) {
    Config config;
    config.blocking = 0;
    const std::lock_guard lock(mutex_);
    const Code code = ids.size() == 1
                          ? api_->comm_init_rank_config(&handle_, ranks, ids.front(), rank, &config)
                          : api_->comm_init_rank_scalable(&handle_, ranks, rank, static_cast<int>(ids.size()),
                                                          ids.data(), &config);
    return code == Code::Success && handle_ != nullptr ? state_of(*api_, handle_) : code;
}

std::optional<Code> Communicator::call(const std::function<Code(Handle)>& call) {
    const std::lock_guard lock(mutex_);
    if (handle_ == nullptr) return std::nullopt;
    const Code code = call(handle_);
    // ncclCommSplit and ncclCommWindowRegister return Success when they have only begun.
    return code == Code::Success ? state_of(*api_, handle_) : code;
}

std::optional<Code> Communicator::state() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || handle_ == nullptr) return std::nullopt;
    return state_of(*api_, handle_);
}

std::string Communicator::explain(Code code) {
    // A thread stuck inside NCCL must not keep the failure from being reported.
    std::unique_lock lock(mutex_, std::defer_lock);
    poll_until(MonotonicClock::now() + kExplainLimit, [&] { return lock.try_lock(); });
    const std::string what = api_->explain(code, lock ? handle_ : nullptr);
    note_device_error(DeviceLibrary::Nccl, what);
    return what;
}

bool Communicator::stop(std::chrono::nanoseconds limit) {
    ++aborts_running;
    return returns_within(limit, [self = shared_from_this()] {
        self->abort();
        --aborts_running;
    });
}

void Communicator::abort() {
    Handle handle = nullptr;
    {
        const std::lock_guard lock(mutex_);
        handle = std::exchange(handle_, nullptr);
    }
    if (handle == nullptr) return;
    api_->comm_abort(handle);
    // No other split can begin: the communicator is gone.
    if (splitting_ == nullptr) return;
    if (const Handle half = std::exchange(splitting_->handle_, nullptr)) api_->comm_abort(half);
}

void Communicator::free_at_end(std::shared_ptr<void> memory) {
    const std::lock_guard lock(mutex_);
    memory_.push_back(std::move(memory));
}

/// Runs ncclCommFinalize on its own thread and without the lock: after an abort by a peer, NCCL 2.31 does not
/// return from it, and only an abort here ends that thread.
class Communicator::Finalizing {
  public:
    explicit Finalizing(std::shared_ptr<Communicator> self) : state_(std::make_shared<State>()) {
        Handle handle = nullptr;
        {
            const std::lock_guard lock(self->mutex_);
            handle = self->handle_;
        }
        if (handle == nullptr) {
            state_->code = Code::Success;
            state_->returned = true;
            return;
        }
        thread_ = start_own_thread("ddp-nccl", [state = state_, self = std::move(self), handle]() mutable {
            state->code = self->api_->comm_finalize(handle);
            self = nullptr;  // freed before the end is published
            state->returned = true;
        });
    }
    ~Finalizing() {
        if (thread_.joinable()) state_->returned ? thread_.join() : thread_.detach();
    }
    Finalizing(const Finalizing&) = delete;
    Finalizing& operator=(const Finalizing&) = delete;

    [[nodiscard]] bool returned() const { return state_->returned; }
    /// Valid once it has returned.
    [[nodiscard]] Code code() const { return state_->code; }

  private:
    struct State {
        std::atomic<bool> returned = false;
        Code code = Code::InProgress;
    };
    std::shared_ptr<State> state_;
    std::thread thread_;
};

/// "" after success, else the reason.
std::string Communicator::finalize(const WaitBounds& bounds) {
    try {
        const Finalizing finalizing(shared_from_this());
        Code code = Code::InProgress;
        for (Backoff backoff; code == Code::InProgress && MonotonicClock::now() < bounds.deadline;
             backoff.next()) {
            bounds.throw_if_lost();
            if (!finalizing.returned()) continue;
            code = finalizing.code();
            if (code == Code::InProgress || code == Code::Success) code = state().value_or(code);
        }
        if (!finalizing.returned()) return "ncclCommFinalize did not return";
        if (code == Code::InProgress) return "it did not end within the time-out";
        return code == Code::Success ? "" : explain(code);
    } catch (const Error& error) {
        return error.what();
    }
}

std::string Communicator::finish(const WaitBounds& bounds) {
    std::string why = finalize(bounds);
    if (!why.empty()) {
        if (!stop(kAbortLimit)) why += "; ncclCommAbort did not return";
        return why;
    }
    const bool destroyed = returns_within(kDestroyLimit, [self = shared_from_this()] {
        const std::lock_guard lock(self->mutex_);
        if (const Handle handle = std::exchange(self->handle_, nullptr)) self->api_->comm_destroy(handle);
    });
    return destroyed ? "" : "ncclCommDestroy did not return";
}

}  // namespace ddp::nccl
