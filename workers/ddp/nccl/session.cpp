#include "ddp/nccl/session.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "ddp/cuda/graph.h"
#include "ddp/worker/work.h"
#include "env/print.h"
#include "env/text.h"

namespace ddp::nccl {

using ddprun::MonotonicClock;
using ddprun::TimePoint;

namespace {

constexpr std::chrono::milliseconds kPollBusy{1};
constexpr std::chrono::milliseconds kPollIdle{50};
constexpr std::chrono::milliseconds kStopLimit{
    500};  ///< so that waiting callers learn of a failure within a second
constexpr std::chrono::milliseconds kStopUnderGraphs{100};  ///< with graphs the abort does not return at all
constexpr std::chrono::nanoseconds kShutDownLimit = std::chrono::seconds(30);

// High priority: a collective's few blocks must get onto the device while the backward pass fills it.
cuda::Stream make_stream(const SessionParts& parts) {
    const cuda::DeviceScope here(parts.device);
    return cuda::make_stream(cuda::Priority::High, "creating NCCL's stream");
}

}  // namespace

NcclMemory::NcclMemory(const Api& nccl, std::size_t bytes) : nccl_(nccl), bytes_(bytes) {
    from_nccl_ = nccl.mem_alloc != nullptr && nccl.mem_alloc(&address_, bytes) == Code::Success;
    if (from_nccl_) return;
    if (nccl.mem_alloc != nullptr)
        cudaGetLastError();  // clears NCCL's error, where NCCL uses the same runtime
    cuda::check(cudaMalloc(&address_, bytes),
                fmt::format("allocating {} on the device", ddprun::format_bytes(bytes)).c_str());
}

// Windows need memory from NCCL's allocator; other memory allows only zero-copy transfers.
Registration NcclMemory::best_registration() const {
    if (from_nccl_ && nccl_.comm_window_register != nullptr) return Registration::Symmetric;
    return nccl_.comm_register != nullptr ? Registration::Plain : Registration::None;
}

NcclMemory::~NcclMemory() {
    from_nccl_ ? static_cast<void>(nccl_.mem_free(address_)) : static_cast<void>(cudaFree(address_));
}

void LatestWork::note(const void* session, const std::shared_ptr<Work::State>& work) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Work::State>& latest = works_[session];
    if (latest != nullptr) {
        const std::lock_guard lock_latest(latest->mutex);
        if (latest->failure) return;
    }
    latest = work;
}

void LatestWork::wait() const {
    std::unique_lock lock(mutex_);
    const auto works = works_;
    lock.unlock();
    for (const auto& [_, work] : works) Work(work).synchronize();
}

Session::Session(SessionParts parts, std::shared_ptr<Communicator> communicator)
    : parts_(std::move(parts)),
      communicator_(std::move(communicator)),
      events_(cuda::EventPool::make()),
      stream_(make_stream(parts_)),
      ledger_(parts_),
      link_(std::make_shared<Link>()) {
    link_->session = this;
    watchdog_ = start_own_thread("ddp-watchdog", [this] { watch(); });
}

Session::~Session() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    watchdog_.join();
    {
        const std::lock_guard lock(link_->mutex);
        link_->session = nullptr;
    }
    shut_down();
}

// No collective is in flight any more: the watchdog ends every one by its deadline.
void Session::shut_down() {
    std::string why;
    const std::string attempt = fmt::format("rank {}: leaving", parts_.env.rank);
    try {
        throw_if_lost(parts_.segment->header(), attempt);
    } catch (const Error&) {
        fail(std::current_exception());  // finalizing would wait for a lost rank
    }
    if (!broken()) deregister_all();
    if (!broken()) {
        const auto limit = std::min(parts_.timeout, kShutDownLimit);
        why = communicator_->finish({ddprun::deadline_after(MonotonicClock::now(), limit),
                                     [&] { throw_if_lost(parts_.segment->header(), attempt); }});
    }
    wait_for_user_stream(broken() ? kStopLimit : kShutDownLimit);
    cudaStreamDestroy(stream_);
    if (why.empty()) return;
    if (has_graphs_) why += " (a CUDA graph with its collectives must be destroyed before the group)";
    // A destructor cannot throw.
    ddprun::print(stderr, "ddp: rank {}: leaving {}: {}; aborted it\n", parts_.env.rank, parts_.name, why);
}

/// The group's memory is freed next, and NCCL's memory is freed without waiting for kernels that use it.
void Session::wait_for_user_stream(std::chrono::nanoseconds limit) const noexcept {
    try {
        const cuda::DeviceScope here(parts_.device);
        const auto end = events_->take();
        end->record(parts_.user_stream);
        const TimePoint deadline = ddprun::deadline_after(MonotonicClock::now(), limit);
        for (Backoff backoff; end->query() == cudaErrorNotReady && MonotonicClock::now() < deadline;)
            backoff.next();
    } catch (const Error&) {
        // A failed device runs no kernels; ignoring.
    }
}

bool Session::register_memory(void* address, std::size_t bytes, Registration how) {
    const std::string attempt =
        fmt::format("rank {}: registering memory with {}", parts_.env.rank, parts_.name);
    const cuda::DeviceScope here(parts_.device);
    Registered& made = registered_.emplace_back();
    finish_start();
    pause_watchdog();
    const auto code = communicator_->call([&](Handle comm) {
        const Api& api = communicator_->api();
        if (how == Registration::Symmetric)
            return api.comm_window_register(comm, address, bytes, &made.window, kWindowSymmetric);
        return api.comm_register(comm, address, bytes, &made.handle);
    });
    // A call that NCCL refuses at once has no effect; a later failure breaks the communicator.
    const bool refused = code && *code != Code::InProgress && *code != Code::Success;
    if (refused && communicator_->state() == Code::Success) return resume_watchdog(), false;
    try {
        wait_until_done(code.value_or(Code::InProgress), attempt, MonotonicClock::now(), parts_.timeout);
        resume_watchdog();
    } catch (...) {
        std::rethrow_exception(fail(std::current_exception()));
    }
    return made.window != nullptr || made.handle != nullptr;
}

// Shutting down meets the same error again.
void Session::deregister_all() {
    const cuda::DeviceScope here(parts_.device);
    for (const Registered& one : registered_) {
        const auto code = communicator_->call([&](Handle comm) {
            const Api& api = communicator_->api();
            if (one.window != nullptr) return api.comm_window_deregister(comm, one.window);
            return one.handle != nullptr ? api.comm_deregister(comm, one.handle) : Code::Success;
        });
        try {
            if (code == Code::InProgress)
                wait_until_done(*code, fmt::format("rank {}: leaving", parts_.env.rank),
                                MonotonicClock::now(), parts_.timeout);
        } catch (...) {
            fail(std::current_exception());
            return;
        }
    }
    registered_.clear();
}

std::exception_ptr Session::broken() const {
    const std::lock_guard lock(mutex_);
    return broken_;
}

Call Session::oldest_call() const {
    const std::lock_guard lock(mutex_);
    return in_flight_.empty() ? last_call_ : in_flight_.front().call;
}

WaitBounds Session::wait_bounds(const std::string& attempt) const {
    return {ddprun::deadline_after(MonotonicClock::now(), parts_.timeout),
            [this, attempt] {
                if (const std::exception_ptr failure = broken()) std::rethrow_exception(failure);
                throw_if_lost(parts_.segment->header(), attempt);
            },
            parts_.env.world_size};
}

// The watchdog may be inside a check, and would report an error under another name.
void Session::pause_watchdog() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !watchdog_checking_; });
    watchdog_paused_ = true;
}

void Session::resume_watchdog() {
    const std::lock_guard lock(mutex_);
    watchdog_paused_ = false;
}

std::shared_ptr<Communicator> Session::split(int color, int key) {
    const std::string attempt = fmt::format("rank {}: splitting {}", parts_.env.rank, parts_.name);
    const cuda::DeviceScope here(parts_.device);
    finish_start();
    pause_watchdog();
    try {
        std::shared_ptr<Communicator> made = communicator_->split(color, key, wait_bounds(attempt), attempt);
        resume_watchdog();
        return made;
    } catch (...) {
        std::rethrow_exception(fail(std::current_exception()));
    }
}

Work Session::start(Call call, std::chrono::nanoseconds timeout, const Enqueue& enqueue) {
    return track(call, timeout, cuda::is_capturing(parts_.user_stream),
                 [&](const InFlight& operation) { put_on_stream(operation, enqueue); });
}

// The graph follows the user's stream only: it must not overlap earlier collectives in NCCL that nothing has
// waited for.
Work Session::launch_graph(std::chrono::nanoseconds timeout, const std::function<void()>& launch) {
    return track({.operation = ddprun::SegmentOp::GraphLaunch}, timeout, false,
                 [&](const InFlight& operation) {
                     if (const auto latest = std::exchange(latest_, nullptr)) block_user_stream_at(latest)();
                     launch();
                     record_end(operation, parts_.user_stream);
                     operation.work->block_stream = [] {};  // the user's stream already follows the graph
                 });
}

/// Starts the work that `queue` puts on a stream, and hands it to the watchdog.
Work Session::track(Call call, std::chrono::nanoseconds timeout, bool captured, const Queue& queue) {
    const cuda::DeviceScope here(parts_.device);
    call.seq = ledger_.next_number(call);
    InFlight operation{call,     timeout, MonotonicClock::now(), nullptr, std::make_shared<Work::State>(),
                       captured, {}};
    const std::shared_ptr<Work::State> work = operation.work;
    work->captured = captured;
    work->poll = [link = link_] {
        const std::lock_guard lock(link->mutex);
        if (link->session != nullptr) link->session->retire_for_waiter();
    };
    if (captured) has_graphs_ = true;
    else parts_.latest->note(this, work);
    std::exception_ptr failure;
    {
        const std::lock_guard lock(mutex_);
        last_call_ = call;
        failure = broken_;
    }
    failure = failure ? fail(failure) : try_start(operation, queue);
    if (failure) {
        work->finish(failure);
        return Work(work);
    }
    if (captured) return Work(work);
    bool was_idle = false;
    {
        const std::lock_guard lock(mutex_);
        was_idle = in_flight_.empty();
        if (!broken_) in_flight_.push_back(std::move(operation));
        failure = broken_;
    }
    // The watchdog broke the session in between, and has not seen this collective.
    if (failure) work->finish(fail(failure));
    if (was_idle) changed_.notify_all();  // when others are in flight it checks often enough
    return Work(work);
}

std::exception_ptr Session::try_start(InFlight& operation, const Queue& queue) {
    try {
        if (!operation.captured) operation.traced = ledger_.begin(operation.call, operation.started);
        operation.end = std::make_shared<End>();
        operation.end->event = take_event(operation.captured);
        queue(operation);
        return nullptr;
    } catch (...) {
        return fail(std::current_exception());
    }
}

/// A graph keeps its events.
std::shared_ptr<const cuda::Event> Session::take_event(bool captured) {
    return captured ? std::make_shared<const cuda::Event>() : events_->take();
}

void Session::put_on_stream(const InFlight& operation, const Enqueue& enqueue) {
    const std::lock_guard lock(starting_mutex_);
    finish_start(Code::InProgress);
    const auto ready = take_event(operation.captured);
    ready->record(parts_.user_stream);
    ready->block(stream_);
    const auto code =
        communicator_->call([&](Handle comm) { return enqueue(communicator_->api(), comm, stream_); });
    if (!code) std::rethrow_exception(broken());  // stopped in between
    operation.work->block_stream = block_user_stream_at(operation.end);
    starting_ = operation;
    if (!operation.captured) latest_ = operation.end;
    if (code != Code::InProgress || operation.captured) finish_start(*code);
}

/// Waits until NCCL has put the latest collective on the stream; `code` is the result of its call. Requires
/// starting_mutex_.
void Session::finish_start(Code code) {
    if (!starting_) return;
    const InFlight operation = *std::exchange(starting_, std::nullopt);
    try {
        wait_until_done(code, named(operation.call), operation.started, operation.timeout);
        record_end(operation, stream_);
    } catch (...) {
        std::rethrow_exception(
            fail(std::current_exception()));  // before another thread sees that nothing is starting any more
    }
}

void Session::finish_start() {
    const std::lock_guard lock(starting_mutex_);
    finish_start(Code::InProgress);
}

/// For the watchdog: does not wait.
void Session::try_finish_start() {
    const std::unique_lock lock(starting_mutex_, std::try_to_lock);
    if (!lock || !starting_) return;
    if (const auto state = communicator_->state(); state && *state != Code::InProgress) finish_start(*state);
}

void Session::record_end(const InFlight& operation, cuda::Stream stream) {
    operation.end->event->record(stream);
    operation.end->recorded = true;
}

/// A function that makes the user's stream wait for that end. It may be called after the session's end: then
/// nothing starts any more.
std::function<void()> Session::block_user_stream_at(std::shared_ptr<const End> end) {
    return [this, device = parts_.device, user = parts_.user_stream, end = std::move(end)] {
        const cuda::DeviceScope here(device);
        if (!end->recorded) finish_start();
        if (!end->recorded) std::rethrow_exception(fail(broken()));
        end->event->block(user);
    };
}

// A call into a non-blocking communicator may still be in progress; no other call may follow before it is
// done.
void Session::wait_until_done(Code code, const std::string& name, TimePoint started,
                              std::chrono::nanoseconds timeout) {
    const TimePoint deadline = ddprun::deadline_after(started, timeout);
    for (Backoff backoff; code == Code::InProgress; backoff.next()) {
        if (const std::exception_ptr failure = broken()) std::rethrow_exception(failure);
        throw_if_lost(parts_.segment->header(), name);
        if (MonotonicClock::now() >= deadline) {
            throw TimeoutError(fmt::format("{}: NCCL did not start it within {}{}", name,
                                           ddprun::format_duration(timeout),
                                           explain_hang(parts_, communicator_->api())));
        }
        code = communicator_->state().value_or(Code::InProgress);
    }
    if (code == Code::Success) return;
    const std::string what = fmt::format("{}: {}", name, communicator_->explain(code));
    if (code == Code::RemoteError) throw PeerLostError(what + describe_peers(parts_));
    throw_late_loss(wait_bounds(name));
    throw Error(what + "; NCCL_DEBUG=INFO shows more");
}

namespace {

std::exception_ptr with_text(const std::exception_ptr& failure, const std::string& more) {
    try {
        std::rethrow_exception(failure);
    } catch (const TimeoutError& error) {
        return std::make_exception_ptr(TimeoutError(error.what() + more));
    } catch (const PeerLostError& error) {
        return std::make_exception_ptr(PeerLostError(error.what() + more));
    } catch (const Error& error) {
        return std::make_exception_ptr(Error(error.what() + more));
    } catch (...) {
        return failure;
    }
}

}  // namespace

// Stops the communicator before it publishes the failure: callers that see the failure may free the buffers,
// unless it says that kernels may still run.
std::exception_ptr Session::fail(std::exception_ptr failure) {
    {
        std::unique_lock lock(mutex_);
        if (broken_) {
            changed_.wait(lock, [this] { return stopped_; });
            return broken_;
        }
        broken_ = failure;
    }
    const auto limit = has_graphs_ ? kStopUnderGraphs : kStopLimit;
    if (!communicator_->stop(limit)) {
        failure = with_text(
            failure,
            fmt::format("; ncclCommAbort did not return within {}{}: kernels may still use the buffers of "
                        "this rank's collectives, so do not free them before the process ends",
                        ddprun::format_duration(limit),
                        has_graphs_ ? " (a CUDA graph with its collectives exists)" : ""));
    }
    std::deque<InFlight> unfinished;
    {
        const std::lock_guard lock(mutex_);
        unfinished.swap(in_flight_);
        broken_ = failure;
        stopped_ = true;
    }
    changed_.notify_all();
    for (const InFlight& operation : unfinished) operation.work->finish(failure);
    return failure;
}

void Session::watch() {
    cudaSetDevice(parts_.device);
    cuda::leave_captures_alone();
    std::unique_lock lock(mutex_);
    while (!stopping_ || !in_flight_.empty()) {
        changed_.wait_for(lock, in_flight_.empty() ? kPollIdle : kPollBusy);
        if (broken_ || watchdog_paused_) continue;
        watchdog_checking_ = true;
        lock.unlock();
        try {
            check_for_failures();
        } catch (...) {
            fail(std::current_exception());
        }
        lock.lock();
        watchdog_checking_ = false;
        changed_.notify_all();
    }
}

void Session::check_for_failures() {
    try_finish_start();
    const auto state = communicator_->state();
    // The check comes after the state: a collective that ended before it did not cause it.
    while (retire_finished()) {
    }
    const std::string oldest = named(oldest_call());
    throw_if_lost(parts_.segment->header(), oldest);
    if (state && *state != Code::InProgress)
        wait_until_done(*state, oldest, MonotonicClock::now(), parts_.timeout);
    InFlight waited_for;
    {
        const std::lock_guard lock(mutex_);
        if (in_flight_.empty()) return;
        waited_for = in_flight_.front();
    }
    if (MonotonicClock::now() < ddprun::deadline_after(waited_for.started, waited_for.timeout)) return;
    throw TimeoutError(fmt::format("{}: {} within {}{}", named(waited_for.call),
                                   waited_for.end->recorded ? "did not finish" : "NCCL did not start it",
                                   ddprun::format_duration(waited_for.timeout),
                                   explain_hang(parts_, communicator_->api())));
}

/// True when the oldest collective had finished; throws when the device reports its failure. Any thread.
bool Session::retire_finished() {
    InFlight oldest;
    {
        const std::lock_guard lock(mutex_);
        if (in_flight_.empty() || broken_) return false;
        oldest = in_flight_.front();
    }
    if (!oldest.end->recorded) return false;
    const cudaError_t code = oldest.end->event->query();
    if (code == cudaErrorNotReady) return false;
    if (code != cudaSuccess) cuda::check(code, named(oldest.call).c_str());
    {
        const std::lock_guard lock(mutex_);
        // After a failure the abort may have ended it.
        if (in_flight_.empty() || broken_) return false;
        if (in_flight_.front().work != oldest.work) return true;  // another thread was quicker
        in_flight_.pop_front();
        ledger_.end(oldest.call, oldest.started, MonotonicClock::now(), oldest.traced);
    }
    oldest.work->finish(nullptr);
    return true;
}

/// Ignores failures: the watchdog meets and reports them too.
void Session::retire_for_waiter() {
    try {
        if (cuda::is_capturing(parts_.user_stream)) return;  // a query would end the capture
        while (retire_finished()) {
        }
    } catch (const Error&) {
    }
}

void Session::copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    run_on_stream("copying", [&] { return cudaMemcpyAsync(to, from, bytes, kind, stream_); });
}

void Session::clear(void* address, std::size_t bytes) {
    run_on_stream("clearing", [&] { return cudaMemsetAsync(address, 0, bytes, stream_); });
}

void Session::run_on_stream(const char* attempt, const std::function<cudaError_t()>& enqueue) {
    const cuda::DeviceScope here(parts_.device);
    finish_start();
    const auto ready = events_->take(), done = events_->take();
    ready->record(parts_.user_stream);
    ready->block(stream_);
    cuda::check(enqueue(), attempt);
    done->record(stream_);
    Backoff backoff;
    for (cudaError_t code; (code = done->query()) != cudaSuccess; backoff.next()) {
        if (code != cudaErrorNotReady) cuda::check(code, attempt);
        if (const std::exception_ptr failure = broken()) std::rethrow_exception(failure);
    }
}

}  // namespace ddp::nccl
