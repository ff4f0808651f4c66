#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// A file that has to be the same on all hosts.
struct FileIdentity {
    std::string path;
    std::uint64_t bytes = 0;
    std::string id;  ///< "sha256 5f2c..." of the first MiB
    bool operator==(const FileIdentity&) const = default;
};
/// Error: System.
Result<FileIdentity> identify_file(const std::string& path);
/// "/data/train (30112 bytes, sha256 5f2c...)".
std::string describe(const FileIdentity& file);

/// What the head tells each ddprun that it has started: the same job, in the same place.
struct StartOrder {
    std::vector<std::string> arguments;  ///< the user's command line
    std::string directory;
    std::vector<std::string> environment;  ///< "NAME=value", of the head: environment_to_send()
    bool environment_is_whole =
        true;          ///< what is not among these is not the job's; false: the starter carries the rest
    std::string head;  ///< the host that sends this
    bool head_is_apart = false;      ///< it is none of these
    std::vector<std::string> hosts;  ///< by node rank
    std::vector<int> slots;          ///< of each, what --nproc-per-node is where nobody says it; 0: not told
    std::string run_id;
    bool sends_output =
        false;  ///< lines go to the head by the session: what starts the hosts does not carry them
    FileIdentity ddprun;
    FileIdentity program;
    bool operator==(const StartOrder&) const = default;
};
std::string encode(const StartOrder& order);
/// Error: Protocol.
Result<StartOrder> decode_start_order(std::string_view text);

/// The order as it lies in the store: sealed under the job's secret, because a started ddprun runs what it
/// says, and it has the user's variables in it. Error: System (getrandom).
Result<std::string> seal_order(const StartOrder& order, std::string_view token);
/// Error: Refused (changed on its way), Protocol.
Result<StartOrder> unseal_order(std::string_view sealed, std::string_view token);

/// The store's keys: the order, and what a host says that cannot take part.
inline constexpr std::string_view kOrderKey = "start/order";
std::string failure_key(int node);

/// PBS_JOBCOOKIE, SLURM_JWT, DDPRUN_TOKEN: by these others could speak for the user, or for another job of
/// the user.
bool is_never_sent(std::string_view variable);
/// Of the head's environment what another host needs: not what is never sent, not what belongs to a host or a
/// process (its name, its temporary directory, its place in the scheduler's step, its session), not what the
/// starter carries. A list of GPUs is sent where it is of plain numbers: a user wrote those; a scheduler
/// writes its own on each host. Variables that are `asked` for by name are sent as well, unless they are
/// never sent. Pure.
std::vector<std::string> environment_to_send(
    const std::vector<std::string>& of_head, const std::vector<std::string>& asked,
    const std::function<bool(std::string_view variable)>& is_carried);
/// The environment of a host: what the head has sent, and of its own what belongs to a host or is never sent;
/// with `own_is_kept` all of its own. What the head sends wins, but a list of GPUs counts only where the host
/// has none. Pure.
std::vector<std::string> environment_here(const std::vector<std::string>& sent,
                                          const std::vector<std::string>& own, bool own_is_kept);

/// Which of `hosts` a host of that name is, -1: none.
int node_of_host(const std::vector<std::string>& hosts, std::string_view name);

/// What differs between the head's and ours, as a line; "" nothing. Pure.
std::string difference(std::string_view what, const FileIdentity& heads, const FileIdentity& ours,
                       std::string_view head_host);

}  // namespace ddprun
