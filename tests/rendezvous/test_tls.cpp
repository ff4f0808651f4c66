#include <gtest/gtest.h>

#include <optional>

#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {
namespace {

const Credentials kJob{"job 7", "secret"};

std::unique_ptr<TlsSession> begin(const Result<std::shared_ptr<const TlsContext>>& context) {
    EXPECT_TRUE(context) << context.error().what;
    return *TlsSession::begin(*context);
}
std::unique_ptr<TlsSession> new_server() { return begin(TlsContext::for_server()); }
std::unique_ptr<TlsSession> new_client() { return begin(TlsContext::for_client()); }

std::string take_output(TlsSession& session) {
    std::string bytes(session.output());
    session.sent(bytes.size());
    return bytes;
}

/// Passes the output of `from` to `to` in pieces and returns what `to` received.
std::string carry(TlsSession& from, TlsSession& to, std::size_t piece = 1 << 20) {
    const std::string bytes = take_output(from);
    std::string said;
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
        const Result<std::string_view> some = to.receive(std::string_view(bytes).substr(at, piece));
        EXPECT_TRUE(some) << some.error().what;
        if (some) said += *some;
    }
    return said;
}

/// Passes bytes in both directions until neither side has more to send.
void meet(TlsSession& one, TlsSession& other, std::size_t piece = 1 << 20) {
    while (!one.output().empty() || !other.output().empty()) {
        carry(one, other, piece);
        carry(other, one, piece);
    }
}

std::string say(TlsSession& from, TlsSession& to, std::string_view words, std::size_t piece = 1 << 20) {
    EXPECT_TRUE(from.seal(words));
    return carry(from, to, piece);
}

/// Performs ddprun's handshake between two sides with these bindings; returns the server's answer to the
/// proof.
Result<HandshakeMessage> prove(ClientHandshake& client, ServerHandshake& server) {
    return server.receive(**client.receive(*server.receive(client.hello())));
}
ClientHandshake client_that_sees(const TlsSession& tls) {
    ClientHandshake handshake(kJob, Hello{Role::Worker, "rank 3", "", ""}, std::string(32, '1'));
    handshake.bind_to(tls.binding());
    return handshake;
}
ServerHandshake server_that_sees(const TlsSession& tls) {
    ServerHandshake handshake(kJob, std::string(32, '2'));
    handshake.bind_to(tls.binding());
    return handshake;
}

TEST(Tls, EncryptsMessagesInBothDirections) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ASSERT_TRUE(client->is_ready() && server->is_ready());
    EXPECT_EQ(say(*server, *client, "an answer"), "an answer");

    const std::string value(200'000, 'x');
    ASSERT_TRUE(client->seal(value));
    const std::string sealed(client->output());
    EXPECT_EQ(sealed.find("xxxx"), std::string::npos);
    EXPECT_EQ(carry(*client, *server), value);
}

TEST(Tls, WorksOneByteAtATime) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server, 1);
    ASSERT_TRUE(client->is_ready() && server->is_ready());
    EXPECT_EQ(say(*client, *server, "hello", 1), "hello");
    EXPECT_EQ(say(*server, *client, "hello yourself", 1), "hello yourself");
}

TEST(Tls, BothSidesSeeTheSameCertificateAndNoOtherServerHasIt) {
    const auto server = new_server(), client = new_client(), other = new_server(), others = new_client();
    meet(*client, *server);
    meet(*others, *other);
    EXPECT_EQ(client->binding().size(), 64U);
    EXPECT_EQ(client->binding(), server->binding());
    EXPECT_NE(client->binding(), others->binding());
}

TEST(Tls, ProofsAreValidIfBothSidesSeeTheSameCertificate) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ClientHandshake there = client_that_sees(*client);
    ServerHandshake here = server_that_sees(*server);
    const Result<HandshakeMessage> welcome = prove(there, here);
    ASSERT_TRUE(welcome) << welcome.error().what;
    EXPECT_TRUE(there.receive(*welcome));
    EXPECT_TRUE(there.authenticated());
}

/// The man in the middle ends the client's TLS with a certificate of his own, begins another session with the
/// server, and passes messages on.
TEST(Tls, TheServerRefusesAManInTheMiddle) {
    const auto server = new_server(), client = new_client(), to_client = new_server(),
               to_server = new_client();
    meet(*client, *to_client);
    meet(*to_server, *server);
    ClientHandshake there = client_that_sees(*client);
    ServerHandshake here = server_that_sees(*server);
    const Result<HandshakeMessage> welcome = prove(there, here);
    ASSERT_FALSE(welcome);
    EXPECT_EQ(welcome.error().code, Errc::Refused);
    EXPECT_NE(welcome.error().what.find("certificate"), std::string::npos) << welcome.error().what;
}

/// The server does not check here, but its proof covers another certificate than the client sees.
TEST(Tls, TheClientRefusesAManInTheMiddle) {
    const auto server = new_server(), client = new_client(), to_client = new_server(),
               to_server = new_client();
    meet(*client, *to_client);
    meet(*to_server, *server);
    ClientHandshake there = client_that_sees(*client), fooled = client_that_sees(*to_server);
    ServerHandshake here = server_that_sees(*server);
    const Result<HandshakeMessage> welcome = prove(fooled, here);
    ASSERT_TRUE(welcome);
    ASSERT_TRUE(there.receive(Challenge{std::string(32, '2')}));
    const auto end = there.receive(*welcome);
    ASSERT_FALSE(end);
    EXPECT_EQ(end.error().code, Errc::Refused);
}

TEST(Tls, AProofOfAPlainConnectionIsInvalidOverTls) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ClientHandshake plain(kJob, Hello{Role::Worker, "rank 3", "", ""}, std::string(32, '1'));
    ServerHandshake here = server_that_sees(*server);
    EXPECT_FALSE(prove(plain, here));
}

TEST(Tls, AClientThatGetsAPlainAnswerNamesTheRemedy) {
    const auto client = new_client();
    const Result<std::string_view> said = client->receive("DDPR\1\5");
    ASSERT_FALSE(said);
    EXPECT_EQ(said.error().code, Errc::Refused);
    EXPECT_NE(said.error().what.find("--tls"), std::string::npos);
}

TEST(Tls, OlderTlsIsRefused) {
    const auto server = new_server();
    // A ClientHello of TLS 1.2 (RFC 5246, 7.4.1.2) that offers one cipher suite and nothing else.
    std::string hello = {"\x03\x03", 2};
    hello += std::string(32, 'r') + std::string("\0\0\2\xc0\x2f\1\0", 7);
    const std::string message = std::string("\1\0\0", 3) + static_cast<char>(hello.size()) + hello;
    const Result<std::string_view> said =
        server->receive(std::string("\x16\x03\x01\0", 4) + static_cast<char>(message.size()) + message);
    ASSERT_FALSE(said);
    EXPECT_EQ(said.error().code, Errc::Protocol);
    EXPECT_FALSE(server->output().empty());  // the alert for the peer
}

TEST(Tls, DataBeforeTheEndInTheSameBytesIsDelivered) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ASSERT_TRUE(client->seal("the last request"));
    std::string bytes = take_output(*client);
    // Bytes that are no record of this session end it like a close_notify.
    const Result<std::string_view> said =
        server->receive(bytes + std::string("\x17\x03\x03\0\x18", 5) + std::string(24, 'x'));
    ASSERT_TRUE(said) << said.error().what;
    EXPECT_EQ(*said, "the last request");
    EXPECT_EQ(server->end().error().code, Errc::Closed);
    EXPECT_FALSE(server->receive("more"));
}

TEST(Tls, AChangedByteEndsTheSession) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ASSERT_TRUE(client->seal("set the learning rate to 1"));
    std::string sealed = take_output(*client);
    sealed.back() ^= 1;
    const Result<std::string_view> said = server->receive(sealed);
    ASSERT_FALSE(said);
    EXPECT_EQ(said.error().code, Errc::Closed);
}

TEST(Tls, AnIncompleteRecordDeliversNothing) {
    const auto server = new_server(), client = new_client();
    meet(*client, *server);
    ASSERT_TRUE(client->seal("half a record"));
    const std::string sealed = take_output(*client);
    const Result<std::string_view> half =
        server->receive(std::string_view(sealed).substr(0, sealed.size() - 1));
    ASSERT_TRUE(half);
    EXPECT_EQ(*half, "");
    EXPECT_EQ(*server->receive(std::string_view(sealed).substr(sealed.size() - 1)), "half a record");
}

}  // namespace
}  // namespace ddprun::rdzv
