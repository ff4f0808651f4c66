#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// The secret that all nodes of one user's jobs share, where nothing else was said: a file in the home
/// directory, which most clusters show on every node.
inline constexpr std::size_t kUserSecretBytes = 32;   ///< random ones, in a file that we make
inline constexpr std::size_t kMaxSecretBytes = 4096;  ///< in one that somebody else made

/// $XDG_CONFIG_HOME/ddprun/secret, else $HOME/.config/ddprun/secret. Error: NotFound, when neither is an
/// absolute path.
Result<std::string> user_secret_path(const EnvironmentLookup& variable);

struct UserSecret {
    std::string bytes;
    bool is_new = false;  ///< this call made it
};

/// The secret in that file, which is made if there is none. Whoever makes one at the same moment, on this
/// node or on another that shares the file system, gets the same one. Error: System ("mkdir /home/u/.config:
/// Permission denied"); Refused when the file is not only ours to read, is another user's, a symbolic link,
/// or too short to be a secret, or when others can write to its directory; with what to do about it.
Result<UserSecret> user_secret(const std::string& path);

/// Makes `fresh` the secret, unless there is one by now: returns the one that holds for everybody.
Result<UserSecret> settle_user_secret(const std::string& path, std::string_view fresh);

/// The secret by which the nodes and workers of one job know each other, and what is to be said about it.
struct JobToken {
    std::string token;
    std::string warning;  ///< for the operator at the start, also with --quiet; "" none
    std::string
        when_refused;  ///< what to copy or to set when the head does not accept it; tells nothing secret
};

/// A job of one node has a random one. Several nodes share, in this order: DDPRUN_TOKEN; with --insecure or
/// DDPRUN_INSECURE=1 one that anybody can compute; what follows from the user's secret, which is made at
/// first use.
/// Error: InvalidArgument, when there is no secret and none can be made, with the remedy.
Result<JobToken> choose_job_token(const JobSpec& spec, const EnvironmentLookup& variable);

/// Of the user's secret, for one job: HMAC over its id and the port of its endpoint. Of the endpoint the port
/// alone, because a host has many spellings (short, full, an address, localhost on the head itself) and all
/// of them reach the same head. Pure.
std::string derive_job_token(std::string_view secret, std::string_view run_id, std::uint16_t port);

}  // namespace ddprun
