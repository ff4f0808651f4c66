#include "env/os/acceptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>

#include "env/io/socket.h"
#include "tests/support/fake_clock.h"

namespace ddprun::os {
namespace {

using test::soon;

/// Keeps accepted connections.
struct Host final : AcceptorOwner {
    void on_accepted(UniqueFd fd) override { guests.push_back(std::move(fd)); }
    TimePoint room_at() override {
        ++looks;
        return guests.size() < most ? TimePoint::min() : kNever;
    }
    bool close_another() override {
        if (guests.empty()) return false;
        guests.erase(guests.begin());
        ++closed;
        return true;
    }
    void on_accept_failed(int error) override { errors.push_back(error); }

    std::vector<UniqueFd> guests;
    std::size_t most = 100;
    int looks = 0;
    int closed = 0;
    std::vector<int> errors;
};

class AcceptorTest : public testing::Test {
  protected:
    void SetUp() override { listen(); }
    void listen() {
        Result<Listener> listener = listen_tcp({"127.0.0.1", 0});
        ASSERT_TRUE(listener);
        where_.push_back(listener->bound);
        ASSERT_TRUE(acceptor_.listen(std::move(listener->fd)));
    }
    /// Connects; the connection then waits in the kernel's queue.
    UniqueFd connect(std::size_t to = 0) {
        Result<UniqueFd> connected = connect_tcp(where_[to], soon());
        EXPECT_TRUE(connected) << connected.error().what;
        return *std::move(connected);
    }
    /// Runs the loop until the waiting connections have been accepted, if they can be.
    void look() { ASSERT_TRUE(loop_->run_once(MonotonicClock::now())); }

    std::unique_ptr<EventLoop> loop_ = *EventLoop::create({});
    Host host_;
    Acceptor acceptor_{*loop_, host_};
    std::vector<Endpoint> where_;
};

TEST_F(AcceptorTest, AcceptsConnectionsOfSeveralListeners) {
    listen();
    const UniqueFd first = connect(0), second = connect(1);
    look();
    ASSERT_EQ(host_.guests.size(), 2U);
    for (const UniqueFd& guest : host_.guests) EXPECT_NE(::fcntl(guest.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(AcceptorTest, LeavesConnectionsWaitingUntilThereIsRoom) {
    host_.most = 1;
    const UniqueFd first = connect(), second = connect();
    look();
    EXPECT_EQ(host_.guests.size(), 1U);
    const int looks = host_.looks;
    look();
    EXPECT_EQ(host_.looks, looks) << "who waits does not keep the loop busy";
    host_.most = 2;
    acceptor_.room_was_made();
    look();
    EXPECT_EQ(host_.guests.size(), 2U);
}

/// Prevents the opening of descriptors during its life.
class NoDescriptors {
  public:
    NoDescriptors() {
        ::getrlimit(RLIMIT_NOFILE, &before_);
        const UniqueFd next(::fcntl(0, F_DUPFD_CLOEXEC, 0));  // all below it are taken
        const rlimit none{static_cast<rlim_t>(next.get()), before_.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &none);
    }
    ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

  private:
    rlimit before_{};
};

TEST_F(AcceptorTest, ClosesAnotherConnectionWhenDescriptorsHaveRunOut) {
    const UniqueFd first = connect();
    look();
    const UniqueFd second = connect();
    const NoDescriptors none;
    look();
    EXPECT_EQ(host_.closed, 1);
    EXPECT_EQ(host_.guests.size(), 1U);
    EXPECT_TRUE(host_.errors.empty());
}

TEST_F(AcceptorTest, TriesAgainLaterWhenNoConnectionCanBeClosed) {
    const UniqueFd guest = connect();
    {
        const NoDescriptors none;
        look();
        EXPECT_EQ(host_.errors, std::vector<int>{EMFILE});
    }
    while (host_.guests.empty()) ASSERT_TRUE(loop_->run_once(soon()));
    EXPECT_EQ(host_.errors.size(), 1U);
}

}  // namespace
}  // namespace ddprun::os
