#include "launcher/job.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/nodes/exchange.h"
#include "env/text.h"
#include "launcher/start/start_facts.h"

namespace ddprun {
namespace {

/// By node rank, for the names of those who are missing: whom we start, or the allocation where our own rank
/// goes by it.
std::vector<std::string> hosts_by_rank(const JobSetup& setup, const std::string& own_name) {
    std::vector<AllocatedHost> hosts;
    if (setup.start) {
        hosts = setup.start->hosts;
    } else if (setup.spec.nodes.max == 1) {
        return {};
    } else if (const Result<StartFacts> facts = look_for_hosts(setup.spec.start);
               facts && facts->allocation) {
        hosts = facts->allocation->hosts;
        const auto rank = static_cast<std::size_t>(setup.spec.rendezvous.node_rank.value_or(0));
        if (rank >= hosts.size() || !is_same_host(hosts[rank].name, own_name)) hosts.clear();
    }
    std::vector<std::string> names;
    for (const AllocatedHost& host : hosts) names.push_back(host.name);
    return names;
}

}  // namespace

/// Two that begin to listen at the same moment are both refused by the kernel, and nobody listens: whoever
/// finds nobody there tries again, after a while of its own.
Status Job::contend_for_head(const HeadChoice& choice) {
    constexpr int kTries = 20;
    for (int attempt = 1;; ++attempt) {
        const Status head = build_head(choice);
        if (head || !choice.contested || head.error().sys != EADDRINUSE || attempt == kTries) return head;
        if (connect_tcp(*shared_endpoint(setup_.spec), MonotonicClock::now() + std::chrono::seconds(1)))
            return head;
        std::this_thread::sleep_for(std::chrono::milliseconds(1 + (::getpid() + attempt) % 16));
    }
}

Status Job::build_head(const HeadChoice& choice) {
    const JobSpec& spec = setup_.spec;
    if (const Status chosen = choose_store(); !chosen) return chosen;
    if (spec.rendezvous.master_port && !listens_at_master_port()) {
        if (const Status free = MasterPort::check(*spec.rendezvous.master_port); !free) return free;
    }
    rdzv::ServerOptions options = server_options();
    options.where = choice.endpoint;
    if (serves_torch_ && spec.nodes.max == 1)
        options.where.port = static_cast<std::uint16_t>(spec.rendezvous.master_port.value_or(0));
    if (setup_.meeting) options.listener = std::move(setup_.meeting->listener);
    options.local_listener = UniqueFd(
        ::fcntl(store_way_.fd.get(), F_DUPFD_CLOEXEC, 0));  // another node may turn out to be the head
    if (const Status listens = listen(std::move(options)); !listens) return listens;
    build_controller();
    if (spec.nodes.max > 1) {
        job_log_->info("controller on port {}{} ({}), waiting for {} node{}", server_->bound().port,
                       spec.rendezvous.tls ? " with TLS" : "", choice.why, spec.nodes.min,
                       spec.nodes.min == 1 ? "" : "s");
    }
    return {};
}

rdzv::ServerOptions Job::server_options() const {
    rdzv::ServerOptions options;
    options.credentials = {setup_.spec.rendezvous.run_id, token_.token};
    options.serves_torch = serves_torch_;
    options.heartbeats = heartbeats_of(setup_.spec.rendezvous);
    return options;
}

Status Job::listen(rdzv::ServerOptions options) {
    if (setup_.spec.rendezvous.tls) {
        Result<std::shared_ptr<const rdzv::TlsContext>> tls = rdzv::TlsContext::for_server();
        if (!tls) return tls.error().with("--tls");
        options.tls = *std::move(tls);
    }
    Result<std::unique_ptr<rdzv::Server>> server = rdzv::Server::create(*loop_, std::move(options), *this);
    if (!server) return server.error();
    server_ = std::move(*server);
    return {};
}

/// Whether PyTorch's workers get their store from us.
Status Job::choose_store() {
    const Result<TorchStoreChoice> store = choose_torch_store(setup_.spec, is_run_by_python(setup_.program));
    if (!store) return store.error();
    const bool is_news = !store->is_served && setup_.spec.rendezvous.tls && is_run_by_python(setup_.program);
    if (is_news) log_.info("PyTorch's rank 0 hosts the store of its workers: {}", store->why);
    else
        log_.debug("the store of PyTorch's workers is {}: {}", store->is_served ? "ours" : "theirs",
                   store->why);
    serves_torch_ = store->is_served;
    return {};
}

void Job::build_controller() {
    const JobSpec& spec = setup_.spec;
    job_log_ = log_.with_component("job");
    ControllerConfig config;
    config.spec = spec;
    config.program = setup_.program.name;
    config.command = command_of(setup_.program, token_.token);
    config.can_be_succeeded = spec.nodes.max > 1 && !setup_.start && !spec.outer_rank;
    config.nobody_can_come = setup_.start.has_value();
    config.random = static_cast<double>(::getpid() % 1000) / 1000;
    config.own_host = host_;
    if (!has_succeeded_)
        config.hosts = hosts_by_rank(setup_, host_);  // asks the name server, which a running loop must not
    if (!spec.rendezvous.head_is_apart) config.own_instance = hello_.instance.empty() ? id_ : hello_.instance;
    config.terms = terms_of(setup_, pmix_ != nullptr);
    if (!spec.rendezvous.head_is_apart || spec.fabric)
        config.fabric = describe_fabric(setup_.machine.fabric, process_environment);
    config.in_batch_job = find_batch_job(process_environment).has_value();
    config.master = [this](const rdzv::AgentHello& first) -> Result<MasterAddress> {
        const bool is_here = first.instance == id_ && !has_succeeded_;
        MasterChoice master = choose_master(setup_.spec, serves_torch_, server_->bound().port,
                                            setup_.meeting.has_value(), is_here, first.addresses);
        if (serves_torch_ && has_succeeded_) master.host = hello_.addresses.front();
        if (master.port != 0) return MasterAddress{master.host, master.port, serves_torch_};
        const Result<int> port = master_port_.reserve();
        if (!port) return port.error();
        return MasterAddress{master.host, *port};
    };
    controller_ = std::make_unique<Controller>(
        *loop_, *job_log_, std::move(config),
        [this](rdzv::AgentId agent, const rdzv::ToAgent& message) {
            if (const auto* start = std::get_if<rdzv::StartGeneration>(&message);
                start && !link_ && start->group_rank == 0)
                observe(*start);
            server_->send(agent, message);
        },
        [this] { controller_done(); });
    controller_->on_generation([this](std::uint64_t generation) {
        server_->begin_generation(generation);
        if (!pmix_) return;
        std::vector<PmixExchange::Node> nodes;
        for (WorldNode& node : controller_->world())
            nodes.push_back({node.agent, std::move(node.host), node.first_rank, node.workers});
        pass_on(exchange_.begin(id_, generation, std::move(nodes)));
    });
}

void Job::begin_control() {
    walltime_ = std::make_unique<WalltimeWatch>(*loop_, system_, log_);
    walltime_->begin(
        setup_.spec.walltime_notice, [this](TimePoint end) { walltime_is_known(end); },
        [this](const std::string& why) { walltime_is_unknown(why); });
    controller_->begin();
}

void Job::walltime_is_unknown(const std::string& why) {
    const Duration notice = setup_.spec.walltime_notice;
    if (notice == Duration::zero()) return log_.debug("the walltime is not known: {}", why);
    log_.warning("--walltime-notice={}: no notice will be given: {}", format_duration(notice), why);
}

void Job::walltime_is_known(TimePoint end) {
    const Duration notice = setup_.spec.walltime_notice;
    const TimePoint time_up = end == kNever ? kNever : end - notice;
    controller_->walltime_known(time_up);
    loop_->cancel(notice_timer_);
    if (notice == Duration::zero() || time_up == kNever) return;
    notice_timer_ = loop_->call_at(time_up, [this, end] {
        if (controller_->finished()) return;
        const auto left =
            std::chrono::round<std::chrono::seconds>(std::max(Duration::zero(), end - MonotonicClock::now()));
        controller_->preempt(SIGTERM, fmt::format("walltime in {}", format_duration(left)), left);
    });
}

// ---- what peers say

void Job::on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    if (!controller_) {
        early_.emplace(agent, hello);
        return heir_->arrived(agent, hello);
    }
    if (moved_)
        return static_cast<void>(
            server_->send(agent, rdzv::Successor{moved_->host, moved_->addresses, moved_->port}));
    const Status joined = controller_->agent_joined(agent, hello);
    if (!joined) {
        const bool is_news = !controller_->finished();
        for (const std::string_view line : split(joined.error().what, '\n')) {
            if (is_news) job_log_->warning("{}", line);
        }
        return server_->refuse_agent(agent, joined.error());
    }
    if (others_ && hello.node_rank) others_->joined(*hello.node_rank);
    if (setup_.start && setup_.start->order.sends_output && hello.instance != id_) senders_.insert(agent);
}

void Job::on_agent_lost(rdzv::AgentId agent, const Error& why) {
    if (!controller_) {
        early_.erase(agent);
        return heir_->gone(agent);
    }
    inquiry_->agent_lost(agent);
    pass_on(exchange_.node_lost(agent));
    // No process over there has closed the connection: what started it hears as little.
    const bool is_silent = why.code == Errc::Timeout || why.sys == ETIMEDOUT || why.sys == EHOSTUNREACH;
    if (const std::optional<int> node = controller_->node_rank_of(agent); others_ && is_silent && node)
        others_->fell_silent(*node);
    controller_->agent_lost(agent, why);
    output_->end_sent(agent);
    if (senders_.erase(agent) > 0 && senders_.empty() && waits_for_senders_) loop_->stop();
}

void Job::on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) {
    if (controller_) std::visit([&](const auto& one) { hear(agent, one); }, message);
}

void Job::hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited) {
    observation_->node_says(exited, controller_->host_of(agent));
    pass_on(exchange_.rank_ended(exited.generation, exited.rank));
    controller_->agent_message(agent, exited);
}

void Job::hear(rdzv::AgentId agent, const rdzv::GenerationEnded& ended) {
    observation_->node_says(ended, controller_->host_of(agent));
    controller_->agent_message(agent, ended);
}

void Job::pass_on(const PmixExchange::Messages& messages) {
    for (const PmixExchange::Outgoing& one : messages) server_->send(one.agent, one.message);
}

void Job::on_log(const std::string& line) {
    say_of_connections(connection_lines_.take(line, loop_->now()));
    if (sum_is_due_ || connection_lines_.due() == kNever) return;
    sum_is_due_ = true;
    loop_->call_at(connection_lines_.due(), [this] {
        sum_is_due_ = false;
        say_of_connections(connection_lines_.sum_up(loop_->now()));
    });
}

void Job::say_of_connections(const std::optional<std::string>& line) {
    if (line) log_.warning("{}", *line);
}

}  // namespace ddprun
