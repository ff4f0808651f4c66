#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "env/io/socket.h"
#include "tests/rendezvous/server_fixture.h"
#include "tests/support/receive_exactly.h"

namespace ddprun::rdzv {
namespace {

using namespace std::string_literals;

/// A client of PyTorch's TCPStore, byte by byte.
class TorchPeer {
  public:
    explicit TorchPeer(const Endpoint& server) : raw_(server) { raw_.send(encode_torch_greeting()); }
    void say(TorchOp op, std::vector<std::string> keys = {}, std::vector<std::string> values = {},
             std::int64_t number = 0) {
        raw_.send(encode_torch({op, std::move(keys), std::move(values), number}));
    }
    /// Reads this number of bytes; "" if the connection is closed first.
    std::string hear(std::size_t bytes) {
        std::string heard(bytes, '\0');
        return test::receive_exactly(raw_.fd(), heard, soon()) ? heard : "";
    }
    std::int64_t number() {
        const std::string bytes = hear(8);
        std::int64_t n = -1;
        if (bytes.size() == 8) std::memcpy(&n, bytes.data(), 8);
        return n;
    }
    std::string value() { return hear(static_cast<std::size_t>(std::max<std::int64_t>(0, number()))); }
    bool is_served() {
        say(TorchOp::CountKeys);
        return number() >= 0;
    }
    bool is_closed() { return raw_.is_closed(); }

  private:
    RawPeer raw_;
};

/// A server for PyTorch's clients in its first generation.
class ServingTorch : public RunningServer {
  public:
    explicit ServingTorch(ServerLimits limits = {}) : RunningServer(limits, {}, true) {
        with([](Server& server) { server.begin_generation(1); });
    }
};

TEST(TorchClients, AreServedOnTheServersPort) {
    ServingTorch server;
    TorchPeer one(server.endpoint()), two(server.endpoint());
    one.say(TorchOp::Wait, {"/k"});
    two.say(TorchOp::Set, {"/k"}, {"value"});
    EXPECT_EQ(one.hear(1), "\0"s);
    one.say(TorchOp::Get, {"/k"});
    EXPECT_EQ(one.value(), "value");
    EXPECT_TRUE(server.client(1)->set("/k", "ours"));
    two.say(TorchOp::Get, {"/k"});
    EXPECT_EQ(two.value(), "value") << "the two name spaces have nothing to do with each other";
}

TEST(TorchClients, AreRefusedIfTheStoreIsOff) {
    RunningServer server;
    server.with([](Server& s) { s.begin_generation(1); });
    EXPECT_FALSE(TorchPeer(server.endpoint()).is_served());
    EXPECT_TRUE(server.events.saw("its store is not served here"));
}

TEST(TorchClients, AreRefusedBeforeAGenerationRuns) {
    RunningServer server({}, {}, true);
    EXPECT_FALSE(TorchPeer(server.endpoint()).is_served());
    EXPECT_TRUE(server.events.saw("no generation has begun"));
}

TEST(TorchClients, OfAnEndedGenerationAreClosedAndTheirKeysDropped) {
    ServingTorch server;
    TorchPeer old(server.endpoint());
    old.say(TorchOp::Set, {"init/"}, {"4"});
    ASSERT_TRUE(old.is_served());
    old.say(TorchOp::Wait, {"never"});
    server.with([](Server& s) { s.begin_generation(2); });
    EXPECT_TRUE(old.is_closed());
    TorchPeer fresh(server.endpoint());
    fresh.say(TorchOp::CountKeys);
    EXPECT_EQ(fresh.number(), 0);
}

TEST(TorchClients, ThatBreakTheProtocolAreClosedAndOthersAreServed) {
    ServingTorch server;
    TorchPeer good(server.endpoint()), bad(server.endpoint());
    bad.say(TorchOp::Get, {std::string(10'000, 'k')});
    EXPECT_TRUE(bad.is_closed());
    EXPECT_TRUE(server.events.saw("a key of 10000 bytes"));
    for (const std::string& line : server.events.lines())
        EXPECT_EQ(line.find("127.0.0.1"), line.rfind("127.0.0.1")) << "its address once: " << line;
    EXPECT_TRUE(good.is_served());
}

TEST(TorchClients, ThatWaitAreNotClosedByTheHandshakeTimeout) {
    ServerLimits limits;
    limits.strangers = 1;
    limits.handshake = std::chrono::milliseconds(50);
    ServingTorch server(limits);
    TorchPeer waiting(server.endpoint());
    ASSERT_TRUE(waiting.is_served());
    waiting.say(TorchOp::Wait, {"late"});
    RawPeer silent(server.endpoint());
    EXPECT_TRUE(silent.is_closed()) << "the time of a handshake has passed";
    TorchPeer(server.endpoint()).say(TorchOp::Set, {"late"}, {""});
    EXPECT_EQ(waiting.hear(1), "\0"s);
}

TEST(TorchClients, WithoutAGreetingMayHaveASecondConnectionThatSaysNothing) {
    ServerLimits limits;
    limits.handshake = std::chrono::milliseconds(50);
    ServingTorch server(limits);
    const auto is_served = [](RawPeer& peer) {
        peer.send("\6");  // GETNUMKEYS
        std::string number(8, '\0');
        return test::receive_exactly(peer.fd(), number, soon());
    };
    RawPeer old(server.endpoint());
    ASSERT_TRUE(is_served(old));
    RawPeer of_now(server.endpoint()), of_last_generation(server.endpoint()), stranger(server.endpoint());
    EXPECT_TRUE(stranger.is_closed()) << "there is one such client, which needs no third";
    EXPECT_TRUE(is_served(of_now));
    EXPECT_TRUE(is_served(of_last_generation));
}

TEST(TorchClients, ThatDoNotReadAnswersAreClosed) {
    ServingTorch server;
    TorchPeer greedy(server.endpoint());
    greedy.say(TorchOp::Set, {"k"}, {std::string(8U << 20, 'v')});
    for (int i = 0; i < 20; ++i) greedy.say(TorchOp::Get, {"k"});
    EXPECT_TRUE(server.events.saw("does not read"));
}

TEST(TorchClients, ThatDisconnectAreForgotten) {
    ServingTorch server;
    {
        TorchPeer gone(server.endpoint());
        gone.say(TorchOp::Set, {"k"}, {"v"});
        ASSERT_TRUE(gone.is_served());
        gone.say(TorchOp::Wait, {"never"});
    }
    std::size_t left = 1;
    for (const TimePoint until = soon(); left != 0 && MonotonicClock::now() < until;) {
        server.with([&](Server& s) { left = s.connections() + s.torch_store().waiters(); });
    }
    EXPECT_EQ(left, 0U);
}

}  // namespace
}  // namespace ddprun::rdzv
