#include <gtest/gtest.h>

#include <optional>

#include "env/io/file.h"
#include "rendezvous/client/resolver.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

std::size_t open_descriptors() { return numbers_in("/proc/self/fd").size(); }

TEST(Resolver, ANumericAddressIsAnsweredFromTheLoopWithoutAThread) {
    const auto loop = os::EventLoop::create({});
    Resolver resolver(**loop);
    std::optional<Result<SocketAddresses>> answer;
    const auto keep = [&](Result<SocketAddresses> found) { answer = std::move(found); };

    const std::size_t before = open_descriptors();
    resolver.look_up({"127.0.0.1", 7}, keep);
    EXPECT_EQ(open_descriptors(), before);
    EXPECT_FALSE(answer) << "the handler is called later";
    while (!answer && (*loop)->run_once(MonotonicClock::now() + 30s)) {
    }
    ASSERT_TRUE(answer && *answer);
    const SocketAddress& address = (*answer)->front();
    EXPECT_EQ(numeric_endpoint(address.storage, address.length), (Endpoint{"127.0.0.1", 7}));

    // A look-up by a thread holds a descriptor, by which the thread wakes the loop.
    resolver.look_up({"localhost", 7}, keep);
    EXPECT_GT(open_descriptors(), before);
}

}  // namespace
}  // namespace ddprun::rdzv
