#include <fmt/core.h>

#include <random>
#include <string>
#include <string_view>

#include "rendezvous/wire/tls.h"
#include "tests/fuzz/mutation.h"

/// The first bytes of whoever connects to a job with --tls, and of whoever answers in its server's place:
/// what is changed on the way ends the session with one line of words, and nothing but what was said comes
/// out of it.
namespace {

using namespace ddprun;
using namespace ddprun::rdzv;

constexpr int kConversations = 3'000;
constexpr std::string_view kWords = "DDPR\1\1 said by the client";

std::string take_output(TlsSession& session) {
    std::string bytes(session.output());
    session.sent(bytes.size());
    return bytes;
}

/// False: the session is over.
bool hear(TlsSession& session, std::string_view bytes, std::string& heard) {
    const Result<std::string_view> said = session.receive(bytes);
    if (said) heard += *said;
    else test::check_error(said.error().what);
    return said.has_value();
}

/// From the ClientHello to the first words, the `changed` of which passes (0: none) is changed on the way.
void converse(TlsSession& client, TlsSession& server, int changed, std::mt19937& random) {
    std::string heard, answered;
    const std::vector<std::string> all{std::string("\x16\x03\x03\0\x05hello", 10), "DDPR\1\1",
                                       std::string("\x15\x03\x03\0\2\2\x28", 7)};
    bool goes_on = true, has_spoken = false;
    for (int pass = 1; goes_on && pass <= 4; ++pass) {
        const bool is_clients = pass % 2 == 1;
        TlsSession& from = is_clients ? client : server;
        if (client.is_ready() && !has_spoken) has_spoken = client.seal(kWords).has_value();
        std::string bytes = take_output(from);
        if (pass == changed) test::mutate(bytes, all, random);
        goes_on = hear(is_clients ? server : client, bytes, is_clients ? heard : answered);
    }
    if (!kWords.starts_with(heard) || !answered.empty())
        test::broken("something was heard that nobody said", heard);
    if (changed == 0 && heard != kWords) test::broken("nothing was changed, and not all was heard", heard);
    const bool both_trust = client.is_ready() && server.is_ready();
    if (both_trust && client.binding() != server.binding())
        test::broken("both sides are ready with different certificates", "");
}

}  // namespace

int main() {
    const Result<std::shared_ptr<const TlsContext>> clients = TlsContext::for_client(),
                                                    servers = TlsContext::for_server();
    if (!clients || !servers) test::broken("no TLS", (clients ? servers : clients).error().what);
    std::mt19937 random(20240229);
    for (int i = 0; i < kConversations; ++i) {
        const Result<std::unique_ptr<TlsSession>> client = TlsSession::begin(*clients),
                                                  server = TlsSession::begin(*servers);
        if (!client || !server) test::broken("no session", "");
        converse(**client, **server, i % 4, random);
    }
    fmt::print("fuzz: {} conversations, most of them changed on the way\n", kConversations);
    return 0;
}
