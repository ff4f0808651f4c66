#pragma once

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/hosts.h"
#include "tests/support/run_program.h"

namespace ddprun::test {

inline bool has(const char* launcher) { return std::getenv(launcher) != nullptr; }

inline std::vector<std::string> join_words(std::vector<std::string> one,
                                           const std::vector<std::string>& other) {
    one.insert(one.end(), other.begin(), other.end());
    return one;
}

inline std::vector<std::string> open_mpi(int ranks, const std::vector<std::string>& program,
                                         const std::vector<std::string>& options = {}) {
    std::vector<std::string> command = {path_of("OPEN_MPI"), "--allow-run-as-root", "--oversubscribe"};
    command = join_words(std::move(command), options);
    command.insert(command.end(), {"-n", std::to_string(ranks)});
    return join_words(std::move(command), program);
}

inline std::vector<std::string> hydra(int ranks, const std::vector<std::string>& program,
                                      const std::vector<std::string>& options = {}) {
    std::vector<std::string> command = join_words({path_of("HYDRA")}, options);
    command.insert(command.end(), {"-n", std::to_string(ranks)});
    return join_words(std::move(command), program);
}

/// The command that drops an Open MPI rank's variables except PMIx's, as under prterun.
inline std::vector<std::string> with_pmix_only(const std::vector<std::string>& program) {
    return join_words({"env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE", "-u",
                       "OMPI_COMM_WORLD_LOCAL_RANK", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                      program);
}

/// A program that starts commands on these hosts like ssh ("ssh [options] HOST WORD..."), without an sshd.
inline std::string remote_shell(const Hosts& hosts) {
    const std::string path = hosts.shared() + "/remote_shell";
    std::ofstream script(path);
    script << "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1\nshift\ncase $host in\n";
    for (int host = 0; host < hosts.count(); ++host) {
        script << Hosts::name(host) << "|" << Hosts::address(host) << ") exec";
        for (const std::string& word : hosts.command(host, {"sh", "-c"})) script << " '" << word << "'";
        script << " \"$*\" ;;\n";
    }
    script << "*) echo \"$host: no such host\" >&2; exit 255 ;;\nesac\n";
    script.close();
    ::chmod(path.c_str(), 0755);
    return path;
}

inline std::string host_list(const Hosts& hosts, const std::string& suffix = "") {
    std::string list;
    for (int host = 0; host < hosts.count(); ++host)
        list += (host == 0 ? "" : ",") + Hosts::name(host) + suffix;
    return list;
}

/// The command of a launcher on the first host that starts `per_host` processes on each. Ranks of a host
/// follow each other; `map_by` "node" distributes them in turns.
inline std::vector<std::string> open_mpi_on(const Hosts& hosts, int per_host,
                                            const std::vector<std::string>& program,
                                            const std::string& map_by) {
    return hosts.command(0, open_mpi(per_host * hosts.count(), program,
                                     {"--mca", "plm_rsh_agent", remote_shell(hosts), "--host",
                                      host_list(hosts, ":" + std::to_string(per_host)), "--map-by", map_by}));
}
inline std::vector<std::string> open_mpi_on(const Hosts& hosts, int per_host,
                                            const std::vector<std::string>& program) {
    return open_mpi_on(hosts, per_host, program, "ppr:" + std::to_string(per_host) + ":node");
}
inline std::vector<std::string> hydra_on(const Hosts& hosts, int per_host,
                                         const std::vector<std::string>& program) {
    return hosts.command(0, hydra(per_host * hosts.count(), program,
                                  {"-launcher", "ssh", "-launcher-exec", remote_shell(hosts), "-hosts",
                                   host_list(hosts), "-ppn", std::to_string(per_host)}));
}

}  // namespace ddprun::test
