#include "launcher/job.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddprun {

/// The head's part in starting the other nodes.
Status Job::build_start() {
    RemoteAgents::Parts parts{*loop_, system_, nullptr, nullptr, nullptr};
    parts.relay = [this](UniqueFd pipe, RemoteAgents::Console console, auto seen, auto ended) {
        const Output::Stream stream = console == RemoteAgents::Console::Out ? Output::Stream::Out : Output::Stream::Err;
        return output_->relay(std::move(pipe), stream, std::move(seen), std::move(ended));
    };
    parts.failure_of = [this](int node) {
        const rdzv::StoreReply reply = server_->ask_store(rdzv::store_op::TryGet{failure_key(node)});
        const auto* value = std::get_if<rdzv::Value>(&reply);
        return value != nullptr ? printable(value->value.view()) : std::string();
    };
    parts.on_failure = [this](const std::vector<StartFailure>& failures) {
        if (controller_->finished()) return;
        for (const StartFailure& one : failures) job_log_->error("{} cannot take part: {}", one.host, one.why);
        controller_->start_failed(render_start_failures(failures, setup_.start->hosts.size()));
    };
    Result<std::string> order = seal_order(setup_.start->order, token_.token);
    if (!order) return order.error();
    (void)server_->ask_store(rdzv::store_op::Set{std::string(kOrderKey), rdzv::Blob(*std::move(order))});
    setup_.start->endpoints =
        endpoints_of_head(setup_.start->order.head, setup_.spec.rendezvous.listen_on, server_->bound().port);
    Result<std::unique_ptr<RemoteAgents>> others = start_hosts(std::move(parts), *setup_.start, token_.token, setup_.spec.start.timeout);
    if (!others) return others.error();
    others_ = *std::move(others);
    return {};
}

}  // namespace ddprun
