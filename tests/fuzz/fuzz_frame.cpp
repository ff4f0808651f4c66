#include "rendezvous/serve/store.h"
#include "rendezvous/wire/handshake.h"
#include "tests/fuzz/mutation.h"
#include "tests/fuzz/program.h"
#include "tests/rendezvous/any_message.h"

/// Everything a peer's bytes go through before anybody trusts them: decoder, messages, handshake, store.
namespace ddprun::test {

using namespace ddprun::rdzv;

namespace {

[[noreturn]] void broken(std::string_view claim) { test::broken(claim, ""); }

/// What was understood must survive being said again.
void check_round_trip(const Message& message) {
    const Result<std::string> bytes = encode(message, 1);
    if (!bytes) broken("a decoded message does not encode");
    FrameDecoder decoder(kPeerLimits);
    decoder.feed(*bytes);
    Result<std::optional<Frame>> frame = decoder.next();
    if (!frame || !*frame) broken("an encoded message is not a frame");
    const Result<Message> again = decode(std::move(**frame));
    if (!again || !(*again == message)) broken("a message changed on the wire");
}

/// Nobody in this world knows the token: no bytes may lead past the handshake.
void check_handshakes(const Message& message, ServerHandshake& server, ClientHandshake& client) {
    const std::optional<HandshakeMessage> said = as_handshake(message);
    if (!said) return;
    (void)server.receive(*said);
    (void)client.receive(*said);
    if (server.authenticated() || client.authenticated()) broken("authenticated without the token");
}

void check_store(const Message& message, Store& store, std::uint32_t request) {
    const auto* const asked = get_if<StoreRequest>(message);
    if (asked == nullptr) return;
    const std::size_t waiting = store.waiters();
    const TimePoint now{std::chrono::seconds(request)};
    std::size_t answers = store.apply(request % 7, request, *asked, now).size();
    if (answers + store.waiters() != waiting + 1) broken("a request was answered twice, or lost");
    if (request % 11 == 0) store.disconnect(request % 7);
    if (request % 13 == 0) (void)store.begin_generation(store.generation() + 1);
}

}  // namespace

const int kIterations = 200'000;

void take(std::string_view bytes) {
    FrameDecoder decoder(kPeerLimits);
    ServerHandshake server({"job", "unknown to all"}, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
    ClientHandshake client({"job", "unknown to all"}, Hello{}, "000102030405060708090a0b0c0d0e0f");
    Store store;
    std::uint32_t request = 0;
    // In two pieces, so that every cut is met.
    const std::size_t cut = bytes.empty() ? 0 : static_cast<unsigned char>(bytes.back()) % bytes.size();
    for (const std::string_view piece : {bytes.substr(0, cut), bytes.substr(cut)}) {
        decoder.feed(piece);
        for (;;) {
            Result<std::optional<Frame>> frame = decoder.next();
            if (!frame || !*frame) break;
            const Result<Message> message = decode(std::move(**frame));
            if (!message) {
                check_error(message.error().what);
                continue;
            }
            check_round_trip(*message);
            check_handshakes(*message, server, client);
            check_store(*message, store, ++request);
        }
    }
}

std::vector<std::string> seeds() {
    const auto asks = [](StoreOp op) { return StoreRequest{0, std::chrono::seconds(1), std::move(op)}; };
    std::vector<std::string> bytes;
    for (const Message& message : std::vector<Message>{
             Hello{Role::Worker, "rank 3", "job", "000102030405060708090a0b0c0d0e0f"},
             Challenge{"f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"},
             Proof{std::string(64, 'a')},
             Welcome{std::string(64, 'b')},
             Failure{Errc::Limit, "too much"},
             Heartbeat{},
             asks(store_op::Set{"k", Blob("value")}),
             asks(store_op::Get{"k"}),
             asks(store_op::TryGet{"k"}),
             asks(store_op::Add{"n", -5}),
             asks(store_op::CompareSet{"k", "value", Blob("other")}),
             asks(store_op::Erase{"k"}),
             asks(store_op::Wait{{"a", "b"}}),
             asks(store_op::Barrier{"b", 2}),
             StoreRequest{0, std::chrono::seconds(1), store_op::Get{"k"}, 7, std::chrono::seconds(1)},
             ClientGone{7},
             Value{Blob("v")},
             Sum{-1},
             Exchanged{true, Blob("v")},
             AgentHello{"node02", 1, 4, 99, "0.1.0", {"10.0.0.2"}, {"a=1"}, "default"},
             WorkerExited{},
             StartGeneration{1, 0, 2, 0, 8, 4, 0, 8, "node00", 29500, 0},
             StopGeneration{},
             Shutdown{},
             KillRank{1, "it hangs"},
             StopRequest{15, true},
             Question{7, "{}"},
             Answer{7, Blob("line")},
             World{1, "c0ffee", Blob("node00 4\n")},
             FenceEntered{1, "0-3, 5", Blob("part")},
             FenceOver{1, "0-3, 5", "rank 5 has ended", {}},
             ModexRequest{1, 2, 3},
             ModexReply{1, 2, true, Blob("card")},
             JobSnapshot{1, 1, {"5000000000"}, 0, 7, 3, 812},
             Successor{"node01", {"10.0.0.2"}, 40123},
             OutputPiece{1, Blob("a line\n")},
             OutputShown{7},
             StepsDone{1, 7, true, 6},
             StopProposal{1, 7, "drain"},
             WorkerScalars{1, Blob("1 2 3 loss\n")}}) {
        bytes.push_back(*encode(message, 1));
    }
    return bytes;
}

namespace {

std::string with_changed_body(const std::string& seed, const std::vector<std::string>& all,
                              std::mt19937& random) {
    FrameDecoder decoder(kPeerLimits);
    decoder.feed(seed);
    Frame frame = **decoder.next();
    mutate_some(frame.json, all, random);
    mutate_some(frame.blob, all, random);
    return encode(frame);
}

}  // namespace

/// A changed header hides what is behind it: two streams of three keep theirs true.
std::string mutated(const std::vector<std::string>& all, int iteration, std::mt19937& random) {
    std::string bytes = all[random() % all.size()];
    if (iteration % 3 != 0) return with_changed_body(bytes, all, random);
    mutate(bytes, all, random);
    return bytes;
}

}  // namespace ddprun::test
