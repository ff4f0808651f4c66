#include "launcher/job/node_parts.h"

#include "env/hmac.h"
#include "env/nodes/exchange.h"
#include "launcher/output/kept_output.h"
#include "launcher/questions/hang_watch.h"

namespace ddprun {

Status NodeParts::build_guards(bool is_head) {
    if (const Status status = os::become_subreaper(); !status) return status;
    pmix_wish = decide_pmix(setup.spec, setup.program.path);
    const bool is_lone_worker = setup.workers == 1 && setup.spec.nodes.max == 1;
    if (is_head && !is_lone_worker && !pmix_wish.warning.empty()) log.warning("{}", pmix_wish.warning);
    Result<Guards> made = Guards::set_up(setup.workers, setup.spec.use_cgroup,
                                         setup.start ? setup.start->call.secret.file : "", log);
    if (!made) return made.error();
    guards = *std::move(made);
    return {};
}

Status NodeParts::build_pmix() {
    if (!pmix_wish.wanted) return {};
    PmixServer::Parts parts{*loop, log, host, guards.id, guards.files->path(), send, [this](int local_rank) {
                                agent->worker_aborted(local_rank);
                            }};
    Result<std::unique_ptr<PmixServer>> server = serve_pmix(pmix_wish, setup.spec.pmix, std::move(parts));
    if (!server) return server.error();
    pmix = *std::move(server);
    return {};
}

Status NodeParts::build_output(bool is_apart) {
    if (setup.sends_output()) {
        OutputSender::Parts parts{
            *loop, rdzv::kOutputWindow, [this](Output::Stream stream, std::string bytes) {
                return send(
                    rdzv::OutputPiece{stream == Output::Stream::Out ? 1 : 2, rdzv::Blob(std::move(bytes))});
            }};
        Result<std::unique_ptr<OutputSender>> made = OutputSender::create(std::move(parts));
        if (!made) return made.error();
        sender = *std::move(made);
    }
    Result<OutputSpec> spec =
        is_apart ? without_files(setup.spec.output) : prepare_log_directory(setup.spec, log);
    if (!spec) return spec.error();
    output = std::make_unique<Output>(*loop, *std::move(spec),
                                      OutputRanks{.here = setup.workers,
                                                  .is_whole_job = setup.spec.nodes.max == 1,
                                                  .is_merged = setup.start || setup.started},
                                      sender ? sender->console(Output::Stream::Out) : 1,
                                      sender ? sender->console(Output::Stream::Err) : 2);
    log.write_through([this](std::string_view line) { return output->say(line); });
    return {};
}

void NodeParts::build_agent(SendToHead says) {
    AgentConfig config;
    config.spec = setup.spec;
    config.program = setup.program;
    config.machine = setup.machine;
    config.host = host;
    config.store = guards.store.inode.get();
    config.error_files = guards.files->path() + "/error-" + random_hex(8).value_or("0");
    config.token = token.token;
    config.mark = guards.mark;
    config.environment = setup.environment;
    config.open_files = setup.descriptors.before;
    if (setup.spec.pass_mpi_env) config.passed_descriptor = descriptor_of_launcher(process_environment);
    config.cgroup = guards.cgroup.get();
    config.pmix = pmix.get();
    agent = std::make_unique<Agent>(*loop, system, *output, guards.warden.get(), log, std::move(config),
                                    std::move(says));
}

Status NodeParts::build_observation(std::function<void(JobStatus&)> add_job) {
    observation = std::make_unique<Observation>(Observation::Parts{
        *loop, log, setup.spec, *agent, *output, guards.id, setup.program.name, host, std::move(add_job)});
    inquiry = std::make_unique<Inquiry>(*loop, send);
    answer_hang_looks(*inquiry, *agent, host);
    questions = std::make_unique<NodeQuestions>(
        NodeQuestions::Parts{*loop, system, setup.spec, *agent, *observation, *inquiry, host});
    return observation->open([this](const ControlRequest& request, const RequestReply& reply) {
        inquiry->ask_job(request, reply);
    });
}

Status NodeParts::build_hello(bool is_head) {
    if (setup.spec.rendezvous.tls) {
        Result<std::shared_ptr<const rdzv::TlsContext>> made = rdzv::TlsContext::for_client();
        if (!made) return made.error().with("--tls");
        tls = *std::move(made);
    }
    hello = hello_of(setup, guards.id, token.token, pmix != nullptr);
    // The head holds the port that workers get as MASTER_PORT, so rank 0 has to be on its node.
    if (!hello.node_rank && is_head) hello.node_rank = 0;
    return {};
}

}  // namespace ddprun
