#include "rendezvous/serve/torch_clients.h"

#include <algorithm>

namespace ddprun::rdzv {

void TorchClients::admit(ClientId id, Connection& connection) {
    connection.limit_output(limits_.output_bytes);
    clients_.emplace(id, Client{connection, TorchParser(limits_)});
}

void TorchClients::hear(ClientId id, std::string_view bytes) {
    auto& [connection, parser] = clients_.at(id);
    parser.feed(bytes);
    while (connection.is_open()) {
        Result<std::optional<TorchRequest>> request = parser.next();
        if (!request) return connection.fail(request.error());
        if (!*request) return;
        TorchStore::Outcome outcome = store_.apply(id, **std::move(request));
        for (TorchStore::Answer& answer : outcome.answers) {
            const auto to = clients_.find(answer.client);
            if (to != clients_.end()) to->second.connection.send(EncodedMessage{std::move(answer.bytes), {}});
        }
        if (outcome.refused) connection.fail(*outcome.refused);
    }
}

void TorchClients::left(ClientId id) {
    if (clients_.erase(id) > 0) store_.disconnect(id);
}

std::size_t TorchClients::most_silent() const {
    const auto is_old = [](const auto& client) { return client.second.parser.is_ungreeted(); };
    return 2 * static_cast<std::size_t>(std::ranges::count_if(clients_, is_old));
}

void TorchClients::end_generation() {
    store_.clear();
    for (const auto& [id, client] : clients_)
        client.connection.fail({Errc::StaleGeneration, "its generation is over", 0});
}

}  // namespace ddprun::rdzv
