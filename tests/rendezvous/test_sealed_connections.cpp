// TLS between real agents, clients and a real server.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "flaky_relay.h"
#include "server_fixture.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

/// The timeout is long enough for a loaded machine: even the grace of a broken connection is 300 ms.

std::shared_ptr<const TlsContext> server_side() { return *TlsContext::for_server(); }
std::shared_ptr<const TlsContext> client_side() { return *TlsContext::for_client(); }

Result<std::unique_ptr<StoreClient>> connect(const Endpoint& server, bool tls) {
    return StoreClient::connect(server, {Role::Worker, kTestJob.job_id, kTestJob.token, 0, "a test", tls},
                                soon());
}

TEST(TlsConnection, CarriesTheStore) {
    RunningServer server({}, {}, false, server_side());
    const auto client = connect(server.endpoint(), true);
    ASSERT_TRUE(client) << client.error().what;
    const std::string large(5'000'000, 'x');
    EXPECT_TRUE((*client)->set("large", large));
    EXPECT_EQ((*client)->get("large", soon()).value_or(""), large);
    EXPECT_EQ((*client)->add("n", 2).value_or(0), 2);
}

TEST(TlsConnection, CarriesAnAgentsSession) {
    RunningServer server({}, {}, false, server_side());
    RunningLink link(server.endpoint(), soon(), kTestJob, {}, false, ServerLimits{}.handshake, client_side());
    ASSERT_TRUE(server.events.saw("joined node02"));
    ASSERT_TRUE(link.send(Question{0, "17"}));
    EXPECT_TRUE(server.events.saw("message Question 17"));
    server.with([](Server& s) { s.broadcast(Question{0, "18"}); });
    EXPECT_TRUE(link.events.saw("message Question 18"));
}

TEST(TlsConnection, SessionsContinueWhenItIsResetWithinARecord) {
    RunningServer server({}, kPatient, false, server_side());
    FlakyRelay relay(server.endpoint());
    RunningLink link(relay.endpoint(), soon(), kTestJob, kPatient, false, ServerLimits{}.handshake,
                     client_side());
    ASSERT_TRUE(server.events.saw("joined node02"));
    relay.reset_after(20'011);
    relay.reset_all();
    constexpr int kCount = 200;
    for (int i = 0; i < kCount; ++i) {
        ASSERT_TRUE(link.send(Question{0, fmt::format("{} {}", i, std::string(700, 'x'))}));
    }
    ASSERT_TRUE(server.events.saw(fmt::format("message Question {} ", kCount - 1)));
    int next = 0;
    for (const std::string& line : server.events.lines()) {
        EXPECT_FALSE(line.starts_with("lost "));
        if (!line.starts_with("message Question")) continue;
        EXPECT_TRUE(line.starts_with(fmt::format("message Question {} ", next++)));
    }
    EXPECT_EQ(next, kCount);
    EXPECT_GT(relay.carried(), 3);
}

TEST(TlsConnection, HidesItsContentsOnTheNetwork) {
    RunningServer server({}, {}, false, server_side());
    FlakyRelay relay(server.endpoint());
    for (const bool tls : {true, false}) {
        const std::string key = tls ? "sealed-key" : "plain-key";
        const auto client = connect(relay.endpoint(), tls);
        ASSERT_TRUE(client) << client.error().what;
        ASSERT_TRUE((*client)->set(key, "the value of " + key));
        EXPECT_EQ((*client)->get(key, soon()).value_or(""), "the value of " + key);
        EXPECT_EQ(relay.has_seen(key), !tls);
        EXPECT_EQ(relay.has_seen(kTestJob.job_id), !tls);
        EXPECT_FALSE(relay.has_seen(kTestJob.token));
    }
}

TEST(TlsConnection, IsRefusedByAServerWithoutTlsAndBothSidesNameTheRemedy) {
    RunningServer server;
    const auto client = connect(server.endpoint(), true);
    ASSERT_FALSE(client);
    EXPECT_EQ(client.error().code, Errc::Refused);
    EXPECT_NE(client.error().what.find("give --tls to every node, or to none"), std::string::npos)
        << client.error().what;
    EXPECT_TRUE(server.events.saw("started without --tls: give --tls to every node, or to none"));

    RunningLink link(server.endpoint(), soon(), kTestJob, {}, false, ServerLimits{}.handshake, client_side());
    EXPECT_TRUE(link.events.saw("speaks no TLS: give --tls to every node, or to none"));
}

TEST(TlsConnection, IsNotNeededOnTheServersOwnHost) {
    RunningServer server({}, {}, false, server_side());
    const auto client = connect(server.endpoint(), false);
    ASSERT_TRUE(client) << client.error().what;
    EXPECT_TRUE((*client)->set("k", "v"));
}

TEST(TlsConnection, IsServedBesideUnprovenPeersThatAreClosed) {
    ServerLimits limits;
    limits.strangers = 4;
    RunningServer server(limits, {}, false, server_side());
    std::vector<std::unique_ptr<RawPeer>> silent;
    for (int i = 0; i < 20; ++i) silent.push_back(std::make_unique<RawPeer>(server.endpoint()));
    const auto client = connect(server.endpoint(), true);
    ASSERT_TRUE(client) << client.error().what;
    EXPECT_TRUE((*client)->set("k", "v"));
}

TEST(TlsConnection, IsClosedAfterTheHandshakeDeadlineIfUnfinished) {
    ServerLimits limits;
    limits.handshake = limits.goodbye = 30ms;
    RunningServer server(limits, {}, false, server_side());
    RawPeer slow(server.endpoint());
    ASSERT_TRUE(slow.send(std::string("\x16\x03\x01\x02\0\1\0", 7)));
    EXPECT_TRUE(slow.is_closed());
    EXPECT_TRUE(server.events.saw("no handshake within"));
}

TEST(TlsConnection, IsClosedIfItBeginsWithGarbage) {
    RunningServer server({}, {}, false, server_side());
    RawPeer garbage(server.endpoint());
    ASSERT_TRUE(garbage.send("\x16 this is no TLS at all"));
    EXPECT_TRUE(garbage.is_closed());
    EXPECT_TRUE(server.events.saw("TLS: "));
    EXPECT_TRUE(connect(server.endpoint(), true));
}

}  // namespace
}  // namespace ddprun::rdzv
