#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "server_fixture.h"
#include "tests/support/receive_exactly.h"
#include "tests/support/reserved_port.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

Result<std::unique_ptr<StoreClient>> connect_with(const Endpoint& server, const Credentials& credentials,
                                                  TimePoint deadline = soon()) {
    return StoreClient::connect(server, {Role::Worker, credentials.job_id, credentials.token, 0, "a test"},
                                deadline);
}

TEST(StoreClient, DoesEveryOperation) {
    RunningServer server;
    const auto client = server.client();
    ASSERT_TRUE(client->set("k", std::string_view("a\0b", 3)));
    EXPECT_EQ(*client->get("k", soon()), std::string("a\0b", 3));
    EXPECT_EQ(*client->try_get("k"), std::string("a\0b", 3));
    EXPECT_EQ(*client->try_get("none"), std::nullopt);
    EXPECT_EQ(*client->add("n", 40), 40);
    EXPECT_EQ(*client->add("n", 2), 42);
    const auto kept = client->compare_set("n", "41", "x");
    EXPECT_FALSE(kept->swapped);
    EXPECT_EQ(kept->value, "42");
    const auto swapped = client->compare_set("new", std::nullopt, "x");
    EXPECT_TRUE(swapped->swapped);
    EXPECT_EQ(swapped->value, "x");
    EXPECT_TRUE(client->wait({"k", "n"}, soon()));
    EXPECT_TRUE(*client->erase("k"));
    EXPECT_FALSE(*client->erase("k"));
    EXPECT_TRUE(client->barrier("alone", 1, soon()));
}

TEST(StoreClient, CarriesKeysThatNeedEscapes) {
    RunningServer server;
    const auto client = server.client();
    const std::string key = "quote \" backslash \\ newline \n \xe2\x82\xac";
    ASSERT_TRUE(client->set(key, "v"));
    EXPECT_EQ(*client->get(key, soon()), "v");
    EXPECT_EQ(client->set("\xff", "v").error().code, Errc::InvalidArgument);
    EXPECT_EQ(client->set("", "v").error().code, Errc::InvalidArgument);
    EXPECT_TRUE(client->set("still", "alive"));
}

TEST(StoreClient, CarriesValuesOfMegabytesBothWays) {
    RunningServer server;
    const auto client = server.client();
    std::string large(20U << 20, '\0');
    for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 2654435761U >> 24);
    ASSERT_TRUE(client->set("large", large));
    EXPECT_TRUE(*client->get("large", soon()) == large);
}

TEST(StoreClient, RefusesAValueBeyondTheLimitAndLivesOn) {
    RunningServer server;
    const auto client = server.client();
    const std::string huge((64U << 20) + 1, 'x');
    EXPECT_EQ(client->set("k", huge).error().code, Errc::Limit);
    EXPECT_TRUE(client->set("k", "small"));
}

TEST(StoreClient, GetWakesWhenAnotherClientSets) {
    RunningServer server;
    const auto reader = server.client();
    std::thread writer([&] {
        const auto client = server.client();
        // The set must follow the reader's wait: else this would test nothing.
        for (std::size_t waiters = 0; waiters == 0;)
            server.with([&](Server& s) { waiters = s.store().waiters(); });
        EXPECT_TRUE(client->set("k", "v"));
    });
    EXPECT_EQ(*reader->get("k", soon()), "v");
    writer.join();
}

TEST(StoreClient, ReportsTheServersReasonForATimeout) {
    RunningServer server;
    const auto client = server.client();
    const TimePoint start = MonotonicClock::now();
    const auto missing = client->get("missing", start + 50ms);
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, Errc::Timeout);
    EXPECT_NE(missing.error().what.find("key 'missing' not set within"), std::string::npos)
        << missing.error().what;
    const Status lonely = client->barrier("b", 4, MonotonicClock::now() + 50ms);
    EXPECT_NE(lonely.error().what.find("barrier 'b': 1 of 4 arrived"), std::string::npos)
        << lonely.error().what;
    EXPECT_GE(MonotonicClock::now() - start, 100ms);
    EXPECT_EQ(client->wait({"x"}, MonotonicClock::now() - 1s).error().code, Errc::Timeout);
    EXPECT_TRUE(client->set("k", "v")) << "a time-out is not the end";
}

TEST(StoreClient, ReturnsByItsDeadlineFromAServerThatHangs) {
    RunningServer server;
    const auto client = server.client();
    std::promise<void> release;
    std::promise<void> entered;
    std::thread blocker([&] {
        server.with([&](Server&) {
            entered.set_value();
            release.get_future().wait();
        });
    });
    entered.get_future().wait();
    client->set_operation_timeout(50ms);
    const Status stuck = client->set("k", "late");
    EXPECT_EQ(stuck.error().code, Errc::Timeout);
    EXPECT_EQ(client->get("k", MonotonicClock::now() + 10ms).error().code, Errc::Timeout);
    release.set_value();
    blocker.join();
    client->set_operation_timeout(20s);
    EXPECT_EQ(*client->try_get("other"), std::nullopt) << "late answers are not taken for this one";
    EXPECT_EQ(*client->try_get("k"), "late");
}

TEST(StoreClient, IsToldThatItsGenerationIsOver) {
    RunningServer server;
    const auto old = server.client(0);
    ASSERT_TRUE(old->set("k", "old"));
    std::thread restart([&] {
        for (std::size_t waiters = 0; waiters == 0;)
            server.with([&](Server& s) { waiters = s.store().waiters(); });
        server.with([](Server& s) { s.begin_generation(1); });
    });
    EXPECT_EQ(old->get("never", soon()).error().code, Errc::StaleGeneration);
    restart.join();
    EXPECT_EQ(old->set("k", "poison").error().code, Errc::StaleGeneration);
    const auto fresh = server.client(1);
    EXPECT_EQ(*fresh->try_get("k"), std::nullopt);
}

TEST(StoreClient, SixtyFourClientsMeetInABarrierManyTimes) {
    constexpr int kClients = 64;
    RunningServer server;
    std::atomic<int> inside = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < kClients; ++i) {
        threads.emplace_back([&] {
            const auto client = server.client();
            for (int round = 1; round <= 5; ++round) {
                ++inside;
                const Status met = client->barrier("everyone", kClients, soon());
                EXPECT_TRUE(met) << met.error().what;
                EXPECT_GE(inside.load(), round * kClients);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST(StoreClient, AddsAreNeverLost) {
    RunningServer server;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            const auto client = server.client();
            for (int n = 0; n < 200; ++n) EXPECT_TRUE(client->add("n", 1));
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(*server.client()->add("n", 0), 1600);
}

TEST(StoreClient, IsRefusedWithAWrongToken) {
    RunningServer server;
    const auto refused = connect_with(server.endpoint(), {kTestJob.job_id, "a guess"});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::Refused);
    EXPECT_NE(refused.error().what.find("wrong token"), std::string::npos) << refused.error().what;
    EXPECT_TRUE(server.events.saw("worker 'a test' (127.0.0.1:"));
    EXPECT_TRUE(server.events.saw("its token is wrong"));
}

TEST(StoreClient, IsRefusedByAnotherJob) {
    RunningServer server;
    const auto refused = connect_with(server.endpoint(), {"my job", kTestJob.token});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::Refused);
    EXPECT_NE(refused.error().what.find("another job than 'my job'"), std::string::npos)
        << refused.error().what;
    EXPECT_EQ(refused.error().what.find(kTestJob.job_id), std::string::npos);
}

TEST(StoreClient, WaitsForAServerThatStartsLater) {
    const test::ReservedPort port;
    const Endpoint later = port.endpoint();
    std::thread late_client([&] {
        const auto client = connect_with(later, kTestJob);
        EXPECT_TRUE(client) << client.error().what;
    });
    LoopThread thread;
    SilentHandler handler;
    std::unique_ptr<Server> server;
    thread.run([&] {
        ServerOptions options;
        options.credentials = kTestJob;
        options.where = later;
        server = *Server::create(thread.loop(), std::move(options), handler);
    });
    late_client.join();
    thread.run([&] { server.reset(); });
}

TEST(StoreClient, RetriesWhenTheServerIsTooBusyForTheHandshake) {
    const Listener busy = *listen_tcp({"127.0.0.1", 0});
    std::thread server([&] {
        for (const Errc why : {Errc::Limit, Errc::Timeout}) {
            ASSERT_TRUE(*wait_readable(busy.fd.get(), soon()));
            const UniqueFd peer(::accept(busy.fd.get(), nullptr, nullptr));
            EXPECT_TRUE(send_all(peer.get(), bytes_of(Failure{why, "later"}, 0), soon()));
        }
        ASSERT_TRUE(*wait_readable(busy.fd.get(), soon())) << "it comes a third time";
        const UniqueFd peer(::accept(busy.fd.get(), nullptr, nullptr));
        EXPECT_TRUE(send_all(peer.get(), bytes_of(Failure{Errc::Refused, "never"}, 0), soon()));
    });
    const auto failed = connect_with(busy.bound, kTestJob);
    server.join();
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Errc::Refused);
}

TEST(StoreClient, GivesUpOnAnAbsentServerNamingIt) {
    const test::ReservedPort port;
    const Endpoint nobody = port.endpoint();
    const auto failed = connect_with(nobody, kTestJob, MonotonicClock::now() + 50ms);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Errc::Timeout);
    EXPECT_NE(failed.error().what.find(to_string(nobody)), std::string::npos) << failed.error().what;
    EXPECT_NE(failed.error().what.find("refused"), std::string::npos) << failed.error().what;
}

TEST(StoreClient, GivesUpOnASilentServer) {
    const Listener silent = *listen_tcp({"127.0.0.1", 0});
    const auto failed = connect_with(silent.bound, kTestJob, MonotonicClock::now() + 50ms);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Errc::Timeout);
}

TEST(StoreClient, RefusesAServerOfAnotherProtocol) {
    const Listener other = *listen_tcp({"127.0.0.1", 0});
    std::thread http([&] {
        ASSERT_TRUE(*wait_readable(other.fd.get(), soon()));
        const UniqueFd peer(::accept(other.fd.get(), nullptr, nullptr));
        EXPECT_TRUE(send_all(peer.get(), "HTTP/1.1 400 Bad Request\r\n\r\n", soon()));
        char byte = 0;
        while (test::receive_exactly(peer.get(), {&byte, 1}, soon())) {
        }
    });
    const auto failed = connect_with(other.bound, kTestJob);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Errc::Protocol);
    http.join();
}

TEST(StoreClient, NoticesAtOnceThatTheServerIsGone) {
    RunningServer server;
    const auto client = server.client();
    std::thread killer([&] {
        for (std::size_t waiters = 0; waiters == 0;)
            server.with([&](Server& s) { waiters = s.store().waiters(); });
        server.stop();
    });
    const auto lost = client->get("k", kNever);
    ASSERT_FALSE(lost);
    EXPECT_EQ(lost.error().code, Errc::Closed);
    EXPECT_NE(lost.error().what.find(to_string(server.endpoint())), std::string::npos) << lost.error().what;
    EXPECT_EQ(client->set("k", "v").error(), lost.error()) << "it stays dead";
    killer.join();
}

TEST(StoreClient, ADeadClientLeavesItsBarrier) {
    RunningServer server;
    const auto patient = server.client();
    {
        const auto dead = server.client();
        EXPECT_FALSE(dead->barrier("b", 3, MonotonicClock::now() + 10ms));
    }
    std::thread other([&] {
        const auto client = server.client();
        EXPECT_FALSE(client->barrier("b", 3, MonotonicClock::now() + 10ms)) << "two of three";
    });
    EXPECT_FALSE(patient->barrier("b", 3, MonotonicClock::now() + 10ms));
    other.join();
}

}  // namespace
}  // namespace ddprun::rdzv
