#include "launcher/job.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"

namespace ddprun {
namespace {

/// "2 of 3 hosts cannot take part: node01, node02".
std::string render_start_failures(std::vector<std::string> failed, std::size_t hosts) {
    constexpr std::size_t kNamed = 8;
    const std::size_t count = failed.size();
    const std::string more = count > kNamed ? fmt::format(" and {} more", count - kNamed) : "";
    failed.resize(std::min(count, kNamed));
    return fmt::format("{} of {} hosts cannot take part: {}{}", count, hosts, join(failed, ", "), more);
}

}  // namespace

/// The head's part in starting the other nodes.
Status Job::build_start() {
    RemoteAgents::Parts parts{*loop_, system_, nullptr, nullptr, nullptr};
    parts.relay = [this](UniqueFd pipe, Output::Stream stream, auto seen, auto ended) {
        return output_->relay(std::move(pipe), stream, std::move(seen), std::move(ended));
    };
    parts.failure_of = [this](int node) {
        const rdzv::StoreReply reply = server_->ask_store(rdzv::store_op::TryGet{failure_key(node)});
        const auto* value = std::get_if<rdzv::Value>(&reply);
        return value != nullptr ? printable(value->value.view()) : std::string();
    };
    parts.on_failure = [this](const std::vector<StartFailure>& failures) {
        if (controller_->finished()) return;
        std::vector<std::string> names;
        for (const StartFailure& one : failures) {
            names.push_back(setup_.start->hosts[static_cast<std::size_t>(one.node)].name);
            job_log_->error("{} cannot take part: {}", names.back(), one.why);
        }
        controller_->start_failed(render_start_failures(std::move(names), setup_.start->hosts.size()));
    };
    Result<std::string> order = seal_order(setup_.start->order, token_.token);
    if (!order) return order.error();
    (void)server_->ask_store(rdzv::store_op::Set{std::string(kOrderKey), rdzv::Blob(*std::move(order))});
    setup_.start->endpoints =
        endpoints_of_head(setup_.start->order.head, setup_.spec.rendezvous.listen_on, server_->bound().port);
    Result<std::unique_ptr<RemoteAgents>> others =
        start_hosts(std::move(parts), *setup_.start, token_.token, setup_.spec.start.timeout);
    if (!others) return others.error();
    others_ = *std::move(others);
    return {};
}

}  // namespace ddprun
