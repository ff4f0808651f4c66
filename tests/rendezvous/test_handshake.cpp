#include <gtest/gtest.h>

#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {
namespace {

const Credentials kJob{"job 7", "secret"};
const std::string kClientNonce = "000102030405060708090a0b0c0d0e0f";
const std::string kServerNonce = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";

ClientHandshake client(Credentials credentials = kJob) {
    return {std::move(credentials), Hello{Role::Worker, "rank 3", "", ""}, kClientNonce};
}
ServerHandshake server(Credentials credentials = kJob, std::string nonce = kServerNonce) {
    return {std::move(credentials), std::move(nonce)};
}

TEST(Handshake, AuthenticatesBothSidesInTwoRoundTrips) {
    ClientHandshake c = client();
    ServerHandshake s = server();
    const Result<HandshakeMessage> challenge = s.receive(c.hello());
    const Result<std::optional<HandshakeMessage>> proof = c.receive(*challenge);
    EXPECT_FALSE(s.authenticated());
    const Result<HandshakeMessage> welcome = s.receive(**proof);
    EXPECT_TRUE(s.authenticated());
    EXPECT_FALSE(c.authenticated());
    EXPECT_FALSE(*c.receive(*welcome));
    EXPECT_TRUE(c.authenticated());
    EXPECT_EQ(s.peer().name, "rank 3");
}

TEST(Handshake, NeverSendsTheToken) {
    ClientHandshake c = client();
    ServerHandshake s = server();
    const HandshakeMessage challenge = *s.receive(c.hello());
    const HandshakeMessage proof = **c.receive(challenge);
    const HandshakeMessage welcome = *s.receive(proof);
    for (const HandshakeMessage& message : {HandshakeMessage(c.hello()), challenge, proof, welcome}) {
        EXPECT_EQ(encode_message(message, 0)->head.find(kJob.token), std::string::npos);
    }
}

TEST(Handshake, ServerRefusesAWrongToken) {
    ClientHandshake c = client({"job 7", "guess"});
    ServerHandshake s = server();
    const Result<HandshakeMessage> welcome = s.receive(**c.receive(*s.receive(c.hello())));
    ASSERT_FALSE(welcome);
    EXPECT_EQ(welcome.error().code, Errc::Refused);
    EXPECT_FALSE(s.authenticated());
}

TEST(Handshake, ServerRefusesAnotherJobWithoutNamingItsOwn) {
    ClientHandshake c = client({"job 8", "secret"});
    ServerHandshake s = server();
    const Result<HandshakeMessage> challenge = s.receive(c.hello());
    ASSERT_FALSE(challenge);
    EXPECT_NE(challenge.error().what.find("job 7"), std::string::npos);
    EXPECT_EQ(s.refusal().what.find("job 7"), std::string::npos);
    EXPECT_NE(s.refusal().what.find("job 8"), std::string::npos);
}

TEST(Handshake, ClientRefusesAServerThatDoesNotKnowTheToken) {
    ClientHandshake c = client();
    ASSERT_TRUE(c.receive(Challenge{kServerNonce}));
    const Result<std::optional<HandshakeMessage>> end = c.receive(Welcome{std::string(64, '0')});
    ASSERT_FALSE(end);
    EXPECT_EQ(end.error().code, Errc::Refused);
    EXPECT_FALSE(c.authenticated());
}

TEST(Handshake, ClientRefusesItsOwnProofSentBack) {
    ClientHandshake c = client();
    const HandshakeMessage proof = **c.receive(Challenge{kServerNonce});
    EXPECT_FALSE(c.receive(Welcome{std::get<Proof>(proof).mac}));
}

TEST(Handshake, ProofIsInvalidForAnotherNonce) {
    ClientHandshake c = client();
    const HandshakeMessage proof = **c.receive(Challenge{kServerNonce});
    ServerHandshake later = server(kJob, std::string(32, 'a'));
    ASSERT_TRUE(later.receive(c.hello()));
    EXPECT_FALSE(later.receive(proof));
}

TEST(Handshake, ProofIsInvalidForAnotherRoleOrName) {
    ClientHandshake c = client();
    const HandshakeMessage proof = **c.receive(Challenge{kServerNonce});
    for (const auto& [role, name] : {std::pair(Role::Agent, "rank 3"), std::pair(Role::Worker, "rank 4")}) {
        Hello forged = c.hello();
        forged.role = role;
        forged.name = name;
        ServerHandshake s = server();
        ASSERT_TRUE(s.receive(forged));
        EXPECT_FALSE(s.receive(proof)) << name;
    }
}

TEST(Handshake, RefusesNoncesThatAreNotRandomEnough) {
    for (const char* nonce : {"", "00", "zz0102030405060708090a0b0c0d0e0f"}) {
        ServerHandshake s = server();
        EXPECT_FALSE(s.receive(ClientHandshake(kJob, Hello{}, nonce).hello())) << nonce;
        ClientHandshake c = client();
        EXPECT_FALSE(c.receive(Challenge{nonce})) << nonce;
    }
}

TEST(Handshake, RefusesMessagesOutOfOrder) {
    ServerHandshake early = server();
    EXPECT_FALSE(early.receive(Proof{std::string(64, '0')}));
    EXPECT_FALSE(early.receive(client().hello())) << "after an error nothing is taken any more";
    ServerHandshake s = server();
    ASSERT_TRUE(s.receive(client().hello()));
    EXPECT_FALSE(s.receive(client().hello()));
    EXPECT_FALSE(decode_handshake(Frame{store_op::Set::kType.number, 0, "", ""}));
    ClientHandshake c = client();
    EXPECT_FALSE(c.receive(Welcome{}));
    EXPECT_FALSE(c.receive(Challenge{kServerNonce}));
}

TEST(Handshake, ClientReportsTheServersRefusal) {
    ClientHandshake c = client();
    const Result<std::optional<HandshakeMessage>> end = c.receive(Failure{Errc::Protocol, "no room"});
    EXPECT_EQ(end.error(), (Error{Errc::Refused, "no room", 0}));
}

TEST(Handshake, ClientDistinguishesABusyServerFromARefusal) {
    for (const Errc busy : {Errc::Limit, Errc::Timeout})
        EXPECT_EQ(client().receive(Failure{busy, "later"}).error().code, busy);
}

}  // namespace
}  // namespace ddprun::rdzv
