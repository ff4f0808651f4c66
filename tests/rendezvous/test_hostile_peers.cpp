#include <gtest/gtest.h>
#include <sys/socket.h>

#include <utility>

#include "rendezvous/serve/peers.h"
#include "server_fixture.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

Message set_request(const std::string& key, std::string value) {
    return StoreRequest{0, std::nullopt, store_op::Set{key, Blob(std::move(value))}};
}

/// Checks that the server still serves others.
void expect_alive(RunningServer& server) {
    const auto client = server.client();
    EXPECT_TRUE(client->set("alive", "yes"));
}

TEST(HostilePeer, OneBytePerWriteIsServed) {
    RunningServer server;
    RawPeer peer(server.endpoint());
    ClientHandshake handshake(kTestJob, Hello{Role::Worker, "slow", "", ""},
                              "000102030405060708090a0b0c0d0e0f");
    const auto drip = [&](const Message& message, std::uint32_t request) {
        for (const char byte : bytes_of(message, request)) ASSERT_TRUE(peer.send({&byte, 1}));
    };
    drip(handshake.hello(), 0);
    drip(any(**handshake.receive(*as_handshake(*peer.receive()))), 0);
    ASSERT_FALSE(*handshake.receive(*as_handshake(*peer.receive())));
    drip(set_request("k", "v"), 1);
    EXPECT_EQ(*peer.receive(), Message(Done{}));
}

TEST(HostilePeer, ASilentPeerIsClosedAfterTheHandshakeDeadline) {
    ServerLimits limits;
    limits.handshake = 30ms;
    RunningServer server(limits);
    RawPeer silent(server.endpoint());
    const std::optional<Message> last_words = silent.receive();
    ASSERT_TRUE(last_words);
    EXPECT_EQ(get<Failure>(*last_words).code, Errc::Timeout);
    EXPECT_TRUE(silent.is_closed());
    EXPECT_TRUE(server.events.saw("no handshake within"));
    expect_alive(server);
}

TEST(HostilePeer, APeerThatStopsDuringTheHandshakeIsClosedToo) {
    ServerLimits limits;
    limits.handshake = 30ms;
    RunningServer server(limits);
    RawPeer slow(server.endpoint());
    ASSERT_TRUE(slow.send("DDP"));
    EXPECT_TRUE(slow.is_closed());
    server.with([](Server& s) { EXPECT_EQ(s.strangers(), 0U); });
}

TEST(HostilePeer, SilentConnectionsDoNotBlockOtherPeers) {
    ServerLimits limits;
    limits.strangers = 4;
    RunningServer server(limits);
    std::vector<std::unique_ptr<RawPeer>> silent;
    for (int i = 0; i < 20; ++i) silent.push_back(std::make_unique<RawPeer>(server.endpoint()));
    expect_alive(server);
    server.with([](Server& s) { EXPECT_LE(s.strangers(), 4U); });
    EXPECT_TRUE(server.events.saw("connections wait for their handshake"));
    EXPECT_TRUE(silent.front()->is_closed());
}

TEST(HostilePeer, TheLongestSilentPeerIsClosedWithTheReason) {
    ServerLimits limits;
    limits.strangers = 3;
    RunningServer server(limits);
    const auto wait_for_strangers = [&](std::size_t wanted) {
        for (std::size_t now = 0; now != wanted;) server.with([&](Server& s) { now = s.strangers(); });
    };
    RawPeer oldest(server.endpoint());
    wait_for_strangers(1);
    RawPeer silent(server.endpoint());
    wait_for_strangers(2);
    RawPeer youngest(server.endpoint());
    wait_for_strangers(3);
    ClientHandshake handshake(kTestJob, Hello{Role::Worker, "honest", "", ""},
                              "000102030405060708090a0b0c0d0e0f");
    ASSERT_TRUE(oldest.send(bytes_of(handshake.hello(), 0)));
    const HandshakeMessage challenge = *as_handshake(*oldest.receive());

    RawPeer one_too_many(server.endpoint());
    const std::optional<Message> last_words = silent.receive();
    ASSERT_TRUE(last_words) << "closed without a word";
    EXPECT_EQ(get<Failure>(*last_words).code, Errc::Limit);
    EXPECT_TRUE(silent.is_closed());
    ASSERT_TRUE(oldest.send(bytes_of(any(**handshake.receive(challenge)), 0)));
    const std::optional<Message> welcome = oldest.receive();
    ASSERT_TRUE(welcome) << "the oldest was closed, which had just spoken";
    EXPECT_TRUE(holds_alternative<Welcome>(*welcome));
}

TEST(HostilePeer, UnprovenPeersDoNotTakeThePlacesOfProvenOnes) {
    ServerLimits limits;
    limits.connections = 3;
    RunningServer server(limits);
    RawPeer first(server.endpoint()), second(server.endpoint());
    ASSERT_TRUE(holds_alternative<Welcome>(first.shake_hands(kTestJob, Role::Worker)));
    ASSERT_TRUE(holds_alternative<Welcome>(second.shake_hands(kTestJob, Role::Worker)));
    RawPeer stranger(server.endpoint());
    RawPeer third(server.endpoint());
    EXPECT_TRUE(holds_alternative<Welcome>(third.shake_hands(kTestJob, Role::Worker))) << "the stranger goes";
    EXPECT_EQ(get<Failure>(*stranger.receive()).code, Errc::Limit);
    RawPeer fourth(server.endpoint());
    EXPECT_EQ(get<Failure>(*fourth.receive()).code, Errc::Limit) << "three who know the token are there";
    for (RawPeer* const known : {&first, &second, &third}) {
        EXPECT_TRUE(known->send(bytes_of(set_request("k", "v"), 1)));
        EXPECT_EQ(*known->receive(), Message(Done{}));
    }
}

TEST(HostilePeer, RefusedPeersThatStayConnectedCountAsUnproven) {
    ServerLimits limits;
    limits.strangers = 4;
    RunningServer server(limits);
    std::vector<std::unique_ptr<RawPeer>> guessers;
    for (int i = 0; i < 20; ++i) {
        guessers.push_back(std::make_unique<RawPeer>(server.endpoint()));
        EXPECT_EQ(get<Failure>(guessers.back()->shake_hands({kTestJob.job_id, "a guess"}, Role::Worker)).code,
                  Errc::Refused);
    }
    server.with([](Server& s) {
        EXPECT_LE(s.connections(), 5U) << "each stays until it has read why, or its place is wanted";
    });
    expect_alive(server);
}

TEST(HostilePeer, PeersOfOtherProtocolsAreClosedAtTheirFirstByteAndNamed) {
    RunningServer server;
    for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n"), std::string("\0\0\0\x01", 4)}) {
        RawPeer stranger(server.endpoint());
        ASSERT_TRUE(stranger.send(bytes));
        EXPECT_FALSE(stranger.receive()) << "nothing is answered";
    }
    EXPECT_TRUE(server.events.saw("first byte 0x47"));
    EXPECT_TRUE(server.events.saw("PyTorch's TCPStore: its store is not served here"));
    EXPECT_TRUE(server.events.saw("closed 127.0.0.1:"));
    expect_alive(server);
}

TEST(HostilePeer, APeerThatLeavesBeforeItsFirstByteIsNotLogged) {
    RunningServer server;
    RawPeer(server.endpoint());  // an agent does this with its slower connections
    RawPeer stranger(server.endpoint());
    ASSERT_TRUE(stranger.send("GET /"));
    ASSERT_TRUE(server.events.saw("first byte 0x47"));
    EXPECT_EQ(server.events.lines().size(), 1U) << server.events.lines().front();
}

TEST(HostilePeer, APeerOfAnotherMajorVersionIsToldTheServersVersion) {
    RunningServer server;
    RawPeer newer(server.endpoint());
    ASSERT_TRUE(newer.send(std::string("DDPR\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20)));
    const std::optional<Message> last_words = newer.receive();
    ASSERT_TRUE(last_words);
    EXPECT_NE(get<Failure>(*last_words).what.find("this is version 1"), std::string::npos);
    EXPECT_TRUE(newer.is_closed());
}

TEST(HostilePeer, LengthsBeyondTheLimitsAreRefusedBeforeAndAfterTheHandshake) {
    RunningServer server;
    const auto announce = [](std::uint32_t json_bytes, std::uint32_t blob_bytes) {
        std::string header;
        append_header(header, 1, 1, json_bytes, blob_bytes);
        return header;
    };
    RawPeer stranger(server.endpoint());
    ASSERT_TRUE(stranger.send(announce(kStrangerLimits.json_bytes + 1, 0)));
    EXPECT_EQ(get<Failure>(*stranger.receive()).code, Errc::Limit);
    EXPECT_TRUE(stranger.is_closed());

    RawPeer peer(server.endpoint());
    ASSERT_TRUE(holds_alternative<Welcome>(peer.shake_hands(kTestJob, Role::Worker)));
    ASSERT_TRUE(peer.send(announce(0xffffffff, 0xffffffff)));
    EXPECT_EQ(get<Failure>(*peer.receive()).code, Errc::Limit);
    EXPECT_TRUE(peer.is_closed());
    expect_alive(server);
}

TEST(HostilePeer, GarbageAfterTheHandshakeEndsOnlyThatConnection) {
    RunningServer server;
    RawPeer peer(server.endpoint());
    peer.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(peer.send(encode(Frame{16, 9, "{\"generation\":0,\"key\":", ""})));
    const Message answer = *peer.receive();
    EXPECT_EQ(get<Failure>(answer).code, Errc::Protocol);
    EXPECT_TRUE(peer.is_closed());
    EXPECT_TRUE(server.events.saw("not valid JSON"));
    expect_alive(server);
}

TEST(HostilePeer, StoreRequestsBeforeTheHandshakeChangeNothing) {
    RunningServer server;
    RawPeer stranger(server.endpoint());
    ASSERT_TRUE(stranger.send(bytes_of(StoreRequest{0, std::nullopt, store_op::Add{"k", 1}}, 1)));
    EXPECT_TRUE(stranger.is_closed());
    server.with([](Server& s) { EXPECT_EQ(s.store().keys(), 0U); });
}

TEST(HostilePeer, ARequestThatIsCutWithinItsFrameIsNotDone) {
    RunningServer server;
    RawPeer agent(server.endpoint());
    agent.shake_hands(kTestJob, Role::Agent);
    ASSERT_TRUE(agent.send(bytes_of(AgentHello{"node07", 0, 4, 1, "v", {}, {}, "default"}, 0)));
    ASSERT_TRUE(server.events.saw("joined node07"));
    const std::string bytes = bytes_of(set_request("half", "a value"), 1);
    ASSERT_TRUE(agent.send(std::string_view(bytes).substr(0, bytes.size() - 3)));
    agent.close();
    ASSERT_TRUE(server.events.saw("in the middle of a message"));
    EXPECT_EQ(server.events.lines().back().rfind("lost ", 0), 0U) << server.events.lines().back();
    server.with([](Server& s) { EXPECT_EQ(s.store().keys(), 0U); });
}

TEST(HostilePeer, UnknownTypesAreAnsweredAndTheConnectionStaysOpen) {
    RunningServer server;
    RawPeer peer(server.endpoint());
    peer.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(peer.send(encode(Frame{250, 4, "{}", "from a later version"})));
    EXPECT_EQ(get<Failure>(*peer.receive()).code, Errc::NotFound);
    ASSERT_TRUE(peer.send(bytes_of(set_request("k", "v"), 5)));
    EXPECT_EQ(*peer.receive(), Message(Done{}));
}

TEST(HostilePeer, AWorkerCannotSendMessagesOfAnAgent) {
    RunningServer server;
    RawPeer worker(server.endpoint());
    worker.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(worker.send(bytes_of(AgentHello{"node07", 0, 4, 1, "v", {}, {}, "default"}, 0)));
    EXPECT_EQ(get<Failure>(*worker.receive()).code, Errc::Protocol);
    EXPECT_TRUE(worker.is_closed());
    EXPECT_TRUE(server.events.saw("AgentHello from a worker"));
    for (const std::string& line : server.events.lines()) EXPECT_EQ(line.find("joined"), std::string::npos);
}

TEST(HostilePeer, ASlowReaderIsClosedAndOthersAreServed) {
    ServerLimits limits;
    limits.output_bytes = 8U << 20;
    RunningServer server(limits);
    ASSERT_TRUE(server.client()->set("large", std::string(1U << 20, 'x')));
    RawPeer slow(server.endpoint());
    slow.shake_hands(kTestJob, Role::Worker);
    std::string requests;
    for (std::uint32_t i = 1; i <= 64; ++i)
        requests += bytes_of(StoreRequest{0, std::nullopt, store_op::TryGet{"large"}}, i);
    ASSERT_TRUE(slow.send(requests));
    EXPECT_TRUE(server.events.saw("does not read"));
    expect_alive(server);
}

TEST(HostilePeer, TooManyConnectionsAreRefused) {
    ServerLimits limits;
    limits.connections = 3;
    RunningServer server(limits);
    const auto one = server.client();
    const auto two = server.client();
    const auto three = server.client();
    RawPeer fourth(server.endpoint());
    EXPECT_TRUE(fourth.is_closed());
    EXPECT_TRUE(server.events.saw("there are 3 connections"));
    EXPECT_TRUE(one->set("k", "v"));
}

/// Ends the first peer that enters, as one whose generation is over, and serves the next.
class OwnerOfOneGeneration final : public PeersOwner {
  public:
    EventLog events;

  private:
    Status on_entered(Peer& peer) override {
        if (!std::exchange(has_ended_, true))
            peer.connection->fail({Errc::StaleGeneration, "its generation is over", 0});
        return {};
    }
    Status on_frame(Peer&, Frame) override { return {}; }
    void on_gone(Peer&, const Error&) override {}
    void on_log(const std::string& line) override { events.add(line); }
    bool has_ended_ = false;
};

TEST(Peers, LogAPeerThatIsServedWhenItEndsWithItsGeneration) {
    LoopThread thread;
    OwnerOfOneGeneration owner;
    std::unique_ptr<Peers> peers;
    Endpoint where;
    thread.run([&] {
        Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
        where = {"127.0.0.1", listener->bound.port};
        peers = std::make_unique<Peers>(thread.loop(), Peers::Options{kTestJob, {}}, owner);
        EXPECT_TRUE(peers->listen(std::move(listener->fd)));
    });
    EXPECT_TRUE(
        StoreClient::connect(where, {Role::Worker, kTestJob.job_id, kTestJob.token, 0, "rank 3"}, soon()));
    EXPECT_TRUE(owner.events.saw("closed worker 'rank 3'"));
    EXPECT_TRUE(owner.events.saw("its generation is over"));
    thread.run([&] { peers.reset(); });
}

TEST(Server, RefusesToRunWithoutAToken) {
    LoopThread thread;
    SilentHandler handler;
    thread.run([&] {
        ServerOptions options;
        options.where = {"127.0.0.1", 0};
        EXPECT_EQ(Server::create(thread.loop(), std::move(options), handler).error().code,
                  Errc::InvalidArgument);
    });
}

TEST(Server, AnswersTheControllersOwnStoreRequests) {
    RunningServer server;
    const auto client = server.client();
    server.with([](Server& s) {
        EXPECT_EQ(s.ask_store(store_op::Set{"k", Blob("v")}), StoreReply(Done{}));
        EXPECT_EQ(std::get<Failure>(s.ask_store(store_op::Get{"none"})).code, Errc::Timeout);
        EXPECT_EQ(s.store().waiters(), 0U);
    });
    EXPECT_EQ(*client->try_get("k"), "v");
}

}  // namespace
}  // namespace ddprun::rdzv
