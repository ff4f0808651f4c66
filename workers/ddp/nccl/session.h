#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "ddp/cuda/cuda_api.h"
#include "ddp/cuda/event_pool.h"
#include "ddp/nccl/communicator.h"
#include "ddp/nccl/ledger.h"
#include "ddp/worker/work.h"

namespace ddp::nccl {

/// How memory can be made known to a communicator, from least to best. Symmetric: a window at the same place
/// on all ranks, so that NCCL takes its fastest kernels for it; those only sum.
enum class Registration : char { None = '-', Plain = 'p', Symmetric = 's' };

/// Device memory, from NCCL where it has some of its own (registered transfers), else from CUDA. The table
/// is borrowed.
class NcclMemory {
  public:
    /// Throws Error with CUDA's reason.
    NcclMemory(const Api& nccl, std::size_t bytes);
    ~NcclMemory();
    NcclMemory(const NcclMemory&) = delete;
    NcclMemory& operator=(const NcclMemory&) = delete;
    [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(address_); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// The best that this memory and this NCCL allow.
    [[nodiscard]] Registration best_registration() const;

  private:
    const Api& nccl_;
    void* address_ = nullptr;
    std::size_t bytes_;
    bool from_nccl_;
};

/// The collectives of one rank on one communicator: starts them in order on a stream of its own, and watches
/// them.
///
/// NCCL puts a collective on the stream from a thread of its own and returns meanwhile; so does start().
/// Whoever comes first waits for that thread: the next start(), a wait() for this one, or the watchdog.
///
/// A watchdog thread looks at the events of what is in flight, at NCCL's asynchronous error, at every
/// deadline and at the launcher's abort word. The first thing that goes wrong breaks the session: the
/// communicator is stopped, and every Work in flight and every later one fails with the same exception, which
/// names the oldest collective in flight. start() is for one thread at a time.
///
/// What is started while the user's stream is captured becomes part of the CUDA graph. It is not in flight
/// now; launch_graph makes each launch of the graph a collective like any other.
class Session {
  public:
    Session(SessionParts parts, std::shared_ptr<Communicator> communicator);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    /// Collective, with the same `how` and size on all ranks; nothing may be in flight. False: NCCL cannot
    /// here, and goes on without. Undone by the end of the session, before the memory may be freed. Throws
    /// what breaks the session.
    bool register_memory(void* address, std::size_t bytes, Registration how);

    using Enqueue = std::function<Code(const Api& api, Handle comm, cuda::Stream stream)>;
    /// Gives `call` its number (send and recv: among those with the same peer) and puts it on the stream. Its
    /// Work holds the user's stream back until then. It has `timeout` to end in.
    Work start(Call call, std::chrono::nanoseconds timeout, const Enqueue& enqueue);
    /// `launch` puts a graph with collectives of this session on the user's stream. Not called once the
    /// session is broken. What it throws breaks the session.
    Work launch_graph(std::chrono::nanoseconds timeout, const std::function<void()>& launch);
    /// A part of the communicator; nothing may be in flight. A failure breaks the session.
    std::shared_ptr<Communicator> split(int color, int key);
    /// Waits for something else that the ranks do together, as long as for a collective.
    [[nodiscard]] Patience patience(const std::string& attempt) const;
    /// Breaks the session from outside: returns when nothing runs on the device any more, or when NCCL's
    /// abort does not come back, which the failure then says.
    void give_up(std::exception_ptr failure) { fail(std::move(failure)); }
    /// Copies between host and device, behind all collectives and the user's stream so far. Blocking.
    void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
    /// Zeroes device memory. Blocking too: NCCL's memory may be freed without waiting for the device.
    void clear(void* address, std::size_t bytes);

    [[nodiscard]] double communication_seconds() const { return ledger_.communication_seconds(); }

  private:
    /// Where on the stream a collective ends: nowhere yet while NCCL still starts it.
    struct End {
        std::shared_ptr<const cuda::Event> event;
        std::atomic<bool> recorded = false;
    };
    struct InFlight {
        Call call;
        std::chrono::nanoseconds timeout{};
        ddprun::TimePoint started;
        std::shared_ptr<End> end;
        std::shared_ptr<Work::State> work;
        bool captured = false;
    };
    std::exception_ptr broken() const;
    using Queue = std::function<void(const InFlight& operation)>;
    Work track(Call call, std::chrono::nanoseconds timeout, bool captured, const Queue& queue);
    std::exception_ptr try_start(InFlight& operation, const Queue& queue);
    std::shared_ptr<const cuda::Event> take_event(bool captured);
    void put_on_stream(const InFlight& operation, const Enqueue& enqueue);
    void finish_start(Code code);
    void finish_start();
    void look_at_start();
    void record_end(const InFlight& operation, cuda::Stream stream);
    std::function<void()> hold_back_at(std::shared_ptr<const End> end);
    void deregister_all();
    void run_on_stream(const char* attempt, const std::function<cudaError_t()>& enqueue);
    void settle(Code code, const std::string& name, ddprun::TimePoint started,
                std::chrono::nanoseconds timeout);
    std::exception_ptr fail(std::exception_ptr failure);
    void watch();
    void look_away();
    void look_again();
    bool retire_finished();
    void retire_for_a_waiter();
    void look_for_trouble();
    [[nodiscard]] std::string named(const Call& call) const { return nccl::named(parts_, call); }
    [[nodiscard]] Call oldest_call() const;
    void leave();
    void let_user_stream_end(std::chrono::nanoseconds limit) const noexcept;

    const SessionParts parts_;
    const std::shared_ptr<Communicator> communicator_;
    const std::shared_ptr<cuda::EventPool> events_;
    cuda::Stream stream_ = nullptr;
    Ledger ledger_;
    std::shared_ptr<const End> latest_;  ///< of what was started last, unless a graph's launch waited for it

    std::mutex starting_mutex_;  ///< before mutex_, where both are taken
    std::optional<InFlight> starting_;
    /// What NCCL made of registrations. It may write that later, and from a thread of its own.
    struct Registered {
        Window window = nullptr;
        void* handle = nullptr;
    };
    std::deque<Registered> registered_;  ///< addresses stay

    /// Works outlive the session, and whoever waits for one asks it how far it is.
    struct Link {
        std::mutex mutex;  ///< before the others
        Session* session;  ///< null once it is gone
    };
    const std::shared_ptr<Link> link_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<InFlight> in_flight_;
    Call last_call_;  ///< named when nothing is in flight yet
    std::exception_ptr broken_;
    bool stopped_ = false;  ///< after broken_: nothing runs on the device any more, unless broken_ says so
    std::atomic<bool> has_graphs_ = false;  ///< collectives were captured: NCCL cannot free what they use
    bool leaving_ = false;
    bool looking_ = false;     ///< the watchdog, now
    bool looks_away_ = false;  ///< somebody else looks for trouble, and knows its name
    std::thread watchdog_;
};

}  // namespace ddp::nccl
