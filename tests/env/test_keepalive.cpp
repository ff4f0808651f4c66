#include "env/os/keepalive.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace ddprun::os {
namespace {

using namespace std::chrono_literals;

/// Counts beats, and notes one that came outside a BlockingCall.
struct Beats {
    std::mutex lock;
    std::condition_variable more;
    int count = 0;
    std::atomic<bool> may_come{false}, came_wrongly{false};

    void beat() {
        if (!may_come) came_wrongly = true;
        const std::lock_guard held(lock);
        ++count;
        more.notify_all();
    }
    /// Blocks until `wanted` more beats have come.
    void await(int wanted) {
        std::unique_lock held(lock);
        more.wait(held, [this, until = count + wanted] { return count >= until; });
    }
    std::unique_ptr<Keepalive> start() {
        Result<std::unique_ptr<Keepalive>> keepalive = Keepalive::start({1ms, 1min}, [this] { beat(); });
        EXPECT_TRUE(keepalive);
        return *std::move(keepalive);
    }
};

TEST(Keepalive, BeatsOnlyWhileTheThreadIsInABlockingCall) {
    Beats beats;
    const auto keepalive = beats.start();
    for (int call = 0; call < 20; ++call) {
        beats.may_come = true;
        {
            const BlockingCall blocking(keepalive.get());
            beats.await(2);
        }
        beats.may_come = false;
    }
    EXPECT_FALSE(beats.came_wrongly);
}

TEST(Keepalive, GoesOnWhenABlockingCallInsideAnotherEnds) {
    Beats beats;
    const auto keepalive = beats.start();
    beats.may_come = true;
    const BlockingCall outer(keepalive.get());
    { const BlockingCall inner(keepalive.get()); }
    beats.await(2);
}

TEST(Keepalive, MayBeNullInABlockingCall) { const BlockingCall blocking(nullptr); }

}  // namespace
}  // namespace ddprun::os
