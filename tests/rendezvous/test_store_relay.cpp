// The store for workers of a node that is not the head's: a real relay, its agent's session, and the server.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "flaky_relay.h"
#include "rendezvous/client/store_relay.h"
#include "server_fixture.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// The timeout is long enough for a loaded machine: even the grace of a broken connection is 300 ms.
constexpr Heartbeats kPatient{60s};

/// A Unix socket whose name has been removed.
struct Nameless {
    Nameless() {
        const test::TemporaryDirectory directory;
        listener = *listen_unix(directory.file("store"));
    }
    [[nodiscard]] StoreAddress address() const {
        return StoreAddress(fmt::format("/proc/self/fd/{}", listener.inode.get()));
    }
    UnixListener listener;
};

Result<std::unique_ptr<StoreClient>> connect_to(const StoreAddress& address, std::uint64_t generation = 0,
                                                const Credentials& credentials = kTestJob) {
    return StoreClient::connect(
        address, {Role::Worker, credentials.job_id, credentials.token, generation, "a worker"}, soon());
}

/// An agent's node with a relay; the link's messages go into `events`.
class RunningNode : private AgentLinkHandler {
  public:
    explicit RunningNode(const Endpoint& controller, ServerLimits limits = {}) {
        thread_.run([&] {
            relay_ = *StoreRelay::serve({thread_.loop(), [this] { return link_.get(); },
                                         [this](const std::string& line) { events.add("log " + line); }},
                                        std::move(way_.listener.fd), kTestJob, limits);
            go_to(controller);
        });
        EXPECT_TRUE(events.saw("connected"));
    }
    ~RunningNode() override {
        thread_.run([this] {
            link_.reset();
            relay_.reset();
        });
    }
    [[nodiscard]] std::unique_ptr<StoreClient> client(std::uint64_t generation = 0) {
        Result<std::unique_ptr<StoreClient>> connected = connect_to(address(), generation);
        EXPECT_TRUE(connected) << connected.error().what;
        return connected ? *std::move(connected) : nullptr;
    }
    [[nodiscard]] StoreAddress address() const { return way_.address(); }
    void join_again(const Endpoint& controller) {
        thread_.run([&] { go_to(controller); });
    }
    [[nodiscard]] std::size_t under_way() {
        std::size_t count = 0;
        thread_.run([&] { count = relay_->state().under_way(); });
        return count;
    }
    EventLog events;

  private:
    void go_to(const Endpoint& controller) {
        AgentLinkOptions options;
        options.controllers = {controller};
        options.credentials = kTestJob;
        options.name = "agent on node02";
        options.hello = hello_of("node02");
        options.heartbeats = kPatient;
        AgentLinkHandler& self = *this;
        link_ = std::make_unique<AgentLink>(thread_.loop(), std::move(options), self);
    }
    void on_connected() override { events.add("connected"); }
    void on_message(const ToAgent& message) override { events.add("message " + name_and_text(message)); }
    void on_lost(const Error& why) override {
        relay_->on_lost("the head is lost");
        events.add("lost " + why.what);
    }
    void on_log(const std::string& line) override { events.add("log " + line); }
    void on_store_reply(std::uint32_t number, const StoreReply& reply) override {
        relay_->on_store_reply(number, reply);
    }
    void on_acknowledged() override { relay_->on_acknowledged(); }

    LoopThread thread_;
    Nameless way_;
    std::unique_ptr<StoreRelay> relay_;
    std::unique_ptr<AgentLink> link_;
};

std::size_t waiters_of(RunningServer& server) {
    std::size_t count = 0;
    server.with([&](Server& s) { count = s.store().waiters(); });
    return count;
}

void wait_for_waiters(RunningServer& server, std::size_t count) {
    while (waiters_of(server) != count) std::this_thread::yield();
}

TEST(StoreRelay, DoesEveryOperationAsTheServerDoes) {
    RunningServer server({}, kPatient);
    server.with([](Server& s) { s.begin_generation(7); });
    RunningNode node(server.endpoint());
    const test::Outcome outcome = test::run(
        {"python3", STORE_CLIENT,
         "unix:" + fmt::format("/proc/{}/{}", ::getpid(), node.address().path.substr(sizeof "/proc/self")),
         kTestJob.job_id, kTestJob.token, "7"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "the document is right\n");
}

TEST(StoreRelay, ItsClientsShareOneStoreWithTheServersClients) {
    RunningServer server({}, kPatient);
    RunningNode here(server.endpoint()), there(server.endpoint());
    const auto one = here.client(), two = there.client(), direct = server.client();
    ASSERT_TRUE(one->set("k", std::string_view("a\0b", 3)));
    EXPECT_EQ(*two->get("k", soon()), std::string("a\0b", 3));
    EXPECT_EQ(*direct->add("n", 1), 1);
    EXPECT_EQ(*two->add("n", 1), 2);
    std::thread other([&] { EXPECT_TRUE(two->barrier("three", 3, soon())); });
    std::thread third([&] { EXPECT_TRUE(direct->barrier("three", 3, soon())); });
    EXPECT_TRUE(one->barrier("three", 3, soon()));
    other.join();
    third.join();
}

TEST(StoreRelay, SixtyFourWorkersUseOneConnectionOfTheServer) {
    constexpr int kWorkers = 64;
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint());
    std::vector<std::thread> workers;
    for (int i = 0; i < kWorkers; ++i) {
        workers.emplace_back([&] {
            const auto client = node.client();
            EXPECT_EQ(*client->get("id", soon()), "v");
            for (int round = 0; round < 3; ++round) EXPECT_TRUE(client->barrier("all", kWorkers, soon()));
            EXPECT_TRUE(client->add("n", 1));
        });
    }
    wait_for_waiters(server, 1);
    EXPECT_TRUE(node.client()->set("id", "v"));
    for (std::thread& worker : workers) worker.join();
    EXPECT_EQ(*node.client()->try_get("n"), "64");
    server.with([](Server& s) { EXPECT_EQ(s.connections(), 1U); });
}

TEST(StoreRelay, ReportsTimeoutsWithTheServersReason) {
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint());
    std::thread first([client = node.client()] { EXPECT_EQ(*client->get("k", soon()), "v"); });
    wait_for_waiters(server, 1);
    const auto client = node.client();
    const auto missing = client->get("k", MonotonicClock::now() + 50ms);
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, Errc::Timeout);
    EXPECT_THAT(missing.error().what, HasSubstr("key 'k' not set within 5"));
    const Status lonely = client->barrier("b", 4, MonotonicClock::now() + 50ms);
    EXPECT_THAT(lonely.error().what, HasSubstr("barrier 'b': 1 of 4 arrived"));
    ASSERT_TRUE(client->set("k", "v"));
    first.join();
}

TEST(StoreRelay, AWorkerOfAnOldGenerationIsToldSo) {
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint());
    const auto old = node.client(0);
    std::thread waiting([&] { EXPECT_EQ(old->get("never", soon()).error().code, Errc::StaleGeneration); });
    wait_for_waiters(server, 1);
    server.with([](Server& s) { s.begin_generation(1); });
    waiting.join();
    EXPECT_EQ(old->set("k", "poison").error().code, Errc::StaleGeneration);
    EXPECT_EQ(*node.client(1)->try_get("k"), std::nullopt);
}

TEST(StoreRelay, TheServerForgetsAWorkerThatIsGone) {
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint());
    RawPeer leaving(node.address());
    (void)leaving.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(leaving.send(bytes_of(StoreRequest{0, std::nullopt, store_op::Barrier{"b", 2}}, 1)));
    ASSERT_TRUE(leaving.send(bytes_of(StoreRequest{0, std::nullopt, store_op::Get{"k"}}, 2)));
    wait_for_waiters(server, 2);
    leaving.close();
    wait_for_waiters(server, 0);
    const auto other = node.client();
    EXPECT_THAT(other->barrier("b", 2, MonotonicClock::now() + 50ms).error().what,
                HasSubstr("1 of 2 arrived"));
}

TEST(StoreRelay, TheServerForgetsTheWorkersOfALostNode) {
    RunningServer server({}, kPatient);
    auto node = std::make_unique<RunningNode>(server.endpoint());
    RawPeer worker(node->address());
    (void)worker.shake_hands(kTestJob, Role::Worker);
    for (std::uint32_t i = 1; i <= 3; ++i) {
        ASSERT_TRUE(
            worker.send(bytes_of(StoreRequest{0, std::nullopt, store_op::Get{fmt::format("k{}", i)}}, i)));
    }
    wait_for_waiters(server, 3);
    node.reset();
    wait_for_waiters(server, 0);
}

TEST(StoreRelay, AppliesNothingTwiceAndLosesNothingWhenConnectionsBreak) {
    RunningServer server({}, kPatient);
    FlakyRelay way(server.endpoint());
    RunningNode node(way.endpoint());
    const auto client = node.client();
    way.reset_after(5'003);
    way.reset_all();
    constexpr int kAdds = 300;
    for (int i = 1; i <= kAdds; ++i) ASSERT_EQ(*client->add("n", 1), i);
    EXPECT_GT(way.carried(), 5);
}

TEST(StoreRelay, ALostHeadEndsWaitsAndTheNextHeadServesTheSameWorkers) {
    auto server = std::make_unique<RunningServer>(ServerLimits{}, kPatient);
    RunningNode node(server->endpoint());
    const auto client = node.client();
    std::thread waiting([&] {
        const auto got = client->get("never", soon());
        EXPECT_EQ(got.error().code, Errc::Closed);
        EXPECT_THAT(got.error().what, HasSubstr("the head is lost"));
    });
    wait_for_waiters(*server, 1);
    server.reset();
    waiting.join();
    EXPECT_EQ(client->set("k", "v").error().code, Errc::Closed);
    RunningServer successor({}, kPatient);
    successor.with([](Server& s) { s.begin_generation(2); });
    node.join_again(successor.endpoint());
    ASSERT_TRUE(successor.events.saw("joined node02"));
    ASSERT_TRUE(node.client(2)->set("k", "v"));
    EXPECT_EQ(client->set("k", "v").error().code, Errc::StaleGeneration);
}

TEST(StoreRelay, LargeValuesWaitForTheSession) {
    ServerLimits limits;
    limits.output_bytes = 20U << 20;
    RunningServer server(limits, kPatient);
    RunningNode node(server.endpoint());
    constexpr int kWorkers = 4, kRounds = 4;
    const std::string large(12U << 20, 'x');  // two of them exceed the server's limit for a session
    std::vector<std::thread> workers;
    for (int i = 0; i < kWorkers; ++i) {
        workers.emplace_back([&, i] {
            const auto client = node.client();
            for (int round = 0; round < kRounds; ++round) {
                const Status set = client->set(fmt::format("k{}", i), large);
                ASSERT_TRUE(set) << set.error().what;
                const Status met = client->barrier("round", kWorkers, soon());
                ASSERT_TRUE(met) << met.error().what;
                const Result<std::string> got = client->get(fmt::format("k{}", (i + 1) % kWorkers), soon());
                ASSERT_TRUE(got) << got.error().what;
                EXPECT_TRUE(*got == large);
                ASSERT_TRUE(client->barrier("round", kWorkers, soon()));
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
    for (const std::string& line : node.events.lines())
        EXPECT_FALSE(line.starts_with("lost ")) << line << ::testing::PrintToString(server.events.lines());
}

TEST(StoreRelay, AWorkerThatDoesNotReadDelaysNoOther) {
    ServerLimits limits;
    limits.output_bytes = 24U << 20;
    RunningServer server(limits, kPatient);
    RunningNode node(server.endpoint(), limits);
    const auto client = node.client();
    ASSERT_TRUE(client->set("large", std::string(8U << 20, 'x')));
    RawPeer deaf(node.address());
    (void)deaf.shake_hands(kTestJob, Role::Worker);
    std::string requests;
    for (std::uint32_t i = 1; i <= 40; ++i)
        requests += bytes_of(StoreRequest{0, std::nullopt, store_op::TryGet{"large"}}, i);
    ASSERT_TRUE(deaf.send(requests));
    EXPECT_TRUE(node.events.saw("does not read"));
    EXPECT_EQ(client->get("large", soon())->size(), 8U << 20);
    while (node.under_way() != 0) std::this_thread::yield();
    for (const std::string& line : node.events.lines()) EXPECT_FALSE(line.starts_with("lost ")) << line;
}

TEST(StoreRelay, AWorkerWithTooManyOpenRequestsIsNotRead) {
    ServerLimits limits;
    limits.unanswered = 8;
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint(), limits);
    RawPeer eager(node.address());
    (void)eager.shake_hands(kTestJob, Role::Worker);
    std::string requests;
    for (std::uint32_t i = 1; i <= 2000; ++i)
        requests += bytes_of(StoreRequest{0, std::nullopt, store_op::Add{"n", 1}}, i);
    ASSERT_TRUE(eager.send(requests));
    for (int i = 1; i <= 2000; ++i) {
        const std::optional<Message> sum = eager.receive();
        ASSERT_TRUE(sum && holds_alternative<Sum>(*sum));
        ASSERT_EQ(get<Sum>(*sum).sum, i) << "all of them, in order";
    }
}

TEST(StoreRelay, RefusesAWrongTokenAndAClaimToBeAnAgent) {
    RunningServer server({}, kPatient);
    RunningNode node(server.endpoint());
    EXPECT_EQ(connect_to(node.address(), 0, {kTestJob.job_id, "a guess"}).error().code, Errc::Refused);
    EXPECT_TRUE(node.events.saw("log refusing worker 'a worker' (pid "));
    RawPeer agent(node.address());
    const Message last = agent.shake_hands(kTestJob, Role::Agent);
    ASSERT_TRUE(holds_alternative<Failure>(last));
    EXPECT_THAT(get<Failure>(last).what, HasSubstr("controller's port"));
    RawPeer impostor(node.address());
    (void)impostor.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(impostor.send(bytes_of(StoreRequest{0, std::nullopt, store_op::TryGet{"k"}, 7}, 1)));
    EXPECT_TRUE(impostor.is_closed()) << "only an agent speaks for others";
}

TEST(StoreRelay, OnlyAnAgentMayRelayForOthers) {
    RunningServer server;
    RawPeer worker(server.endpoint()), another(server.endpoint());
    (void)worker.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(worker.send(bytes_of(StoreRequest{0, std::nullopt, store_op::TryGet{"k"}, 7}, 1)));
    EXPECT_TRUE(worker.is_closed());
    (void)another.shake_hands(kTestJob, Role::Worker);
    ASSERT_TRUE(another.send(bytes_of(ClientGone{7}, 0)));
    EXPECT_TRUE(another.is_closed());
}

// ---- on the head's own host

TEST(LocalClients, NeedNeitherSessionNorName) {
    const Nameless way;
    LoopThread thread;
    SilentHandler handler;
    std::unique_ptr<Server> server;
    thread.run([&] {
        ServerOptions options;
        options.credentials = kTestJob;
        options.where = {"127.0.0.1", 0};
        options.local_listener = UniqueFd(::dup(way.listener.fd.get()));
        server = *Server::create(thread.loop(), std::move(options), handler);
    });
    const auto local = *connect_to(way.address()),
               tcp = *connect_to(Endpoint{"127.0.0.1", server->bound().port});
    std::thread writer([&] { EXPECT_TRUE(tcp->set("k", "v")); });
    EXPECT_EQ(*local->get("k", soon()), "v");
    writer.join();
    std::thread other([&] { EXPECT_TRUE(tcp->barrier("both", 2, soon())); });
    EXPECT_TRUE(local->barrier("both", 2, soon()));
    other.join();
    thread.run([&] { server.reset(); });
    EXPECT_EQ(local->set("k", "v").error().code, Errc::Closed);
}

}  // namespace
}  // namespace ddprun::rdzv
