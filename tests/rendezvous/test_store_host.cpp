#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "env/hmac.h"
#include "env/io/socket.h"
#include "rendezvous/client/reach.h"
#include "rendezvous/client/store_client.h"
#include "rendezvous/serve/store_host.h"

namespace ddprun::rdzv {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TimePoint in_time() { return MonotonicClock::now() + std::chrono::seconds(20); }

ClientOptions member(const std::string& name = "rank 1", const std::string& token = "secret",
                     const std::string& job = "job") {
    ClientOptions options;
    options.job_id = job;
    options.token = token;
    options.name = name;
    return options;
}

class Hosted : public ::testing::Test {
  protected:
    void SetUp() override { start({}); }
    void start(ServerLimits limits, Duration farewell = std::chrono::minutes(10)) {
        Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
        ASSERT_TRUE(listener) << listener.error().what;
        where_ = listener->bound;
        Result<std::unique_ptr<StoreHost>> host =
            StoreHost::start(std::move(listener->fd), {{"job", "secret"}, limits, {}, "rank 0", farewell});
        ASSERT_TRUE(host) << host.error().what;
        host_ = *std::move(host);
    }
    std::unique_ptr<StoreClient> client(const std::string& name = "rank 1") {
        Result<std::unique_ptr<StoreClient>> connected =
            StoreClient::connect(where_, member(name), in_time());
        EXPECT_TRUE(connected) << connected.error().what;
        return connected ? *std::move(connected) : nullptr;
    }
    UniqueFd raw() { return std::move(*connect_tcp(where_, in_time())); }
    static bool is_closed(int fd) {
        char piece[256];
        while (wait_readable(fd, in_time()).value_or(false)) {
            if (::recv(fd, piece, sizeof piece, 0) <= 0) return true;
        }
        return false;
    }
    Endpoint where_;
    std::unique_ptr<StoreHost> host_;
};

TEST_F(Hosted, ServesEveryOperationOfTheLaunchersStore) {
    const auto one = client(), other = client("rank 2");
    ASSERT_TRUE(one->set("key", "value"));
    EXPECT_EQ(other->get("key", in_time()).value_or(""), "value");
    EXPECT_EQ(other->add("count", 5).value_or(0), 5);
    EXPECT_FALSE(one->compare_set("key", std::nullopt, "mine")->swapped);
    EXPECT_FALSE(*one->try_get("absent"));
    const std::string large(8 << 20, 'x');
    ASSERT_TRUE(one->set("large", large));
    EXPECT_EQ(other->get("large", in_time()).value_or(""), large);
}

TEST_F(Hosted, ManyClientsMeetInABarrier) {
    std::vector<std::thread> ranks;
    std::atomic<int> met = 0;
    for (int rank = 0; rank < 16; ++rank) {
        ranks.emplace_back([&] {
            const auto mine = client();
            for (int round = 0; round < 5; ++round) {
                if (mine && mine->barrier("round", 16, in_time())) ++met;
            }
        });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(met, 16 * 5);
}

TEST_F(Hosted, AWaitEndsAtItsTimeoutWithTheReason) {
    const auto one = client();
    const Status waited = one->barrier("lonely", 3, MonotonicClock::now() + std::chrono::milliseconds(50));
    ASSERT_FALSE(waited);
    EXPECT_EQ(waited.error().code, Errc::Timeout);
    EXPECT_THAT(waited.error().what, HasSubstr("1 of 3"));
}

TEST_F(Hosted, RefusesAWrongSecretOrJobWithTheReason) {
    const auto stranger = StoreClient::connect(where_, member("stranger", "guess"), in_time());
    ASSERT_FALSE(stranger);
    EXPECT_EQ(stranger.error().code, Errc::Refused);
    const auto other = StoreClient::connect(where_, member("lost", "secret", "another"), in_time());
    ASSERT_FALSE(other);
    EXPECT_EQ(other.error().code, Errc::Refused);
    EXPECT_TRUE(client()->set("key", "still here"));
}

TEST_F(Hosted, ServesEachClientThatKnowsTheSecret) {
    ClientOptions agent = member();
    agent.role = Role::Agent;
    Result<std::unique_ptr<StoreClient>> connected = StoreClient::connect(where_, agent, in_time());
    ASSERT_TRUE(connected);
    EXPECT_TRUE((*connected)->set("key", "value"));
}

TEST_F(Hosted, GarbageEndsItsConnectionOnly) {
    const auto before = client();
    const UniqueFd stranger = raw();
    ASSERT_TRUE(send_all(stranger.get(), "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", in_time()));
    EXPECT_TRUE(is_closed(stranger.get()));
    EXPECT_TRUE(before->set("key", "value"));
}

TEST_F(Hosted, ASilentClientIsClosedAfterTheHandshakeTimeout) {
    host_.reset();
    ServerLimits limits;
    limits.handshake = std::chrono::milliseconds(100);
    start(limits);
    const UniqueFd silent = raw();
    EXPECT_TRUE(is_closed(silent.get()));
}

TEST_F(Hosted, SilentConnectionsGiveWayToMembersBeforeTheHandshakeTimeout) {
    host_.reset();
    ServerLimits limits;
    limits.strangers = 2;
    limits.handshake = std::chrono::hours(1);
    start(limits);
    const UniqueFd one = raw(), two = raw(), three = raw();
    EXPECT_TRUE(client()->set("key", "value"));
    EXPECT_TRUE(is_closed(one.get()));
}

TEST_F(Hosted, AClosedClientLeavesItsBarrier) {
    auto gone = client();
    std::thread waiting(
        [&] { (void)gone->barrier("pair", 2, MonotonicClock::now() + std::chrono::milliseconds(100)); });
    waiting.join();
    gone.reset();
    const auto one = client(), other = client("rank 2");
    std::thread first([&] { EXPECT_TRUE(one->barrier("pair", 2, in_time())); });
    EXPECT_TRUE(other->barrier("pair", 2, in_time()));
    first.join();
}

TEST_F(Hosted, AnswersArriveAlthoughTheHostEnds) {
    const auto one = client("rank 0");
    ASSERT_TRUE(one->set("key", "value"));
    host_.reset();
    const Status late = one->set("key", "late");
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code, Errc::Closed);
}

TEST_F(Hosted, ServesOtherClientsAfterItsProcessWantsToEnd) {
    auto other = client();
    std::atomic<bool> has_ended = false;
    std::thread end([&] {
        host_.reset();
        has_ended = true;
    });
    int served = 0;
    while (served < 500 && other->add("done", 1)) ++served;
    EXPECT_EQ(served, 500) << "the store has gone";
    EXPECT_FALSE(has_ended);
    other.reset();
    end.join();
}

TEST_F(Hosted, TheEndDoesNotWaitForItsOwnProcess) {
    const auto own = client("rank 0");
    host_.reset();
    EXPECT_FALSE(own->add("done", 1));
}

TEST_F(Hosted, TheEndWaitsForOthersForABoundedTime) {
    host_.reset();
    start({}, std::chrono::milliseconds(1));
    const auto other = client();
    host_.reset();
    EXPECT_FALSE(other->add("done", 1));
}

TEST_F(Hosted, AForkedChildLeavesItToItsParent) {
    const pid_t child = ::fork();
    if (child == 0) {
        host_.reset();
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(client()->set("key", "value"));
}

TEST(StoreHost, RefusesToRunWithoutAToken) {
    EXPECT_EQ(StoreHost::start(UniqueFd(), {{"job", ""}, {}, {}}).error().code, Errc::InvalidArgument);
}

// ---- reach

TEST_F(Hosted, IsReachedDespiteAddressesThatLeadNowhere) {
    const Result<Listener> deaf = listen_tcp({"127.0.0.1", 0});
    ASSERT_TRUE(deaf);
    const auto reached = reach({{"127.0.0.1", 1}, deaf->bound, where_}, member(), in_time());
    ASSERT_TRUE(reached) << reached.error().what;
    EXPECT_EQ(reached->endpoint, where_);
}

TEST_F(Hosted, ReachEndsAtOnceWhenAllAddressesRefuse) {
    const auto reached =
        reach({where_}, member("stranger", "guess"), MonotonicClock::now() + std::chrono::hours(1));
    ASSERT_FALSE(reached);
    EXPECT_EQ(reached.error().code, Errc::Refused);
}

TEST(Reach, NamesEveryAddressThatItTried) {
    const auto reached = reach({{"127.0.0.1", 1}, {"127.0.0.2", 1}}, member(),
                               MonotonicClock::now() + std::chrono::milliseconds(50));
    ASSERT_FALSE(reached);
    EXPECT_EQ(reached.error().code, Errc::Timeout);
    EXPECT_THAT(reached.error().what,
                AllOf(HasSubstr("127.0.0.1:1"), HasSubstr("127.0.0.2:1"), HasSubstr("refused")));
}

/// An exchange through a file that returns first the value of an earlier job, then that of this one.
class LeftBehind final : public Exchange {
  public:
    explicit LeftBehind(std::string later) : later_(std::move(later)) {}
    Status put(std::string_view, std::string_view) override { return {}; }
    Status fence() override { return {}; }
    Result<std::string> get(int, std::string_view) override { return later_; }
    [[nodiscard]] bool keeps_what_was_put() const override { return true; }

  private:
    std::string later_;
};

TEST_F(Hosted, AnEntryOfAnEarlierJobIsReadAgain) {
    const MeetingPoint ours{"job", "secret", where_.port, {"127.0.0.1"}};
    MeetingPoint point{"job", "old secret", where_.port, {"127.0.0.1"}};
    LeftBehind exchange(encode(ours));
    const auto reached = reach(exchange, point, member(), in_time());
    ASSERT_TRUE(reached) << reached.error().what;
    EXPECT_EQ(point, ours);
}

}  // namespace
}  // namespace ddprun::rdzv
