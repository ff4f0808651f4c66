#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The user's secret, shared by all nodes of a user's jobs by default: a file in the home directory, which
/// most clusters share between nodes.
inline constexpr std::size_t kUserSecretBytes = 32;   ///< random bytes in a file that we make
inline constexpr std::size_t kMaxSecretBytes = 4096;  ///< in any file

/// $XDG_CONFIG_HOME/ddprun/secret, else $HOME/.config/ddprun/secret. Error: NotFound when neither variable is
/// an absolute path.
Result<std::string> user_secret_path(const EnvironmentLookup& variable);

struct UserSecret {
    std::string bytes;
    bool is_new = false;  ///< this call made it
};

/// Reads the secret from a file and makes the file if there is none. Processes that make it at the same
/// moment, on any nodes that share the file system, get the same secret. Error: System ("mkdir
/// /home/u/.config: Permission denied"); Refused with the remedy when others can read the file or write to
/// its directory, or when it is another user's, a symbolic link, or too short or too long.
Result<UserSecret> user_secret(const std::string& path);

/// Makes `fresh` the secret unless there is one by now. Returns the one that is valid for all processes.
Result<UserSecret> settle_user_secret(const std::string& path, std::string_view fresh);

/// The secret by which the nodes and workers of one job know each other, with messages about it.
struct JobToken {
    std::string token;
    std::string warning;       ///< for the operator at the start, also with --quiet; "" none
    std::string when_refused;  ///< what to copy or set when the head refuses the token; contains no secret
};

/// Chooses the token: a random one for a job of one node; for several nodes DDPRUN_TOKEN, else with
/// --insecure or DDPRUN_INSECURE=1 one that anybody can compute, else one derived from the user's secret,
/// which is made at first use. Error: InvalidArgument with the remedy when there is no secret and none can be
/// made.
Result<JobToken> choose_job_token(const JobSpec& spec, const EnvironmentLookup& variable);

/// Derives a job's token from the user's secret: HMAC over the job's id and its endpoint's port. The
/// endpoint's host does not count, because it has many spellings (short, full, an address, localhost on the
/// head itself) that reach the same head. Pure.
std::string derive_job_token(std::string_view secret, std::string_view run_id, std::uint16_t port);

}  // namespace ddprun
