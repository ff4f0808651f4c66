#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
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

/// Ways to register memory with a communicator, from least to best. Symmetric: a window at the same offset on
/// all ranks, for which NCCL uses its fastest kernels; those only sum.
enum class Registration : char { None = '-', Plain = 'p', Symmetric = 's' };

/// Device memory, allocated by NCCL if it has an allocator (for registered transfers), else by CUDA. The
/// table is borrowed.
class NcclMemory {
  public:
    /// Throws Error with CUDA's reason.
    NcclMemory(const Api& nccl, std::size_t bytes);
    ~NcclMemory();
    NcclMemory(const NcclMemory&) = delete;
    NcclMemory& operator=(const NcclMemory&) = delete;
    [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(address_); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// The best registration that this memory and this NCCL allow.
    [[nodiscard]] Registration best_registration() const;

  private:
    const Api& nccl_;
    void* address_ = nullptr;
    std::size_t bytes_;
    bool from_nccl_;
};

/// The latest collective of each session of a world: collectives of a session end in order. Thread-safe.
class LatestWork {
  public:
    void note(const void* session, const std::shared_ptr<Work::State>& work);
    /// Waits on the host. Throws the failure of a session, also of one that has ended.
    void wait() const;

  private:
    mutable std::mutex mutex_;
    std::map<const void*, std::shared_ptr<Work::State>> works_;
};

/// The collectives of one rank on one communicator: starts them in order on a stream of its own, and
/// supervises them.
///
/// NCCL puts a collective on the stream from its own thread and returns meanwhile; so does start(). That
/// thread is awaited by the next start(), by a wait() for the collective, or by the watchdog, whichever comes
/// first.
///
/// A watchdog thread checks the events of the collectives in flight, NCCL's asynchronous error, every
/// deadline and the launcher's abort word. The first failure breaks the session: the communicator is stopped,
/// and every Work in flight and every later one fails with the same exception, which names the oldest
/// collective in flight. start() is for one thread at a time.
///
/// A collective that is started while the user's stream is captured becomes part of the CUDA graph. It is not
/// in flight now; launch_graph makes each launch of the graph a collective like any other.
class Session {
  public:
    Session(SessionParts parts, std::shared_ptr<Communicator> communicator);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    /// Collective, with the same `how` and size on all ranks; nothing may be in flight. False: NCCL cannot
    /// register this memory, and works without. The session's destructor deregisters it, before the memory
    /// may be freed. Throws the failure that breaks the session.
    bool register_memory(void* address, std::size_t bytes, Registration how);

    using Enqueue = std::function<Code(const Api& api, Handle comm, cuda::Stream stream)>;
    /// Gives `call` its sequence number (send and recv: among those with the same peer) and puts it on the
    /// stream. Its Work blocks the user's stream until then. Throws TimeoutError through the Work after
    /// `timeout`.
    Work start(Call call, std::chrono::nanoseconds timeout, const Enqueue& enqueue);
    /// `launch` puts a graph with collectives of this session on the user's stream. It is not called once the
    /// session is broken. Its exception breaks the session.
    Work launch_graph(std::chrono::nanoseconds timeout, const std::function<void()>& launch);
    /// Splits the communicator; nothing may be in flight. A failure breaks the session.
    std::shared_ptr<Communicator> split(int color, int key);
    /// The bounds of another wait of the ranks for each other: those of a collective.
    [[nodiscard]] WaitBounds wait_bounds(const std::string& attempt) const;
    /// Copies between host and device, after all collectives and the work on the user's stream. Blocking.
    void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
    /// Zeroes device memory. Blocking, because NCCL's memory may be freed without waiting for the device.
    void clear(void* address, std::size_t bytes);

    [[nodiscard]] double communication_seconds() const { return ledger_.communication_seconds(); }

  private:
    /// The end of a collective on the stream; not recorded while NCCL still starts it.
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
        trace::Begun traced = {};
    };
    std::exception_ptr broken() const;
    using Queue = std::function<void(const InFlight& operation)>;
    Work track(Call call, std::chrono::nanoseconds timeout, bool captured, const Queue& queue);
    std::exception_ptr try_start(InFlight& operation, const Queue& queue);
    std::shared_ptr<const cuda::Event> take_event(bool captured);
    void put_on_stream(const InFlight& operation, const Enqueue& enqueue);
    void finish_start(Code code);
    void finish_start();
    void try_finish_start();
    void record_end(const InFlight& operation, cuda::Stream stream);
    std::function<void()> block_user_stream_at(std::shared_ptr<const End> end);
    void deregister_all();
    void run_on_stream(const char* attempt, const std::function<cudaError_t()>& enqueue);
    void wait_until_done(Code code, const std::string& name, ddprun::TimePoint started,
                         std::chrono::nanoseconds timeout);
    std::exception_ptr fail(std::exception_ptr failure);
    void watch();
    void pause_watchdog();
    void resume_watchdog();
    bool retire_finished();
    void retire_for_waiter();
    void check_for_failures();
    [[nodiscard]] std::string named(const Call& call) const { return nccl::named(parts_, call); }
    [[nodiscard]] Call oldest_call() const;
    void shut_down();
    void wait_for_user_stream(std::chrono::nanoseconds limit) const noexcept;

    const SessionParts parts_;
    const std::shared_ptr<Communicator> communicator_;
    const std::shared_ptr<cuda::EventPool> events_;
    cuda::Stream stream_ = nullptr;
    Ledger ledger_;
    std::shared_ptr<const End>
        latest_;  ///< end of the latest collective, unless a graph's launch waited for it

    std::mutex starting_mutex_;  ///< locked before mutex_
    std::optional<InFlight> starting_;
    /// NCCL's results of a registration. NCCL may write them later, from its own thread.
    struct Registered {
        Window window = nullptr;
        void* handle = nullptr;
    };
    std::deque<Registered> registered_;  ///< a deque keeps the addresses

    /// The way from a Work, which may outlive the session, to the session that it polls.
    struct Link {
        std::mutex mutex;  ///< locked before the others
        Session* session;  ///< null after the session's end
    };
    const std::shared_ptr<Link> link_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<InFlight> in_flight_;
    Call last_call_;  ///< named when nothing is in flight yet
    std::exception_ptr broken_;
    bool stopped_ =
        false;  ///< set after broken_: nothing runs on the device any more, unless broken_ says so
    std::atomic<bool> has_graphs_ = false;  ///< collectives were captured: NCCL cannot free their resources
    bool stopping_ = false;
    bool watchdog_checking_ = false;  ///< the watchdog is inside a check
    bool watchdog_paused_ =
        false;  ///< a caller polls the communicator itself and reports its errors under the call's name
    std::thread watchdog_;
};

}  // namespace ddp::nccl
