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

    /// Adds a client that was accepted. The connection is borrowed until left().
    void admit(ClientId id, Connection& connection);
    /// Processes bytes from a client and sends the answers to all clients. A client that breaks the protocol
    /// is disconnected.
    void hear(ClientId id, std::string_view bytes);
    /// The client's connection is gone. Does nothing for one that was not admitted.
    void left(ClientId id);
    /// Clears the store and disconnects all clients.
    void end_generation();

    [[nodiscard]] std::size_t size() const { return clients_.size(); }
    /// The number of silent connections that are kept open: the clients of PyTorch before 2.1 have one each,
    /// for keys that they watch. When the server closes it, the client takes all memory in an endless loop.
    /// Survivors of a recovery may have one of the last generation too.
    [[nodiscard]] std::size_t most_silent() const;
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
