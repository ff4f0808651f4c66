#include "launcher/job/job_setup.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "env/hmac.h"
#include "env/text.h"
#include "env/worker_env.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/plan/binding.h"
#include "rendezvous/serve/membership.h"

namespace ddprun {
namespace {

/// Programs are compared by name, because each node may have them at another path, and per role.
rdzv::Terms terms_of(const JobSetup& setup, bool has_pmix) {
    const JobSpec& spec = setup.spec;
    const rdzv::Heartbeats heartbeat = heartbeats_of(spec.rendezvous);
    rdzv::Terms terms{fmt::format("ddprun={}", DDPRUN_VERSION),
                      fmt::format("--nnodes={}:{}", spec.nodes.min, spec.nodes.max),
                      fmt::format("--max-restarts={}{}", spec.restart.max_restarts,
                                  spec.restart.window ? "/" + format_duration(*spec.restart.window) : ""),
                      fmt::format("--recover={}", name_of(spec.recover.mode)),
                      fmt::format("--recover-within={}", format_duration(spec.recover.within)),
                      fmt::format("heartbeats=every {}", format_duration(heartbeat.interval)),
                      fmt::format("lost after={}", format_duration(heartbeat.timeout)),
                      fmt::format("--pmix={}", has_pmix ? "on" : "off"),
                      fmt::format("--tls={}", spec.rendezvous.tls ? "on" : "off"),
                      fmt::format("program of role {}={}", spec.role,
                                  std::filesystem::path(setup.program.name).filename().string())};
    if (spec.fabric) terms.push_back(fmt::format("--fabric={}", name_of(*spec.fabric)));
    return terms;
}

/// The command that nodes compare. It has a digest of the arguments, because other nodes receive it and
/// arguments can hold secrets.
std::string command_of(const ResolvedProgram& program, std::string_view token) {
    const std::vector<std::string>& all = program.arguments;
    const auto script = std::find(all.begin(), all.end(), program.name);  // behind a Python and its options
    const auto own = script != all.end() ? script + 1 : all.begin() + (all.empty() ? 0 : 1);
    const Digest digest = hmac_sha256(token, join({own, all.end()}, std::string_view("\0", 1)));
    return fmt::format("{} (digest of its arguments: {})",
                       std::filesystem::path(program.name).filename().string(), to_hex(digest).substr(0, 8));
}

}  // namespace

os::LogOptions log_options(const JobSetup& setup) {
    os::LogOptions options;
    options.level =
        os::parse_log_level(setup.log_level.empty() ? "info" : setup.log_level).value_or(os::LogLevel::Info);
    if (setup.spec.quiet) options.level = os::LogLevel::Error;
    return options;
}

rdzv::AgentHello hello_of(const JobSetup& setup, const std::string& instance, std::string_view token,
                          bool has_pmix) {
    const JobSpec& spec = setup.spec;
    rdzv::AgentHello hello;
    hello.host = host_name();
    hello.node_rank = spec.rendezvous.node_rank;
    if (spec.rendezvous.local_addr) hello.addresses = {*spec.rendezvous.local_addr};
    hello.slots = setup.workers;
    hello.pid = ::getpid();
    hello.instance = instance;
    hello.version = DDPRUN_VERSION;
    hello.terms = terms_of(setup, has_pmix);
    hello.command = command_of(setup.program, token);
    hello.role = spec.role;
    if (setup.workers > 0) hello.seats = seats_of(spec, setup.machine, setup.workers);
    if (wants_fabric(spec) || spec.nodes.max > 1) hello.fabric = name_of(setup.machine.fabric.fabric);
    return hello;
}

}  // namespace ddprun
