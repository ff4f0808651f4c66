#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddprun::pbs {

/// What a job asks PBS for. Texts that are "" and numbers that are 0 are left to the server.
struct Directives {
    std::string name, account, queue, walltime;
    int nodes = 1;            ///< chunks
    int cpus = 0, gpus = 0;   ///< of each
    std::string memory;       ///< of each: "480GB"
    std::string select;       ///< more of each chunk: "system=polaris"
    std::string place;        ///< "scatter": each chunk on a host of its own
    std::string filesystems;  ///< "home:eagle"
    std::string keep;         ///< of -k: "doe" writes the output where it belongs as it comes, not at the end
    std::string output;       ///< "": NAME.oNUMBER where the job was submitted
    std::optional<bool> rerunnable;
    std::vector<std::string> more;  ///< as they stand behind #PBS
};

/// Lines that begin with "#PBS ", in the order in which people read them. The values hold no line ends (the
/// caller has checked). Without mpiprocs: the node file then has one line for each chunk.
std::vector<std::string> render_directives(const Directives& directives);

}  // namespace ddprun::pbs
