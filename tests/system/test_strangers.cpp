// Joining a job of several nodes, and what strangers at its port, or on its host, can do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <optional>

#include "env/io/socket.h"
#include "tests/support/other_users_socket.h"
#include "tests/support/receive_exactly.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// One of two nodes that are started as by torchrun's users, without an option on secrets.
std::vector<std::string> node(int rank, const ReservedPort& port, const std::vector<std::string>& acts,
                              std::vector<std::string> options = {}) {
    options.insert(options.end(), {"--nnodes=2", "--node-rank=" + std::to_string(rank),
                                   "--master-addr=127.0.0.1", "--master-port=" + port.number()});
    return ddprun_probe(options, acts);
}

RunOptions with_config(const TemporaryDirectory& config, std::vector<std::string> more = {}) {
    more.push_back("XDG_CONFIG_HOME=" + config.path());
    RunOptions options = with_environment(std::move(more));
    options.unset = {"DDPRUN_TOKEN", "DDPRUN_INSECURE"};
    return options;
}

TEST(Strangers, NodesThatShareAHomeDirectoryNeedNoSecretOption) {
    const TemporaryDirectory config;
    const ReservedPort port;
    Program zero(node(0, port, {"env", "WORLD_SIZE"}), with_config(config)),
        one(node(1, port, {"env", "WORLD_SIZE"}), with_config(config));
    const Outcome of_one = one.wait(), of_zero = zero.wait();
    EXPECT_EQ(of_zero.status, 0) << of_zero.err;
    EXPECT_EQ(of_one.status, 0) << of_one.err;
    EXPECT_THAT(of_one.out, HasSubstr("WORLD_SIZE=2"));
    struct stat status {};
    ASSERT_EQ(::stat(config.file("ddprun/secret").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600U);
    EXPECT_EQ(status.st_size, 32);
}

TEST(Strangers, ANodeWithAnotherSecretIsRefusedAndLogsTheRemedyItself) {
    const TemporaryDirectory config, another;
    const ReservedPort port;
    Program zero(node(0, port, {"say", "up"}), with_config(config));
    const Outcome one = run(node(1, port, {"say", "up"}), with_config(another));
    EXPECT_EQ(one.status, 69) << one.err;
    EXPECT_THAT(one.err, AllOf(HasSubstr("wrong token"), HasSubstr("copy that file"),
                               HasSubstr(another.path() + "/ddprun/secret"), HasSubstr("DDPRUN_TOKEN"),
                               Not(HasSubstr(config.path()))));
    EXPECT_TRUE(zero.wait_for_output("its token is wrong"));
    zero.signal(SIGTERM);
    const Outcome head = zero.wait();
    EXPECT_EQ(head.status, 75) << head.err;
    EXPECT_EQ(head.out + one.out, "");
}

TEST(Strangers, NothingStartsWithoutASecretUnlessInsecureWhichQuietDoesNotHide) {
    const ReservedPort port;
    RunOptions homeless;
    homeless.unset = {"DDPRUN_TOKEN", "DDPRUN_INSECURE", "XDG_CONFIG_HOME", "HOME"};
    const Outcome refused = run(node(0, port, {"say", "up"}), homeless);
    EXPECT_EQ(refused.status, 64) << refused.err;
    EXPECT_THAT(refused.err, AllOf(HasSubstr("DDPRUN_TOKEN"), HasSubstr("--insecure")));
    EXPECT_EQ(occurrences(said_of_its_own_job(refused), "\n"), 1) << refused.err;

    RunOptions by_variable = homeless;
    std::erase(by_variable.unset, "DDPRUN_INSECURE");
    by_variable.environment = {"DDPRUN_INSECURE=1"};
    Program zero(node(0, port, {"say", "up"}, {"-q", "--insecure"}), homeless),
        one(node(1, port, {"say", "up"}, {"-q"}), by_variable);
    for (Program* const each : {&zero, &one}) {
        const Outcome outcome = each->wait();
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr("whoever reaches the port"));
    }
}

TEST(Strangers, AFloodOfConnectionsIsCountedNotLoggedLineByLine) {
    constexpr int kConnections = 400;
    const TemporaryDirectory config;
    const ReservedPort port;
    Program head(node(0, port, {"say", "up"}), with_config(config));
    ASSERT_TRUE(head.wait_for_output("waiting for 2 nodes"));
    for (int i = 0; i < kConnections; ++i) {
        const Result<UniqueFd> stranger = connect_tcp(port.endpoint(), MonotonicClock::now() + 20s);
        ASSERT_TRUE(stranger) << stranger.error().what;
        ASSERT_TRUE(send_all(stranger->get(), "GET / HTTP/1.1\r\n\r\n", MonotonicClock::now() + 20s));
        char byte = 0;
        ASSERT_FALSE(receive_exactly(stranger->get(), {&byte, 1}, MonotonicClock::now() + 20s))
            << "closed: it has been noticed";
    }
    head.signal(SIGTERM);
    const Outcome outcome = head.wait();
    EXPECT_EQ(outcome.status, 75);
    // The first few are logged, and one for every ten seconds that the loop takes on a busy machine.
    EXPECT_LT(occurrences(outcome.err, "127.0.0.1:"), 60) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("connections: " + std::to_string(kConnections) + " lines in all, "));
}

TEST(Strangers, TenThousandConnectionsWhileAJobFormsDoNotKeepItsNodesOut) {
    constexpr int kConnections = 10'000, kBeforeTheOther = 3'000;
    constexpr std::size_t kKeptOpen = 600;  // more than are waited for in their handshake
    const TemporaryDirectory config;
    const ReservedPort port;
    const std::vector<std::string> acts{"env", "WORLD_SIZE", "await", config.file("they are gone")};
    Program zero(node(0, port, acts), with_config(config));
    ASSERT_TRUE(zero.wait_for_output("waiting for 2 nodes"));
    std::optional<Program> one;
    std::deque<UniqueFd> open;
    int failed = 0;
    for (int i = 0; i < kConnections; ++i) {
        if (i == kBeforeTheOther) one.emplace(node(1, port, acts), with_config(config));
        Result<UniqueFd> stranger = connect_tcp(port.endpoint(), MonotonicClock::now() + 20s);
        if (!stranger) ++failed;
        if (!stranger) continue;
        if (i % 3 == 0)
            (void)send_all(stranger->get(), "GET / HTTP/1.1\r\n\r\n", MonotonicClock::now() + 20s);
        if (i % 3 == 1) open.push_back(*std::move(stranger));
        if (open.size() > kKeptOpen) open.pop_front();
    }
    EXPECT_EQ(failed, 0);
    std::ofstream(config.file("they are gone"));
    for (Program* const each : {&zero, &*one}) {
        const Outcome outcome = each->wait();
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("WORLD_SIZE=2"));
        EXPECT_LT(outcome.err.size(), 100'000U);
    }
}

TEST(Strangers, ASocketOfAnotherUserUnderOurNameDoesNotBreakPs) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    const OtherUsersSocket squatter("ddprun/0/" + unique_name("squat"));
    ASSERT_TRUE(squatter.listens());
    const std::string id = unique_name("job");
    Program program(ddprun_probe({"--rdzv-id=" + id}, {"say", "up", "hold"}));
    ASSERT_TRUE(program.wait_for_output("up\n"));
    const Outcome all = run({path_of("DDPRUN"), "ps"});
    EXPECT_THAT(all.out, HasSubstr(id)) << all.err;
    EXPECT_THAT(all.err, Not(HasSubstr("squat")));
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().status, 75);
}

}  // namespace
}  // namespace ddprun::test
