#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <string>

#include "rendezvous/wire/session.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kNoon{1h};

EncodedMessage message(const std::string& text) { return {text, {}}; }

/// Writes the next bytes and returns them.
std::string write_all(Outbox& outbox) {
    std::string text;
    while (!outbox.is_written()) {
        std::array<iovec, 2> parts;
        const std::size_t count = outbox.fill(parts);
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < count; ++i) {
            text.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
            bytes += parts[i].iov_len;
        }
        outbox.consume(bytes);
    }
    return text;
}

TEST(Outbox, WritesItsBytesInPiecesOfAnySize) {
    Outbox outbox;
    outbox.push({"head", Blob("blob")});
    outbox.push(message("next"));
    std::array<iovec, 1> part;
    ASSERT_EQ(outbox.fill(part), 1U);
    outbox.consume(3);
    EXPECT_EQ(outbox.unwritten_bytes(), 9U);
    outbox.consume(2);
    EXPECT_EQ(write_all(outbox), "lobnext");
    EXPECT_EQ(outbox.bytes(), 0U) << "of no session: nothing is kept";
}

TEST(Outbox, KeepsASessionsMessagesUntilTheyAreAcknowledged) {
    Outbox outbox;
    outbox.push(message("handshake"));
    outbox.keep();
    outbox.push(message("one"));
    outbox.push_heartbeat(message("beat"));
    outbox.push(message("three"));
    EXPECT_EQ(write_all(outbox), "handshakeonebeatthree");
    EXPECT_EQ(outbox.bytes(), 8U);
    EXPECT_TRUE(outbox.acknowledge(1));
    EXPECT_EQ(outbox.bytes(), 5U);
    EXPECT_TRUE(outbox.acknowledge(2));
    EXPECT_EQ(outbox.bytes(), 0U);
    outbox.push(message("four"));
    outbox.consume(3);
    EXPECT_EQ(outbox.bytes(), 4U) << "what is written of it is kept, too";
}

TEST(Outbox, RefusesAcknowledgementsOfUnwrittenMessages) {
    Outbox outbox;
    outbox.keep();
    outbox.push(message("one"));
    EXPECT_FALSE(outbox.acknowledge(1));
    (void)write_all(outbox);
    EXPECT_TRUE(outbox.acknowledge(1));
    EXPECT_FALSE(outbox.acknowledge(0)) << "and none is taken back";
}

TEST(Outbox, RepeatsWhatTheOtherSideLacksOnceItsCountHasComeByAnotherConnection) {
    Outbox lost;
    lost.keep();
    for (const char* text : {"one ", "two ", "three "}) lost.push(message(text));
    (void)write_all(lost);
    lost.push_heartbeat(message("beat "));
    lost.push(message("four "));
    lost.consume(7);  // the heartbeat, and a part of the last message
    Outbox next;
    next.push(message("welcome "));
    next.resume(std::move(lost));
    next.push(message("five "));
    next.push_heartbeat(message("count "));
    EXPECT_EQ(write_all(next), "welcome count ");
    EXPECT_EQ(next.bytes(), 24U) << "all that may have to be sent again";
    EXPECT_FALSE(next.acknowledge(4)) << "only a part of it was written";
    EXPECT_TRUE(next.acknowledge(1));
    EXPECT_EQ(write_all(next), "two three four five ");
    EXPECT_TRUE(next.acknowledge(5));
    EXPECT_EQ(next.bytes(), 0U);
}

TEST(Outbox, KeepsItsPlaceWhenAConnectionIsLostBeforeTheCountHasCome) {
    Outbox first;
    first.keep();
    first.push(message("one "));
    (void)write_all(first);
    Outbox second;
    second.resume(std::move(first));
    second.push(message("two "));
    Outbox third;
    third.resume(std::move(second));
    EXPECT_FALSE(third.acknowledge(2)) << "the second message was never written";
    EXPECT_TRUE(third.acknowledge(1));
    EXPECT_EQ(write_all(third), "two ");
}

TEST(Inbox, AcknowledgesEarlyWhenThePeerKeepsMuch) {
    Inbox inbox;
    inbox.take(100);
    EXPECT_FALSE(inbox.is_due());
    inbox.take(1U << 20);
    EXPECT_TRUE(inbox.is_due());
    EXPECT_EQ(inbox.acknowledgement(), Heartbeat{2});
    EXPECT_FALSE(inbox.is_due());
}

TEST(Outage, HasOneLimitForDeadProcessesAndOneForSilentNetworks) {
    const Heartbeats limits{3s};
    const auto wait_after = [&](Errc code, int sys) {
        return wait_for_redial(outage_of({code, "", sys}), limits);
    };
    EXPECT_EQ(wait_after(Errc::Closed, 0), 15ms);
    EXPECT_EQ(wait_after(Errc::Closed, ECONNRESET), 15ms);
    EXPECT_EQ(wait_after(Errc::Closed, ETIMEDOUT), 3s);
    EXPECT_EQ(wait_after(Errc::Closed, EHOSTUNREACH), 3s);
    EXPECT_EQ(wait_after(Errc::Protocol, 0), 0s);
    EXPECT_EQ(wait_after(Errc::Timeout, 0), 0s);
}

TEST(Heartbeats, AreSentSixTimesWithinTheLimit) {
    EXPECT_EQ(Heartbeats{}.timeout, 3s);
    EXPECT_EQ(Heartbeats{}.interval, 500ms);
    EXPECT_EQ(Heartbeats{12s}.interval, 2s);
}

TEST(SilenceWatch, ChecksAtTheEndOfTheTimeoutNotAtTheNextHeartbeat) {
    SilenceWatch watch({3s}, kNoon);
    const TimePoint heard = kNoon + 100ms;
    EXPECT_EQ(watch.look(kNoon + 500ms, heard).next, kNoon + 1000ms);
    EXPECT_EQ(watch.look(kNoon + 1000ms, heard).next, kNoon + 1500ms);
    EXPECT_EQ(watch.look(kNoon + 3000ms, heard).next, heard + 3s);
}

TEST(SilenceWatch, LosesNoPeerBeforeItHasReadPendingMessages) {
    SilenceWatch watch({3s}, kNoon);
    (void)watch.look(kNoon + 2800ms, kNoon);
    const SilenceWatch::Verdict first = watch.look(kNoon + 3s, kNoon);
    EXPECT_FALSE(first.are_lost);
    EXPECT_EQ(first.next, kNoon + 3s) << "the next batch of events";
    EXPECT_FALSE(watch.look(kNoon + 3s, kNoon + 3s).are_lost) << "it was heard in between";
}

TEST(SilenceWatch, LosesAPeerThatIsSilentAtTheSecondCheckToo) {
    SilenceWatch watch({3s}, kNoon);
    (void)watch.look(kNoon + 2800ms, kNoon);
    (void)watch.look(kNoon + 3s, kNoon);
    const SilenceWatch::Verdict second = watch.look(kNoon + 3001ms, kNoon);
    EXPECT_TRUE(second.are_lost);
    EXPECT_EQ(second.next, kNoon + 3001ms) << "the next one may be due at the same time";
}

TEST(SilenceWatch, GivesPeersTimeAfterThisProcessWasStopped) {
    SilenceWatch watch({3s}, kNoon);
    (void)watch.look(kNoon + 500ms, kNoon);
    const SilenceWatch::Verdict back = watch.look(kNoon + 1min, kNoon);
    EXPECT_FALSE(back.are_lost);
    EXPECT_EQ(back.next, kNoon + 1min + 1s);
    EXPECT_TRUE(watch.look(kNoon + 1min + 1s, kNoon).are_lost) << "but not for ever";
}

TEST(SilenceWatch, HasNoDeadlineWithoutPeers) {
    SilenceWatch watch({3s}, kNoon);
    const SilenceWatch::Verdict verdict = watch.look(kNoon + 500ms, kNever);
    EXPECT_FALSE(verdict.are_lost);
    EXPECT_EQ(verdict.next, kNoon + 1s);
}

}  // namespace
}  // namespace ddprun::rdzv
