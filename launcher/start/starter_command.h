#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// How the job's secret reaches the ddprun of another host: never in its arguments, which everybody can read.
struct SecretWay {
    enum Kind : std::uint8_t {
        Stdin,   ///< as the first line; the end of input means that the starter has ended
        File,    ///< 0600, in a directory that all hosts see
        Cookie,  ///< made from PBS_JOBCOOKIE, which only the job's processes have, and `salt`
    } kind = Stdin;
    std::string file;
    std::string salt;  ///< random, not secret: two ddprun of one PBS job have different secrets
    bool operator==(const SecretWay&) const = default;
};

/// Hosts of a job by node rank, both ends included.
struct NodeRange {
    int first = 0, last = -1;
    [[nodiscard]] int size() const { return last - first + 1; }
    bool operator==(const NodeRange&) const = default;
};

/// The arguments of `ddprun agent`: how it reaches the head.
struct AgentCall {
    std::string program;                 ///< ddprun itself, an absolute path
    std::vector<std::string> endpoints;  ///< "host:port" of the head, the most likely first
    std::string job;                     ///< the job's id, as of every node
    SecretWay secret;
    int node = -1;     ///< index of its host; -1: it finds its own name among the hosts
    bool tls = false;  ///< the head requires TLS
    bool operator==(const AgentCall&) const = default;
};
/// "agent --at node00:4711,10.0.0.1:4711 --job 12.server --secret stdin --node 2".
std::vector<std::string> agent_words(const AgentCall& call);
/// Parses the words after "agent". Error: InvalidArgument.
Result<AgentCall> parse_agent_words(const std::vector<std::string>& words);

/// One process that starts ddprun on one host or several.
struct StarterCommand {
    std::vector<std::string> words;  ///< words[0] is searched in PATH
    std::vector<int> nodes;          ///< node ranks that it starts
    bool operator==(const StarterCommand&) const = default;
};
/// The reason why a starter ended early, from its last lines `said` ("" too) and its exit code (nullopt: not
/// known). When a program cannot be run there, pbsdsh says "exit status 254" only, and pbs_tmrsh nothing. ssh
/// passes on the exit code of a login file that ends the shell. Pure.
std::string why_ended(const StarterCommand& starter, std::string_view said, std::optional<int> exit_code);

/// The secret's way with this starter: standard input if the starter passes it on, else in a PBS job the
/// cookie if `has_cookie`, else a file.
SecretWay::Kind secret_way(Starter starter, bool has_cookie);

/// True when this starter passes on that variable of its own environment. srun and mpiexec pass on all, but
/// srun sets its step's own SLURM_ variables, and gets the scheduler's PATH (scheduler_environment). Pure.
bool carries(Starter starter, std::string_view variable);
/// True when a started ddprun's output comes out of its starter. With PBS's own programs the MoM writes it to
/// the job's output file, wherever the head's standard output goes.
bool carries_output(Starter starter);

/// The commands that start the `nodes` of `hosts`. `pbs_attach`, a path or "", puts the processes that ssh
/// starts into the PBS job `job_id`. Pure.
std::vector<StarterCommand> starter_commands(Starter starter, const std::vector<AllocatedHost>& hosts,
                                             NodeRange nodes, AgentCall call, const std::string& job_id,
                                             const std::string& pbs_attach);

}  // namespace ddprun
