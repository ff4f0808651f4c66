#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <thread>

#include "ddp/nccl/ledger.h"
#include "ddp/worker/device_error.h"
#include "tests/support/reserved_port.h"
#include "tests/workers/nccl_world.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ddprun::TimePoint in(milliseconds span) {
    return ddprun::deadline_after(ddprun::MonotonicClock::now(), span);
}

/// Serves one client as NCCL's RAS thread does.
class RasServer {
  public:
    explicit RasServer(std::string answer, std::string greeting = "SERVER PROTOCOL 2\n")
        : listener_(*ddprun::listen_tcp({"127.0.0.1", 0})),
          thread_([this, answer = std::move(answer), greeting = std::move(greeting)] {
              serve(greeting, answer);
          }) {}
    ~RasServer() { thread_.join(); }
    RasServer(const RasServer&) = delete;
    RasServer& operator=(const RasServer&) = delete;
    [[nodiscard]] const ddprun::Endpoint& where() const { return listener_.bound; }
    std::vector<std::string> heard;  ///< valid once the client has its answer

  private:
    void serve(const std::string& greeting, const std::string& answer) {
        if (!*ddprun::wait_readable(listener_.fd.get(), in(milliseconds(20'000)))) return;
        const ddprun::UniqueFd client(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
        for (const std::string& reply : {greeting, std::string("OK\n"), answer}) {
            char line[256];
            const ssize_t got = ::recv(client.get(), line, sizeof line, 0);
            if (got <= 0) return;
            heard.emplace_back(line, static_cast<std::size_t>(got));
            if (::send(client.get(), reply.data(), reply.size(), MSG_NOSIGNAL) < 0) return;
        }
    }
    ddprun::Listener listener_;
    std::thread thread_;
};

TEST(NcclRas, IsQueriedLikeNcclsOwnClientDoes) {
    RasServer server("Job summary\n=== 1 rank is missing\n");
    EXPECT_EQ(nccl::query_ras(server.where(), in(milliseconds(20'000))),
              "Job summary\n=== 1 rank is missing\n");
    EXPECT_THAT(server.heard, ElementsAre("CLIENT PROTOCOL 2\n", "TIMEOUT 2\n", "STATUS\n"));
}

TEST(NcclRas, GivesNoAnswerWhenTheServerIsMissingOrAnother) {
    const ddprun::test::ReservedPort closed;
    EXPECT_EQ(nccl::query_ras(closed.endpoint(), in(milliseconds(5'000))), "");
    RasServer other("", "220 mail.example.org\n");
    EXPECT_EQ(nccl::query_ras(other.where(), in(milliseconds(20'000))), "");
}

TEST(NcclRas, IsAwaitedUntilTheDeadline) {
    const ddprun::Listener silent = *ddprun::listen_tcp({"127.0.0.1", 0});
    EXPECT_EQ(nccl::query_ras(silent.bound, in(milliseconds(100))), "");
}

TEST(NcclRas, HasTheAddressInItsVariables) {
    ::setenv("NCCL_RAS_ADDR", "127.0.0.1:777", 1);
    EXPECT_EQ(nccl::ras_address(), (ddprun::Endpoint{"127.0.0.1", 777}));
    ::setenv("NCCL_RAS_ENABLE", "0", 1);
    EXPECT_EQ(nccl::ras_address(), std::nullopt);
    ::unsetenv("NCCL_RAS_ENABLE");
    ::unsetenv("NCCL_RAS_ADDR");
    EXPECT_EQ(nccl::ras_address(), (ddprun::Endpoint{"localhost", 28028}));
}

TEST(NcclRas, IsInTheReportOfAHangingCollective) {
    RasServer server("=== rank 1 does not answer\n");
    ::setenv("NCCL_RAS_ADDR", ddprun::to_string(server.where()).c_str(), 1);
    ::testing::internal::CaptureStderr();
    const auto failures = failures_of(1,
                                      [](NcclRank& rank) {
                                          const Buffer buffer = rank.filled({1});
                                          rank.group.all_reduce(buffer).synchronize();
                                      },
                                      {.faults = "0:2:hang", .timeout = milliseconds(300)});
    const std::string said = ::testing::internal::GetCapturedStderr();
    ::unsetenv("NCCL_RAS_ADDR");
    EXPECT_THAT(message_of(failures[0]), HasSubstr("NCCL's own view (RAS) is on standard error"));
    EXPECT_THAT(said, HasSubstr("ddp: rank 0: NCCL's RAS says:\n=== rank 1 does not answer\n"));
    EXPECT_THAT(last_device_error(DeviceLibrary::Nccl), HasSubstr("rank 1 does not answer"));
}

}  // namespace
