#pragma once

#include <memory>
#include <string>

#include "env/result.h"
#include "launcher/job/heir.h"
#include "launcher/job/node_parts.h"
#include "rendezvous/serve/server.h"

namespace ddprun {

/// The server of a process that is not the head yet: of the first head until it is built, of the standby
/// while another process is the head. A head takes the server over. Use it on the event loop's thread.
class Standby final : public rdzv::ServerHandler {
  public:
    /// Listens where `options` say; fills in the other options from the node. `heir`, borrowed, is told which
    /// agents join and are lost; null for the first head, which is built before the loop runs. Error: as
    /// choose_torch_store and rdzv::Server::create, or from --tls.
    static Result<std::unique_ptr<Standby>> listen(NodeParts& node, Heir* heir, rdzv::ServerOptions options);
    /// Listens for the first head, also for this host's workers. Tries for a while if several processes of
    /// this host may be the head. Error: as listen(), or from --master-port; System with EADDRINUSE when
    /// another process is the head.
    static Result<std::unique_ptr<Standby>> listen_first(NodeParts& node, const HeadChoice& choice);

    std::unique_ptr<rdzv::Server> server;  ///< null: this process has become the head
    bool serves_torch = false;             ///< PyTorch's workers get their store from `server`

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
