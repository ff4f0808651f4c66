#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "env/hmac.h"
#include "env/io/socket.h"
#include "rendezvous/client/store_client.h"
#include "rendezvous/serve/store_service.h"

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

TEST_F(Hosted, ServesEachClientThatKnowsTheSecret) {
    ClientOptions agent = member();
    agent.role = Role::Agent;
    Result<std::unique_ptr<StoreClient>> connected = StoreClient::connect(where_, agent, in_time());
    ASSERT_TRUE(connected);
    EXPECT_TRUE((*connected)->set("key", "value"));
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
