#include "launcher/start/starter_command.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "env/text.h"

namespace ddprun {
namespace {

using Words = std::vector<std::string>;

void append(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }

std::string format_way(const SecretWay& way) {
    switch (way.kind) {
        case SecretWay::Stdin: return "stdin";
        case SecretWay::Cookie: return "cookie:" + way.salt;
        case SecretWay::File: break;
    }
    return "file:" + way.file;
}

Result<SecretWay> parse_way(std::string_view text) {
    if (text == "stdin") return SecretWay{};
    if (text.starts_with("cookie:")) return SecretWay{SecretWay::Cookie, "", std::string(text.substr(7))};
    if (text.starts_with("file:/")) return SecretWay{SecretWay::File, std::string(text.substr(5)), ""};
    return Error{
        Errc::InvalidArgument,
        fmt::format("--secret: '{}' is not known (expected stdin, cookie:SALT or file:/PATH)", excerpt(text)),
        0};
}

/// The command line for the remote shell, with exec, so that sshd waits for the agent itself.
std::string for_shell(const Words& words) {
    std::string line = "exec";
    for (const std::string& word : words) line += " " + shell_quoted(word);
    return line;
}

Words by_ssh(const std::string& host, Words agent, const std::string& job_id, const std::string& pbs_attach) {
    if (!pbs_attach.empty()) {
        Words attached{pbs_attach, "-j", job_id};
        append(attached, agent);
        agent = std::move(attached);
    }
    // Use no terminal, no questions, and no shared connection, so that the end of input reaches the other
    // side.
    return {"ssh",
            "-x",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            "ControlMaster=no",
            "-o",
            "ControlPath=none",
            "-o",
            "ServerAliveInterval=15",
            "--",
            host,
            for_shell(agent)};
}

std::string names_of(const std::vector<AllocatedHost>& hosts, NodeRange nodes) {
    Words names;
    for (int node = nodes.first; node <= nodes.last; ++node)
        names.push_back(hosts[static_cast<std::size_t>(node)].name);
    return join(names, ",");
}

std::vector<int> each_of(NodeRange nodes) {
    std::vector<int> all(static_cast<std::size_t>(nodes.size()));
    std::iota(all.begin(), all.end(), nodes.first);
    return all;
}

StarterCommand for_all_at_once(Words words, NodeRange nodes, const AgentCall& call) {
    words.push_back(call.program);
    append(words, agent_words(call));
    return {std::move(words), each_of(nodes)};
}

}  // namespace

std::vector<std::string> agent_words(const AgentCall& call) {
    Words words{"agent",  "--at",     join(call.endpoints, ","), "--job",
                call.job, "--secret", format_way(call.secret)};
    if (call.node >= 0) append(words, {"--node", fmt::format("{}", call.node)});
    if (call.tls) append(words, {"--tls", "on"});
    return words;
}

Result<AgentCall> parse_agent_words(const std::vector<std::string>& words) {
    AgentCall call;
    for (std::size_t i = 0; i < words.size(); i += 2) {
        const std::string& name = words[i];
        if (i + 1 == words.size()) return Error{Errc::InvalidArgument, excerpt(name) + ": needs a value", 0};
        const std::string& value = words[i + 1];
        if (name == "--at") {
            for (const std::string_view one : split(value, ',')) call.endpoints.emplace_back(one);
        } else if (name == "--job") {
            call.job = value;
        } else if (name == "--secret") {
            Result<SecretWay> way = parse_way(value);
            if (!way) return way.error();
            call.secret = *std::move(way);
        } else if (name == "--node") {
            const Result<std::int64_t> node = parse_int_between(value, 0, 1 << 20);
            if (!node) return node.error().with(name);
            call.node = static_cast<int>(*node);
        } else if (name == "--tls" && value == "on") {
            call.tls = true;
        } else {
            return Error{Errc::InvalidArgument, fmt::format("'{}' is not known", excerpt(name)), 0};
        }
    }
    if (call.endpoints.empty() || call.job.empty())
        return Error{Errc::InvalidArgument,
                     "--at and --job are needed (ddprun starts this by itself on other hosts; see --hosts)",
                     0};
    return call;
}

std::string why_ended(const StarterCommand& starter, std::string_view said, std::optional<int> exit_code) {
    const std::string name = starter.words.front().substr(starter.words.front().rfind('/') + 1);
    const std::string ended =
        name + (exit_code ? fmt::format(" ended with exit code {}", *exit_code) : " ended");
    const std::string words = said.empty() ? ended + " and said nothing" : std::string(said);
    // 255 is ssh's own code, those above 128 are signals', and a ddprun that ran there has said why it ended.
    const bool is_of_shell =
        name == "ssh" && exit_code && *exit_code < 128 && said.find("ddprun: ") == said.npos;
    if (is_of_shell)
        return fmt::format("{}: does a login file of that host end the shell?",
                           said.empty() ? words : words + "; " + ended);
    if (name == "mpiexec" && said.find("ppn") != said.npos)
        return words + " (an mpiexec of PALS or Hydra is needed; --start names others)";
    const bool may_lack_it =
        (name == "pbsdsh" && said.ends_with("exit status 254")) || (name == "pbs_tmrsh" && said.empty());
    const auto agent = std::find(starter.words.begin(), starter.words.end(), "agent");
    if (!may_lack_it || agent == starter.words.begin() || agent == starter.words.end()) return words;
    return words + fmt::format(" (can {} be run there?)", *std::prev(agent));
}

SecretWay::Kind secret_way(Starter starter, bool has_cookie) {
    switch (starter) {
        case Starter::Ssh:
        case Starter::Srun: return SecretWay::Stdin;
        case Starter::Pbsdsh:
        case Starter::Tm: return has_cookie ? SecretWay::Cookie : SecretWay::File;
        case Starter::Mpiexec:
        case Starter::Blaunch:
        case Starter::Auto:
        case Starter::None: break;
    }
    return SecretWay::File;
}

bool carries(Starter starter, std::string_view variable) {
    if (variable == "PATH") return false;
    return starter == Starter::Mpiexec || (starter == Starter::Srun && !variable.starts_with("SLURM_"));
}

bool carries_output(Starter starter) { return starter != Starter::Pbsdsh && starter != Starter::Tm; }

std::vector<StarterCommand> starter_commands(Starter starter, const std::vector<AllocatedHost>& hosts,
                                             NodeRange nodes, AgentCall call, const std::string& job_id,
                                             const std::string& pbs_attach) {
    const std::string count = fmt::format("{}", nodes.size()), names = names_of(hosts, nodes);
    // One srun or mpiexec starts all: a job step for each host would cost the scheduler more, and sites limit
    // the number of steps. With --no-kill a lost host ends its own task only: the job may go on without it.
    if (starter == Starter::Srun) {
        return {for_all_at_once(
            {"srun", "--overlap", "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1",
             "--nodelist=" + names, "--export=ALL", "--input=all", "--mpi=none", "--cpu-bind=none",
             "--kill-on-bad-exit=0", "--no-kill", "--job-name=ddprun"},
            nodes, call)};
    }
    if (starter == Starter::Mpiexec)
        return {for_all_at_once({"mpiexec", "-n", count, "--ppn", "1", "--hosts", names}, nodes, call)};
    std::vector<StarterCommand> commands;
    for (const int node : each_of(nodes)) {
        const AllocatedHost& host = hosts[static_cast<std::size_t>(node)];
        call.node = node;
        Words agent{call.program}, words;
        append(agent, agent_words(call));
        if (starter == Starter::Pbsdsh) words = {"pbsdsh", "-n", fmt::format("{}", host.line), "--"};
        if (starter == Starter::Tm) words = {"pbs_tmrsh", host.name};
        if (starter == Starter::Blaunch) words = {"blaunch", "-n", host.name};
        if (starter == Starter::Ssh) words = by_ssh(host.name, std::move(agent), job_id, pbs_attach);
        else append(words, agent);
        commands.push_back({std::move(words), {node}});
    }
    return commands;
}

}  // namespace ddprun
