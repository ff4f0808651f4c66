#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>

#include "launcher/hang/nccl_ras.h"
#include "tests/support/fake_ras.h"
#include "tests/support/reserved_port.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(RasDialogue, FollowsTheProtocolOfNcclsOwnClient) {
    RasDialogue dialogue;
    EXPECT_EQ(RasDialogue::greeting(), "CLIENT PROTOCOL 2\n");
    EXPECT_EQ(dialogue.take("SERVER PRO").value_or("?"), "");
    EXPECT_EQ(dialogue.take("TOCOL 2\n").value_or("?"), "TIMEOUT 2\n");
    EXPECT_EQ(dialogue.take("OK\n").value_or("?"), "STATUS\n");
    EXPECT_EQ(dialogue.take("NCCL version 2.28\n").value_or("?"), "");
    EXPECT_EQ(dialogue.take("Job summary\n").value_or("?"), "");
    EXPECT_EQ(dialogue.status(), "NCCL version 2.28\nJob summary\n");
}

TEST(RasDialogue, AsksAServiceThatKnowsNoTimeoutToo) {
    RasDialogue dialogue;
    EXPECT_TRUE(dialogue.take("SERVER PROTOCOL 3\n"));
    EXPECT_EQ(dialogue.take("ERROR: Unknown command TIMEOUT 2\n").value_or("?"), "STATUS\n");
}

TEST(RasDialogue, RefusesAnotherService) {
    RasDialogue dialogue;
    EXPECT_FALSE(dialogue.take("SSH-2.0-OpenSSH\n"));
    RasDialogue endless;
    EXPECT_FALSE(endless.take(std::string(2000, 'x')));
}

std::optional<Result<std::string>> ask(const Endpoint& where, Duration timeout) {
    const auto loop = os::EventLoop::create({});
    std::optional<Result<std::string>> answer;
    ask_nccl_ras(**loop, where, timeout, [&](Result<std::string> text) { answer = std::move(text); });
    while (!answer && (*loop)->run_once(MonotonicClock::now() + 30s)) {
    }
    return answer;
}

TEST(NcclRas, TheStatusIsReadToItsEnd) {
    FakeRas ras({"SERVER PROTOCOL 2\n", "OK\n", std::string(100'000, 'x') + "\nWarnings\n"},
                FakeRas::Then::Close);
    const auto answer = ask(ras.where(), 30s);
    ASSERT_TRUE(answer && *answer) << (*answer).error().what;
    EXPECT_EQ((**answer).size(), 100'010u);
    EXPECT_THAT(ras.heard(), ElementsAre("CLIENT PROTOCOL 2", "TIMEOUT 2", "STATUS"));
}

TEST(NcclRas, ShowsThePartThatArrivesInTime) {
    FakeRas ras({"SERVER PROTOCOL 2\n", "OK\n", "Job summary\n"}, FakeRas::Then::StaySilent);
    const auto answer = ask(ras.where(), 3s);
    ASSERT_TRUE(answer && *answer) << (*answer).error().what;
    EXPECT_THAT(**answer, AllOf(StartsWith("Job summary\n"), HasSubstr("nothing more came within 3 s")));
}

TEST(NcclRas, SilenceAndAbsenceAndOtherServicesAreErrors) {
    FakeRas silent({}, FakeRas::Then::StaySilent);
    EXPECT_EQ(ask(silent.where(), 200ms)->error().code, Errc::Timeout);
    FakeRas stranger({"HTTP/1.1 400 Bad Request\n"}, FakeRas::Then::Close);
    EXPECT_EQ(ask(stranger.where(), 30s)->error().code, Errc::Protocol);
    const ReservedPort nobody;
    EXPECT_EQ(ask({"localhost", nobody.endpoint().port}, 30s)->error().code, Errc::System);
}

}  // namespace
}  // namespace ddprun::test
