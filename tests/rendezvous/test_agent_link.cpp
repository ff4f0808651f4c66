#include <gtest/gtest.h>
#include <sys/socket.h>

#include <optional>
#include <thread>

#include "env/io/file.h"
#include "rendezvous/client/dial.h"
#include "server_fixture.h"
#include "tests/support/receive_exactly.h"
#include "tests/support/reserved_port.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

std::string lost(Errc code) { return "lost " + std::to_string(static_cast<int>(code)); }

TEST(AgentLink, CarriesControlMessagesBothWays) {
    RunningServer server;
    RunningLink link(server.endpoint());
    ASSERT_TRUE(server.events.saw("joined node02 at 127.0.0.1"));
    ASSERT_TRUE(link.events.saw("connected"));
    EXPECT_TRUE(link.send(WorkersStarted{1}));
    EXPECT_TRUE(link.send(WorkerExited{}));
    EXPECT_TRUE(server.events.saw("message WorkerExited"));
    server.with([&](Server& s) {
        EXPECT_TRUE(s.send(s.connections() == 1 ? 1 : 0, StartGeneration{}));
        s.broadcast(Shutdown{0, "done"});
    });
    EXPECT_TRUE(link.events.saw("message StartGeneration"));
    EXPECT_TRUE(link.events.saw("message Shutdown"));
}

TEST(AgentLink, FindsTheControllerByName) {
    RunningServer server;
    RunningLink link({"localhost", server.endpoint().port});
    EXPECT_TRUE(link.events.saw("connected"));
}

TEST(AgentLink, WaitsForAControllerThatStartsLaterAndReportsIt) {
    const test::ReservedPort port;
    const Endpoint later = port.endpoint();
    RunningLink link(later);
    EXPECT_TRUE(link.events.saw("log waiting for the controller at " + to_string(later) +
                                ": connect: Connection refused"));
    LoopThread thread;
    SilentHandler handler;
    std::unique_ptr<Server> server;
    thread.run([&] {
        ServerOptions options;
        options.credentials = kTestJob;
        options.where = later;
        server = *Server::create(thread.loop(), std::move(options), handler);
    });
    EXPECT_TRUE(link.events.saw("connected"));
    EXPECT_FALSE(link.was_refused()) << "of a standby it would mean that the head is dead";
    thread.run([&] { server.reset(); });
    EXPECT_TRUE(link.events.saw(lost(Errc::Closed)));
}

TEST(AgentLink, GivesUpAtItsDeadlineWithTheLastCause) {
    const test::ReservedPort port;
    const Endpoint nobody = port.endpoint();
    RunningLink link(nobody, MonotonicClock::now() + 60ms);
    EXPECT_TRUE(link.events.saw(lost(Errc::Timeout) + " no controller at " + to_string(nobody) +
                                ": connect: Connection refused"));
    EXPECT_FALSE(link.send(WorkersStarted{}));
}

TEST(AgentLink, DoesNotWaitForAControllerInItsOwnProcess) {
    const test::ReservedPort port;
    RunningLink link(port.endpoint(), kNever, kTestJob, {}, true);
    EXPECT_TRUE(link.events.saw(lost(Errc::System) + " no controller at " + to_string(port.endpoint()) +
                                ": connect: Connection refused"));
}

TEST(AgentLink, GivesUpAfterTwoFailuresOfAControllerInItsOwnProcess) {
    const Listener deaf = *listen_tcp({"127.0.0.1", 0});  // no process accepts
    RunningLink link(deaf.bound, kNever, kTestJob, {}, true, 20ms);
    EXPECT_TRUE(link.events.saw("log waiting for the controller at " + to_string(deaf.bound) +
                                ": no answer in the handshake"));
    EXPECT_TRUE(link.events.saw(lost(Errc::Timeout) + " no controller at " + to_string(deaf.bound) +
                                ": no answer in the handshake"));
}

TEST(Server, ReportsWhenAllMessagesAreAcknowledged) {
    RunningServer server;
    RunningLink link(server.endpoint());
    ASSERT_TRUE(server.events.saw("joined node02"));
    server.with([&](Server& s) {
        s.when_written(10min, [&] { server.events.add("nothing to write"); });
        s.broadcast(Shutdown{0, "done"});
        s.when_written(10min, [&] { server.events.add("written"); });
    });
    EXPECT_TRUE(server.events.saw("nothing to write"));
    EXPECT_TRUE(server.events.saw("written"));
    EXPECT_TRUE(link.events.saw("message Shutdown"));
}

TEST(Server, WaitsNoLongerThanAskedForAnAgentThatDoesNotRead) {
    RunningServer server;
    RawPeer peer(server.endpoint());
    (void)peer.shake_hands(kTestJob, Role::Agent);
    ASSERT_TRUE(peer.send(bytes_of(hello_of("node03"), 1)));
    ASSERT_TRUE(server.events.saw("joined node03"));
    server.with([&](Server& s) {
        // The message exceeds the socket's buffers, but not the limit that would end the connection.
        for (int i = 0; i < 300; ++i) s.broadcast(Shutdown{0, std::string(50'000, 'x')});
        s.when_written(20ms, [&] { server.events.add("waited for long enough"); });
    });
    EXPECT_TRUE(server.events.saw("waited for long enough"));
    for (const std::string& line : server.events.lines())
        EXPECT_EQ(line.find("lost"), std::string::npos) << line;
}

TEST(AgentLink, KeepsTryingANameThatDoesNotExistUntilTheDeadline) {
    RunningLink link({"no-such-host.invalid", 1}, MonotonicClock::now() + 200ms);
    EXPECT_TRUE(link.events.saw(lost(Errc::Timeout) + " no controller at no-such-host.invalid:1"));
}

TEST(AgentLink, DoesNotRetryAfterAWrongToken) {
    RunningServer server;
    RunningLink link(server.endpoint(), soon(), {kTestJob.job_id, "a guess"});
    EXPECT_TRUE(link.events.saw(lost(Errc::Refused) + " wrong token for this job; copy the file"))
        << "what helps is known on this side only";
    EXPECT_TRUE(server.events.saw("refusing agent 'agent on node02'"));
    for (const std::string& line : server.events.lines()) EXPECT_EQ(line.find("joined"), std::string::npos);
}

TEST(AgentLink, DistinguishesAnotherJobFromAWrongToken) {
    RunningServer server;
    RunningLink link(server.endpoint(), soon(), {"another job", kTestJob.token});
    EXPECT_TRUE(link.events.saw(lost(Errc::Refused)));
    for (const std::string& line : link.events.lines())
        EXPECT_EQ(line.find("copy the file"), std::string::npos) << line;
}

TEST(AgentLink, ReportsTheControllersReasonForARefusal) {
    RunningServer server;
    RunningLink link(server.endpoint());
    ASSERT_TRUE(server.events.saw("joined"));
    const AgentId agent = server.last_agent();
    server.with([&](Server& s) {
        s.refuse_agent(agent,
                       {Errc::Mismatch, "node rank 1 is claimed by node07 (pid 1) and by node09 (pid 2)", 0});
        EXPECT_FALSE(s.send(agent, Shutdown{}));
    });
    EXPECT_TRUE(link.events.saw(lost(Errc::Mismatch) + " node rank 1 is claimed by node07"));
    EXPECT_TRUE(server.events.saw("lost node rank 1 is claimed"));
}

TEST(AgentLink, BothSidesNoticeAClosedConnectionAtOnce) {
    RunningServer server;
    {
        RunningLink link(server.endpoint());
        ASSERT_TRUE(server.events.saw("joined"));
        link.close();
        // "closed", or "reset" when the close overtook the server's last message.
        EXPECT_TRUE(server.events.saw("lost ")) << ::testing::PrintToString(server.events.lines());
    }
    RunningLink link(server.endpoint());
    ASSERT_TRUE(link.events.saw("connected"));
    server.stop();
    EXPECT_TRUE(link.events.saw(lost(Errc::Closed)));
}

TEST(AgentLink, ASilentAgentIsLost) {
    RunningServer server({}, Heartbeats{50ms});
    RawPeer frozen(server.endpoint());
    frozen.shake_hands(kTestJob, Role::Agent);
    ASSERT_TRUE(frozen.send(bytes_of(hello_of("node07"), 0)));
    EXPECT_TRUE(server.events.saw("lost no heartbeat for 50 ms"));
    EXPECT_TRUE(frozen.is_closed());
}

TEST(AgentLink, ASilentControllerIsLost) {
    const Listener listener = *listen_tcp({"127.0.0.1", 0});
    RunningLink link(listener.bound, soon(), kTestJob, Heartbeats{50ms});
    ASSERT_TRUE(*wait_readable(listener.fd.get(), soon()));
    const UniqueFd peer(::accept(listener.fd.get(), nullptr, nullptr));
    FrameDecoder decoder(kPeerLimits);
    ServerHandshake handshake(kTestJob, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
    while (!handshake.authenticated()) {
        char byte = 0;
        ASSERT_TRUE(test::receive_exactly(peer.get(), {&byte, 1}, soon()));
        decoder.feed({&byte, 1});
        if (auto frame = decoder.next(); *frame) {
            ASSERT_TRUE(send_all(peer.get(), bytes_of(any(*handshake.receive(*decode_handshake(**frame))), 0),
                                 soon()));
        }
    }
    EXPECT_TRUE(link.events.saw("connected"));
    EXPECT_TRUE(link.events.saw(lost(Errc::Timeout) + " no heartbeat from the controller for 50 ms"));
}

TEST(AgentLink, HeartbeatsKeepAnIdleLinkAlive) {
    RunningServer server({}, Heartbeats{200ms, 10ms});
    RunningLink link(server.endpoint(), soon(), kTestJob, Heartbeats{200ms, 10ms});
    ASSERT_TRUE(link.events.saw("connected"));
    // Three timeouts pass, measured by a store client whose own deadlines the server keeps.
    const auto clock = server.client();
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(clock->get("never", MonotonicClock::now() + 200ms));
    for (const std::string& line : link.events.lines())
        EXPECT_EQ(line.find("lost"), std::string::npos) << line;
    EXPECT_TRUE(link.send(WorkersStarted{1}));
    EXPECT_TRUE(server.events.saw("message WorkersStarted"));
}

TEST(AgentLink, RetriesWhenItIsDroppedBeforeTheHandshake) {
    Listener listener = *listen_tcp({"127.0.0.1", 0});
    RunningLink link(listener.bound);
    ASSERT_TRUE(*wait_readable(listener.fd.get(), soon()));
    UniqueFd first(::accept(listener.fd.get(), nullptr, nullptr));
    first.reset();
    EXPECT_TRUE(link.events.saw("log waiting for the controller"));
    EXPECT_TRUE(*wait_readable(listener.fd.get(), soon())) << "it comes again";
}

TEST(AgentLink, RetriesWhenTheControllerIsTooBusyForTheHandshake) {
    for (const Failure& busy :
         {Failure{Errc::Limit, "512 connections wait"}, Failure{Errc::Timeout, "no handshake within 10 s"}}) {
        const Listener listener = *listen_tcp({"127.0.0.1", 0});
        RunningLink link(listener.bound);
        ASSERT_TRUE(*wait_readable(listener.fd.get(), soon()));
        const UniqueFd first(::accept(listener.fd.get(), nullptr, nullptr));
        ASSERT_TRUE(send_all(first.get(), bytes_of(busy, 0), soon()));
        EXPECT_TRUE(link.events.saw("log waiting for the controller at " + to_string(listener.bound) + ": " +
                                    busy.what));
        EXPECT_TRUE(*wait_readable(listener.fd.get(), soon())) << "it comes again";
        for (const std::string& line : link.events.lines())
            EXPECT_EQ(line.find("lost"), std::string::npos) << line;
    }
}

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
