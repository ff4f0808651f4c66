#include <ddp/store.h>
#include <ddp/types.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "env/io/socket.h"
#include "env/worker_env.h"
#include "rendezvous/serve/store_service.h"

namespace ddp {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// A store for the ranks of a world of two.
class JobStore : public ::testing::Test {
  protected:
    void SetUp() override {
        auto listener = ddprun::listen_tcp({"127.0.0.1", 0});
        ASSERT_TRUE(listener) << listener.error().what;
        env_.store = ddprun::to_string(ddprun::Endpoint{"127.0.0.1", listener->bound.port}).insert(0, "tcp:");
        env_.token = "the token";
        env_.run_id = "job";
        env_.world_size = 2;
        auto host =
            ddprun::rdzv::StoreHost::start(std::move(listener->fd), {{env_.run_id, env_.token}, {}, {}});
        ASSERT_TRUE(host) << host.error().what;
        host_ = *std::move(host);
    }
    Store rank(int number) {
        ddprun::WorkerEnv env = env_;
        env.rank = number;
        return Store(Context(env), 20s);
    }
    ddprun::WorkerEnv env_;
    std::unique_ptr<ddprun::rdzv::StoreHost> host_;
};

template <class E>
std::string thrown(const std::function<void()>& call) {
    try {
        call();
    } catch (const E& error) {
        return error.what();
    }
    return "nothing was thrown";
}

TEST_F(JobStore, CarriesValuesFromRankToRank) {
    Store zero = rank(0), one = rank(1);
    zero.set("address", std::string("a\0b", 3));
    EXPECT_EQ(one.get("address"), std::string("a\0b", 3));
    EXPECT_EQ(one.try_get("other"), std::nullopt);
    EXPECT_EQ(zero.add("count", 2), 2);
    EXPECT_EQ(one.add("count", -5), -3);
    EXPECT_TRUE(zero.compare_set("first", std::nullopt, "zero").swapped);
    const Store::Exchange late = one.compare_set("first", std::nullopt, "one");
    EXPECT_FALSE(late.swapped);
    EXPECT_EQ(late.value, "zero");
    EXPECT_TRUE(one.compare_set("first", "zero", "one").swapped);
    EXPECT_TRUE(zero.erase("first"));
    EXPECT_FALSE(zero.erase("first"));
}

TEST_F(JobStore, GetAndWaitReturnWhenTheOtherRankHasWritten) {
    Store one = rank(1);
    std::thread zero([this] {
        Store store = rank(0);
        store.set("a", "1");
        store.set("b", "2");
    });
    one.wait({"a", "b"});
    EXPECT_EQ(one.get("b"), "2");
    zero.join();
}

TEST_F(JobStore, ABarrierCoversTheWholeWorldByDefault) {
    Store one = rank(1);
    one.barrier("alone", 1, 20s);
    std::thread zero([this] { rank(0).barrier("both"); });
    one.barrier("both");
    zero.join();
    EXPECT_THAT(thrown<TimeoutError>([&] { one.barrier("lonely", 2, 10ms); }),
                HasSubstr("rank 1: Store::barrier(\"lonely\")"));
}

TEST_F(JobStore, ExceptionsNameRankOperationAndKey) {
    Store zero = rank(0);
    EXPECT_THAT(thrown<TimeoutError>([&] { (void)zero.get("never", 10ms); }),
                HasSubstr("rank 0: Store::get(\"never\")"));
    EXPECT_THAT(thrown<TimeoutError>([&] { zero.wait({"never"}, 10ms); }), HasSubstr("never"));
    EXPECT_THAT(thrown<InvalidInput>([&] { zero.set("", "v"); }), HasSubstr("must not be empty"));
    EXPECT_THAT(thrown<InvalidInput>([&] { zero.set("\xff", "v"); }), HasSubstr("UTF-8"));
    zero.set("text", "no number");
    EXPECT_THAT(thrown<InvalidInput>([&] { zero.add("text", 1); }), HasSubstr("does not hold a number"));
}

TEST_F(JobStore, TakesKeysOfAThousandBytesAndNamesLongerOnesInOneShortLine) {
    Store zero = rank(0);
    zero.set(std::string(1000, 'k'), "v");
    EXPECT_EQ(zero.get(std::string(1000, 'k')), "v");
    for (const std::size_t bytes : {1001, 1019, 100'000}) {
        EXPECT_EQ(thrown<InvalidInput>([&] { zero.set(std::string(bytes, 'k'), "v"); }),
                  "a key of the store has at most 1000 bytes; \"" + std::string(60, 'k') + "...\" has " +
                      std::to_string(bytes));
    }
    EXPECT_LT(thrown<TimeoutError>([&] { (void)zero.get(std::string(1000, 'm'), 10ms); }).size(), 1500U);
}

TEST_F(JobStore, RefusesAForkedChildThatWouldReadItsParentsAnswers) {
    Store zero = rank(0);
    const pid_t child = ::fork();
    if (child == 0) {
        const std::string what = thrown<Error>([&] { zero.set("k", "child"); });
        ::_exit(what.find("in a forked child") == std::string::npos ? 1 : 42);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 42);
    EXPECT_EQ(zero.try_get("k"), std::nullopt);
}

TEST_F(JobStore, ThrowsTimeOutWhenItDoesNotExist) {
    host_.reset();
    EXPECT_THAT(thrown<TimeoutError>([&] { Store store(Context(env_), 10ms); }),
                HasSubstr("the job's store"));
}

TEST_F(JobStore, ThrowsPeerLostAfterItsEnd) {
    Store zero = rank(0);
    host_.reset();
    EXPECT_THAT(thrown<PeerLostError>([&] { zero.set("k", "v"); }), HasSubstr("store at 127.0.0.1"));
    EXPECT_THAT(thrown<PeerLostError>([&] { zero.set("k", "v"); }), HasSubstr("store at 127.0.0.1"))
        << "every call throws it";
}

TEST(JobStoreWithoutALauncher, NamesTheRemedy) {
    ddprun::WorkerEnv env;
    env.store = "unix:/proc/self/fd/9876";
    EXPECT_THAT(thrown<Error>([&] { Store store{Context(env)}; }),
                HasSubstr("closed the descriptors that it got from ddprun"));
    env.store = "carrier pigeon";
    EXPECT_THAT(thrown<InvalidInput>([&] { Store store{Context(env)}; }),
                HasSubstr("neither tcp:HOST:PORT nor unix:PATH"));
    EXPECT_THAT(thrown<InvalidInput>([] { Store store{Context(ddprun::WorkerEnv{})}; }),
                HasSubstr("start the program with ddprun"));
}

}  // namespace
}  // namespace ddp
