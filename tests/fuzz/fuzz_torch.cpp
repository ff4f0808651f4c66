#include "rendezvous/serve/torch_store.h"
#include "tests/fuzz/mutation.h"
#include "tests/fuzz/program.h"

/// What a stranger from a node of the job can send as a client of PyTorch's TCPStore: parser and store.
namespace ddprun::test {

using namespace ddprun::rdzv;

namespace {

/// Limits that a short text can meet.
constexpr TorchLimits kSmall{64, 256, 16, 512, 1024, 32, 4096, 8192, 8};

std::vector<TorchRequest> read(std::string_view bytes, std::size_t cut) {
    TorchParser parser(kSmall);
    std::vector<TorchRequest> requests;
    for (const std::string_view piece : {bytes.substr(0, cut), bytes.substr(cut)}) {
        parser.feed(piece);
        for (;;) {
            Result<std::optional<TorchRequest>> request = parser.next();
            if (!request) {
                check_error(request.error().what);
                return requests;
            }
            if (!*request) break;
            requests.push_back(**std::move(request));
        }
    }
    return requests;
}

}  // namespace

const int kIterations = 200'000;

void take(std::string_view bytes) {
    const std::vector<TorchRequest> requests = read(bytes, 0);
    const std::size_t cut = bytes.empty() ? 0 : static_cast<unsigned char>(bytes.back()) % bytes.size();
    if (read(bytes, cut) != requests) broken("a stream means something else in two pieces", bytes);
    TorchStore store(kSmall);
    std::string again = encode_torch_greeting();
    std::uint64_t turn = 0;
    for (const TorchRequest& request : requests) {
        again += encode_torch(request);
        const TorchStore::Outcome outcome = store.apply(++turn % 5, request);
        if (outcome.refused) check_error(outcome.refused->what);
        for (const TorchStore::Answer& answer : outcome.answers) {
            if (answer.bytes.empty()) broken("an answer without bytes", bytes);
        }
        if (store.keys() > kSmall.keys || store.bytes() > kSmall.total_bytes || store.waiters() > 5)
            broken("beyond its limits", bytes);
        if (turn % 7 == 0) store.disconnect(turn % 5);
    }
    if (read(again, 0) != requests) broken("a request changed on the wire", bytes);
    for (std::uint64_t client = 0; client < 5; ++client) store.disconnect(client);
    if (store.waiters() != 0) broken("somebody who is gone waits", bytes);
}

std::vector<std::string> seeds() {
    const std::vector<TorchRequest> all = {{TorchOp::Set, {"/k"}, {"v"}, 0},
                                           {TorchOp::CompareSet, {"/k"}, {"v", "w"}, 0},
                                           {TorchOp::Get, {"/k"}, {}, 0},
                                           {TorchOp::Add, {"init/"}, {}, 1},
                                           {TorchOp::Check, {"/k", "q"}, {}, 0},
                                           {TorchOp::Wait, {"/k", "late"}, {}, 0},
                                           {TorchOp::CountKeys, {}, {}, 0},
                                           {TorchOp::DeleteKey, {"/k"}, {}, 0},
                                           {TorchOp::Append, {"/k"}, {"more"}, 0},
                                           {TorchOp::MultiGet, {"/k", "a"}, {}, 0},
                                           {TorchOp::MultiSet, {"late", "a"}, {"1", "2"}, 0},
                                           {TorchOp::CancelWait, {}, {}, 0},
                                           {TorchOp::Ping, {}, {}, 7},
                                           {TorchOp::QueuePush, {"q"}, {"job"}, 0},
                                           {TorchOp::QueuePop, {"q"}, {}, 0},
                                           {TorchOp::QueueLength, {"q"}, {}, 0},
                                           {TorchOp::ListKeys, {}, {}, 0},
                                           {TorchOp::Barrier, {"b"}, {}, 2}};
    std::vector<std::string> streams;
    std::string whole = encode_torch_greeting();
    for (const TorchRequest& request : all) {
        streams.push_back(encode_torch_greeting() + encode_torch(request) + encode_torch(request));
        whole += encode_torch(request);
    }
    streams.push_back(whole);
    streams.push_back(whole + whole.substr(5));
    return streams;
}

std::string mutated(const std::vector<std::string>& all, int iteration, std::mt19937& random) {
    std::string bytes = all[random() % all.size()];
    if (iteration % 2 != 0) bytes += all[random() % all.size()].substr(5);
    // Most keep their greeting: without it nothing is looked at.
    std::string rest = bytes.substr(5);
    mutate_some(iteration % 8 == 0 ? bytes : rest, all, random);
    return iteration % 8 == 0 ? bytes : bytes.substr(0, 5) + rest;
}

}  // namespace ddprun::test
