#include "launcher/job.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddprun {

RemoteAgents::Parts Job::parts_of_start() {
    RemoteAgents::Parts parts{*loop_, system_, nullptr, [](int) { return std::string(); }, nullptr, nullptr};
    parts.relay = [this](UniqueFd pipe, RemoteAgents::Console console, auto seen, auto ended) {
        const Output::Stream stream = console == RemoteAgents::Console::Out ? Output::Stream::Out : Output::Stream::Err;
        return output_->relay(std::move(pipe), stream, std::move(seen), std::move(ended));
    };
    return parts;
}

/// The head's part in starting the other nodes.
Status Job::build_start() {
    RemoteAgents::Parts parts = parts_of_start();
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
    setup_.start->endpoints = endpoints_of_head(setup_.start->order.head, setup_.spec.rendezvous.listen_on, server_->bound().port);
    return start(std::move(parts));
}

Status Job::start(RemoteAgents::Parts parts) {
    Result<std::unique_ptr<RemoteAgents>> others = start_hosts(std::move(parts), *setup_.start, token_.token, setup_.spec.start.timeout);
    if (!others) return others.error();
    others_ = *std::move(others);
    return {};
}

/// As a node that the head has started: its share of the others, once it can tell the head of them.
void Job::on_connected() {
    has_joined_ = true;
    head_address_ = link_->controller();
    if (head_places_ > 1) head_ = head_address_;
    if (sender_) sender_->begin();
    if (controller_ || !setup_.start || others_) return;
    RemoteAgents::Parts parts = parts_of_start();
    parts.tell_head = [this](int node, const std::string& why) {
        link_->send(rdzv::Notice{"not-started", fmt::format("{} {} (started from {})", node, why, host_)});
    };
    if (const Status started = start(std::move(parts)); !started) log_.error("{}", started.error().what);
}

/// Of a node that was to start others.
void Job::not_started(std::string_view node_and_why) {
    const std::size_t space = node_and_why.find(' ');
    const Result<std::int64_t> node = parse_int(node_and_why.substr(0, space));
    if (others_ && node && space != node_and_why.npos) others_->fail(static_cast<int>(*node), printable(node_and_why.substr(space + 1)));
}

}  // namespace ddprun
