#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// How the job's secret reaches the ddprun of another host; never in its arguments, which everybody can read.
struct SecretWay {
    enum Kind : std::uint8_t {
        Stdin,   ///< its first line; the end of the rest means that the starter is gone
        File,    ///< 0600, in a directory that all hosts see
        Cookie,  ///< it follows from PBS_JOBCOOKIE, which only the job's processes have, and `salt`
    } kind = Stdin;
    std::string file;
    std::string salt;  ///< random and no secret: no two ddprun of a PBS job have the same secret
    bool operator==(const SecretWay&) const = default;
};

/// Hosts of a job by node rank, both ends included.
struct NodeRange {
    int first = 0, last = -1;
    [[nodiscard]] int size() const { return last - first + 1; }
    bool operator==(const NodeRange&) const = default;
};

/// What `ddprun agent` is told in its arguments: where the head is, nothing else.
struct AgentCall {
    std::string program;                 ///< ddprun itself, an absolute path
    std::vector<std::string> endpoints;  ///< "host:port" of the head, the most likely first
    std::string job;                     ///< the job's id, as of every node
    SecretWay secret;
    int node = -1;     ///< index of its host; -1: it finds its own name among the hosts
    bool tls = false;  ///< the head wants to be spoken to so
    bool operator==(const AgentCall&) const = default;
};
/// "agent --at node00:4711,10.0.0.1:4711 --job 12.server --secret stdin --node 2".
std::vector<std::string> agent_words(const AgentCall& call);
/// The reverse, of what follows "agent". Error: InvalidArgument.
Result<AgentCall> parse_agent_words(const std::vector<std::string>& words);

/// One process that starts ddprun on one host or several.
struct StarterCommand {
    std::vector<std::string> words;  ///< words[0] is looked for in PATH
    std::vector<int> nodes;          ///< those it starts
    bool operator==(const StarterCommand&) const = default;
};
/// Why it started nothing, by what it wrote ("" too) before it ended, and its exit code where that is known.
/// PBS's own tell little of a program that cannot be run there: pbsdsh "exit status 254", pbs_tmrsh nothing.
/// ssh passes the exit code of a login file on that ends the shell. Pure.
std::string words_of_ended(const StarterCommand& starter, std::string_view said,
                           std::optional<int> exit_code);

/// How the secret travels with this starter: where it passes standard input on, there. In a PBS job by its
/// cookie, where `has_cookie`; else by a file.
SecretWay::Kind secret_way(Starter starter, bool has_cookie);

/// Whether this starter itself gives the ddprun that it starts that variable of its own environment: srun and
/// mpiexec pass all of it on, but srun writes its step's own SLURM_ variables, and PATH is the scheduler's
/// for it (scheduler_environment). Pure.
bool carries(Starter starter, std::string_view variable);
/// Whether what a started ddprun writes comes out of what started it. PBS's own programs leave it to the MoM,
/// which takes it to the job's output file, wherever the head's standard output goes.
bool carries_output(Starter starter);

/// What starts the `nodes` of `hosts`. `pbs_attach`, a path or "", puts what ssh starts into the PBS job
/// `job_id`. Pure.
std::vector<StarterCommand> starter_commands(Starter starter, const std::vector<AllocatedHost>& hosts,
                                             NodeRange nodes, AgentCall call, const std::string& job_id,
                                             const std::string& pbs_attach);

}  // namespace ddprun
