#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

namespace ddprun {

/// A file that has to be the same on all hosts.
struct FileIdentity {
    std::string path;
    std::uint64_t bytes = 0;
    std::string id;  ///< "build id 5f2c..."; of what has none "sha256 ..." of its beginning
    bool operator==(const FileIdentity&) const = default;
};
/// Error: System.
Result<FileIdentity> identify_file(const std::string& path);
/// "/data/train (31 KiB, build id 5f2c...)".
std::string describe(const FileIdentity& file);

/// What the head tells each ddprun that it has started: the same job, in the same place.
struct StartOrder {
    std::vector<std::string> arguments;    ///< the user's command line
    std::string directory;
    std::vector<std::string> environment;  ///< "NAME=value", of the head
    std::string head;                      ///< the host that sends this
    bool head_is_apart = false;            ///< it is none of these
    std::vector<std::string> hosts;        ///< by node rank
    std::vector<int> slots;                ///< of each, what --nproc-per-node is where nobody says it; 0: not told
    std::string run_id;
    FileIdentity ddprun;
    FileIdentity program;
    bool operator==(const StartOrder&) const = default;
};
std::string encode(const StartOrder& order);
/// Error: Protocol.
Result<StartOrder> decode_start_order(std::string_view text);

/// The store's keys: the order, and what a host says that cannot take part.
inline constexpr std::string_view kOrderKey = "start/order";
std::string failure_key(int node);

/// The environment of a host: the head's, but what belongs to a host or a process (its name, its temporary directory, its
/// place in the scheduler's step, its session) is its own, and absent where it has none. A list of GPUs of the head counts only
/// where the host has none and it is of plain numbers: those a user wrote; a scheduler writes its own on each host. Pure.
std::vector<std::string> environment_here(const std::vector<std::string>& of_head, const std::vector<std::string>& own);

/// Which of `hosts` a host of that name is, -1: none.
int node_of_host(const std::vector<std::string>& hosts, std::string_view name);

/// What differs between the head's and ours, as a line; "" nothing. Pure.
std::string difference(std::string_view what, const FileIdentity& heads, const FileIdentity& ours, std::string_view head_host);

}  // namespace ddprun
