#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun::os {

/// A thread that sends heartbeats in place of a blocked thread.
///
/// A file system that hangs (NFS, Lustre) can hold up exec, open and mkdir for minutes. The loop's thread
/// marks such calls by a BlockingCall; while it is in one, this thread calls `beat` every interval. The two
/// never run at the same time: the loop's thread holds the turn whenever it is not in a BlockingCall. So
/// `beat` may use all that the loop's thread uses, except what that thread uses inside a BlockingCall: the
/// loop itself, the log, files.
class Keepalive {
  public:
    struct Limits {
        Duration interval;
        Duration
            longest;  ///< heartbeats end after a call of this duration, so that the process counts as dead
    };
    /// `beat` must not block. The calling thread is the loop's. Error: System (no thread).
    static Result<std::unique_ptr<Keepalive>> start(Limits limits, std::function<void()> beat);
    /// Call it in the same thread, outside a BlockingCall. Waits for a running beat.
    ~Keepalive();
    Keepalive(const Keepalive&) = delete;
    Keepalive& operator=(const Keepalive&) = delete;

  private:
    friend class BlockingCall;
    Keepalive(Limits limits, std::function<void()> beat) : limits_(limits), beat_(std::move(beat)) {}
    void run();

    Limits limits_;
    std::function<void()> beat_;
    std::mutex turn_;    ///< held by the loop's thread, except in its blocking calls
    TimePoint began_{};  ///< begin of the blocking call; guarded by turn_
    int depth_ = 0;      ///< depth of nested blocking calls; for the loop's thread only
    std::mutex sleep_;
    std::condition_variable wake_;
    bool has_ended_ = false;  ///< guarded by sleep_
    std::thread thread_;
};

/// During its life the loop's thread may be held up by a file system, and uses no connection.
class BlockingCall {
  public:
    /// Null: this process sends no heartbeats.
    explicit BlockingCall(Keepalive* keepalive);
    ~BlockingCall();
    BlockingCall(const BlockingCall&) = delete;
    BlockingCall& operator=(const BlockingCall&) = delete;

  private:
    Keepalive* keepalive_;
};

}  // namespace ddprun::os
