// Sessions between real agents and a real server, over a relay that loses connections.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "flaky_relay.h"
#include "server_fixture.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

std::vector<std::string> messages_in(EventLog& events) {
    std::vector<std::string> found;
    for (const std::string& line : events.lines()) {
        if (line.starts_with("message Question")) found.push_back(line);
    }
    return found;
}

/// Messages of all sizes, so that resets happen within and between messages.
Question numbered(int number) {
    return {0, fmt::format("{} {}", number, std::string(static_cast<std::size_t>(number * 37 % 900), 'x'))};
}

std::vector<std::string> in_order(int count) {
    std::vector<std::string> expected;
    for (int i = 0; i < count; ++i) expected.push_back("message Question " + numbered(i).request);
    return expected;
}

bool says(EventLog& events, const std::string& text) {
    for (const std::string& line : events.lines()) {
        if (line.find(text) != std::string::npos) return true;
    }
    return false;
}

TEST(Session, LosesAndRepeatsNothingWhenConnectionsAreResetWithinAMessage) {
    RunningServer server({}, kPatient);
    FlakyRelay relay(server.endpoint());
    RunningLink link(relay.endpoint(), soon(), kTestJob, kPatient);
    ASSERT_TRUE(server.events.saw("joined node02"));
    relay.reset_after(20'011);
    relay.reset_all();
    constexpr int kCount = 400;
    for (int i = 0; i < kCount; ++i) {
        ASSERT_TRUE(link.send(numbered(i)));
        server.with([&](Server& s) { s.broadcast(numbered(i)); });
    }
    EXPECT_TRUE(server.events.saw("message " + name_and_text(ToAgent(numbered(kCount - 1)))));
    EXPECT_TRUE(link.events.saw("message " + name_and_text(ToAgent(numbered(kCount - 1)))));
    EXPECT_TRUE(messages_in(server.events) == in_order(kCount));
    EXPECT_TRUE(messages_in(link.events) == in_order(kCount));
    EXPECT_GT(relay.carried(), 5);
    for (EventLog* events : {&server.events, &link.events}) {
        EXPECT_FALSE(says(*events, "lost ") || says(*events, "log "));
    }
}

TEST(Session, ContinuesOverAnotherConnectionBeforeTheTimeout) {
    RunningServer server({}, {6s});
    FlakyRelay relay(server.endpoint());
    RunningLink link(relay.endpoint(), soon(), kTestJob, {6s});
    ASSERT_TRUE(server.events.saw("joined node02"));
    relay.freeze_all();
    ASSERT_TRUE(link.send(numbered(0)));
    server.with([&](Server& s) { s.broadcast(numbered(0)); });
    EXPECT_TRUE(server.events.saw("detail another connection of agent 'agent on node02'"));
    EXPECT_TRUE(server.events.saw("message Question 0"));
    EXPECT_TRUE(link.events.saw("message Question 0"));
    EXPECT_EQ(messages_in(server.events).size(), 1U);
    EXPECT_FALSE(says(server.events, "lost ") || says(link.events, "lost "));
}

TEST(Session, KeepsMessagesThatAreSentWithoutAConnection) {
    RunningServer server({}, kPatient);
    FlakyRelay relay(server.endpoint());
    RunningLink link(relay.endpoint(), soon(), kTestJob, kPatient);
    ASSERT_TRUE(server.events.saw("joined node02"));
    relay.refuse_new(true);
    relay.reset_all();
    for (int i = 0; i < 3; ++i) {
        server.with([&](Server& s) { EXPECT_TRUE(s.send(1, numbered(i))); });
        EXPECT_TRUE(link.send(numbered(i)));
    }
    relay.refuse_new(false);
    EXPECT_TRUE(server.events.saw("message Question 2"));
    EXPECT_TRUE(link.events.saw("message Question 2"));
    EXPECT_EQ(messages_in(server.events), in_order(3));
    EXPECT_EQ(messages_in(link.events), in_order(3));
}

TEST(Session, IsRefusedAfterItsEndWithACodeThatTellsTheAgentToJoinAgain) {
    RunningServer server({}, {100ms});
    FlakyRelay relay(server.endpoint());
    RunningLink link(relay.endpoint(), soon(), kTestJob, kPatient);
    ASSERT_TRUE(server.events.saw("joined node02"));
    relay.refuse_new(true);
    relay.freeze_all();
    ASSERT_TRUE(server.events.saw("lost no heartbeat for 100 ms"))
        << ::testing::PrintToString(server.events.lines());
    relay.refuse_new(false);
    relay.reset_all();
    EXPECT_TRUE(link.events.saw("lost " + std::to_string(static_cast<int>(Errc::StaleGeneration)) +
                                " this node was taken for lost"))
        << ::testing::PrintToString(link.events.lines());
}

TEST(Session, EndsAfterTheGraceWhenItsProcessDied) {
    RunningServer server({}, kPatient);
    RunningLink link(server.endpoint(), soon(), kTestJob, kPatient);
    ASSERT_TRUE(server.events.saw("joined node02"));
    link.close();
    EXPECT_TRUE(server.events.saw("lost ")) << "silence would take a minute";
}

TEST(Session, CannotBeTakenOverWithoutTheToken) {
    RunningServer server({}, kPatient);
    RawPeer agent(server.endpoint());
    ClientHandshake own(kTestJob, Hello{Role::Agent, "agent on node03", "", ""},
                        "000102030405060708090a0b0c0d0e0f");
    const auto shake = [](RawPeer& peer, ClientHandshake& handshake) -> std::optional<Message> {
        EXPECT_TRUE(peer.send(bytes_of(handshake.hello(), 0)));
        for (;;) {
            std::optional<Message> message = peer.receive();
            if (!message || !as_handshake(*message)) return message;
            const auto answer = handshake.receive(*as_handshake(*message));
            if (!answer || !*answer) return message;
            EXPECT_TRUE(peer.send(bytes_of(any(**answer), 0)));
        }
    };
    ASSERT_TRUE(shake(agent, own));
    ASSERT_TRUE(agent.send(bytes_of(hello_of("node03"), 0)));
    ASSERT_TRUE(server.events.saw("joined node03"));

    RawPeer thief(server.endpoint());
    ClientHandshake guess({kTestJob.job_id, "a guess"},
                          Hello{Role::Agent, "thief", "", "", own.hello().nonce},
                          "ff0102030405060708090a0b0c0d0e0f");
    const std::optional<Message> refusal = shake(thief, guess);
    ASSERT_TRUE(refusal && holds_alternative<Failure>(*refusal));
    EXPECT_EQ(get<Failure>(*refusal).what, "wrong token for this job");

    RawPeer owner(server.endpoint());
    ClientHandshake known(kTestJob, Hello{Role::Agent, "agent on node03", "", "", own.hello().nonce},
                          "ee0102030405060708090a0b0c0d0e0f");
    const std::optional<Message> welcome = shake(owner, known);
    ASSERT_TRUE(welcome && holds_alternative<Welcome>(*welcome));
    const std::optional<Message> count = owner.receive();
    ASSERT_TRUE(count && holds_alternative<Heartbeat>(*count));
    EXPECT_EQ(get<Heartbeat>(*count).received, 1U) << "the AgentHello has come";
    EXPECT_TRUE(agent.is_closed()) << "the connection before it is over";
    EXPECT_FALSE(says(server.events, "lost "));
}

TEST(Session, IsRefusedWithImpossibleCounts) {
    RunningServer server;
    RawPeer agent(server.endpoint());
    (void)agent.shake_hands(kTestJob, Role::Agent);
    ASSERT_TRUE(agent.send(bytes_of(hello_of("node03"), 0)));
    ASSERT_TRUE(agent.send(bytes_of(Heartbeat{17}, 0)));
    EXPECT_TRUE(agent.is_closed());
    agent.close();
    EXPECT_TRUE(server.events.saw("lost it has received 17 messages of 0 to 0"));
}

}  // namespace
}  // namespace ddprun::rdzv
