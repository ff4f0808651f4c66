#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "rendezvous/serve/store.h"
#include "rendezvous/wire/handshake.h"
#include "tests/rendezvous/any_message.h"

namespace ddprun::rdzv {
namespace {

/// The bytes as `hexdump -C` prints them.
std::string hex_dump(std::string_view bytes) {
    std::string out;
    for (std::size_t row = 0; row < bytes.size(); row += 16) {
        std::string hex;
        std::string text;
        for (std::size_t i = row; i < std::min(row + 16, bytes.size()); ++i) {
            const auto byte = static_cast<unsigned char>(bytes[i]);
            hex += fmt::format("{}{:02x}", i == row + 8 ? "  " : " ", byte);
            text += byte >= 0x20 && byte < 0x7f ? static_cast<char>(byte) : '.';
        }
        out += fmt::format("{:04x} {:<49}  |{}|\n", row, hex, text);
    }
    return out;
}

/// The exchange of a client that connects, sets a key and reads it, with fixed nonces.
std::string exchange() {
    const Credentials credentials{"job-7", "0123456789abcdef0123456789abcdef"};
    ClientHandshake client(credentials, Hello{Role::Worker, "rank 3", "", ""},
                           "000102030405060708090a0b0c0d0e0f");
    ServerHandshake server(credentials, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
    Store store;
    store.begin_generation(1);
    std::string out;
    const auto say = [&](const char* who, const Message& message, std::uint32_t request) {
        out += fmt::format("{} {}\n{}\n", who, message_name(message), hex_dump(*encode(message, request)));
    };
    say("client:", client.hello(), 0);
    const HandshakeMessage challenge = *server.receive(client.hello());
    say("server:", any(challenge), 0);
    const HandshakeMessage proof = **client.receive(challenge);
    say("client:", any(proof), 0);
    say("server:", any(*server.receive(proof)), 0);
    const auto ask = [&](std::uint32_t request, StoreRequest asked) {
        say("client:", asked, request);
        say("server:", any(store.apply(1, request, asked, TimePoint{}).at(0).reply), request);
    };
    ask(1, {1, std::nullopt, store_op::Set{"nccl/1/world/0", Blob("id")}});
    ask(2, {1, std::chrono::seconds(30), store_op::Get{"nccl/1/world/0"}});
    return out;
}

TEST(Protocol, IsDocumentedByteByByte) {
    std::ifstream file(PROTOCOL_MD);
    const std::string page{std::istreambuf_iterator<char>(file), {}};
    const std::string dump = exchange();
    EXPECT_NE(page.find(dump), std::string::npos) << "rendezvous/PROTOCOL.md shows another exchange than:\n"
                                                  << dump;
}

}  // namespace
}  // namespace ddprun::rdzv
