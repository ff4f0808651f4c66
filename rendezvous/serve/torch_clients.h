#pragma once

#include <map>
#include <string_view>

#include "rendezvous/serve/store.h"
#include "rendezvous/serve/torch_store.h"
#include "rendezvous/wire/connection.h"

namespace ddprun::rdzv {

/// The server's clients that speak PyTorch's TCPStore protocol, and their store. On the loop's thread; never
/// blocks.
class TorchClients {
  public:
    explicit TorchClients(TorchLimits limits) : limits_(limits), store_(limits) {}

    /// One was let in. The connection is borrowed until it left().
    void admit(ClientId id, Connection& connection);
    /// It said this; answers whoever has waited for it. One that breaks the rules is cut off.
    void hear(ClientId id, std::string_view bytes);
    /// Its connection is gone. One that was not admitted: nothing.
    void left(ClientId id);
    /// What a world has written is not for the next one, nor are its clients.
    void end_generation();

    [[nodiscard]] std::size_t size() const { return clients_.size(); }
    [[nodiscard]] const TorchStore& store() const { return store_; }

  private:
    struct Client {
        Connection& connection;
        TorchParser parser;
    };

    TorchLimits limits_;
    TorchStore store_;
    std::map<ClientId, Client> clients_;
};

}  // namespace ddprun::rdzv
