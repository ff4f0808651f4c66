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

/// The head's order to each ddprun that it has started: the same job, in the same directory.
struct StartOrder {
    std::vector<std::string> arguments;  ///< the user's command line
    std::string directory;
    std::vector<std::string> environment;  ///< "NAME=value", of the head: environment_to_send()
    bool environment_is_whole = true;      ///< false: the starter carries other variables of the job
    std::string head;                      ///< the host that sends this
    bool head_is_apart = false;            ///< `head` is not among `hosts`
    std::vector<std::string> hosts;        ///< by node rank
    std::vector<int> slots;                ///< by node rank: the default of --nproc-per-node; 0: not known
    std::string run_id;
    bool sends_output = false;  ///< lines go to the head in the session, because the starter drops them
    FileIdentity ddprun;
    FileIdentity program;
    bool operator==(const StartOrder&) const = default;
};
std::string encode(StartOrder order);
/// Error: Protocol.
Result<StartOrder> decode_start_order(std::string_view text);

/// Seals the order for the store under the job's secret, because a started ddprun obeys it, and it has the
/// user's variables. Error: System (getrandom).
Result<std::string> seal_order(const StartOrder& order, std::string_view token);
/// Error: Refused (changed on its way), Protocol.
Result<StartOrder> unseal_order(std::string_view sealed, std::string_view token);

/// The store's keys of the order, and of the reason of a host that cannot take part.
inline constexpr std::string_view kOrderKey = "start/order";
std::string failure_key(int node);

/// True for PBS_JOBCOOKIE, SLURM_JWT and DDPRUN_TOKEN, with which others could act for the user, or for
/// another job of the user.
bool is_never_sent(std::string_view variable);
/// The part of the head's environment that another host needs: without the variables that are never sent,
/// those that belong to a host or a process (name, temporary directory, place in the scheduler's step,
/// session), and those that the starter carries. A list of GPUs is sent if it has plain numbers, as users
/// write it; a scheduler writes its own on each host. Variables `asked` for by name are sent too, unless they
/// are never sent. Pure.
std::vector<std::string> environment_to_send(
    const std::vector<std::string>& of_head, const std::vector<std::string>& asked,
    const std::function<bool(std::string_view variable)>& is_carried);
/// The environment of a host: the variables that the head has sent, and its own that belong to a host or are
/// never sent; with `own_is_kept` all of its own. The head's value wins, except for a list of GPUs. Pure.
std::vector<std::string> environment_here(const std::vector<std::string>& sent,
                                          const std::vector<std::string>& own, bool own_is_kept);

/// The index of the host of that name in `hosts`; -1: none.
int node_of_host(const std::vector<std::string>& hosts, std::string_view name);

/// A line about the difference between the head's file and ours; "" when they are equal. Pure.
std::string difference(std::string_view what, const FileIdentity& heads, const FileIdentity& ours,
                       std::string_view head_host);

}  // namespace ddprun
