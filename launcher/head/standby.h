#pragma once

#include <memory>
#include <string>

#include "env/result.h"
#include "launcher/head/control/heir.h"
#include "launcher/head/node_parts.h"
#include "rendezvous/serve/server.h"

namespace ddprun {

/// A process that listens and is not the head: the first head until it is built, and the standby while
/// another process is the head. A head takes its server from it. On the event loop's thread.
class Standby final : public rdzv::ServerHandler {
  public:
    /// Listens where `options` say; the rest of them follows from the node. `heir`, borrowed, hears who comes
    /// and goes; null for the first head, which is built before the loop runs. Error: as choose_torch_store
    /// and rdzv::Server::create; of --tls.
    static Result<std::unique_ptr<Standby>> listen(NodeParts& node, Heir* heir, rdzv::ServerOptions options);
    /// The same for the first head, also for this host's workers. Where several processes of this host may be
    /// the head, tries for a while. Error: System with EADDRINUSE, where another process is it, and of
    /// --master-port.
    static Result<std::unique_ptr<Standby>> listen_first(NodeParts& node, const HeadChoice& choice);

    std::unique_ptr<rdzv::Server> server;  ///< null: this process is the head by now
    bool serves_torch = false;             ///< PyTorch's workers get their store from it

  private:
    Standby(NodeParts& node, Heir* heir) : node_(node), heir_(heir) {}
    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override;
    void on_agent_message(rdzv::AgentId, const rdzv::FromAgent&) override {}
    void on_agent_lost(rdzv::AgentId agent, const Error& why) override;
    void on_log(const std::string& line) override { node_.connections->warn(line); }
    void on_detail(const std::string& line) override { node_.log.debug("{}", line); }

    NodeParts& node_;
    Heir* heir_;
};

}  // namespace ddprun
