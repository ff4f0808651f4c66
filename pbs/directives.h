#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddprun::pbs {

/// A job's request to PBS. Texts that are "" and numbers that are 0 are left to the server.
struct Directives {
    std::string name, account, queue, walltime;
    int nodes = 1;            ///< chunks
    int cpus = 0, gpus = 0;   ///< of each chunk
    std::string memory;       ///< of each chunk: "480GB"
    std::string select;       ///< further resources of each chunk: "system=polaris"
    std::string place;        ///< "scatter": each chunk on a host of its own
    std::string filesystems;  ///< "home:eagle"
    std::string keep;         ///< value of -k: "doe" writes the output at once, not at the end
    std::string output;       ///< "": NAME.oNUMBER where the job was submitted
    std::optional<bool> rerunnable;
    std::vector<std::string> more;  ///< further directives without "#PBS"
};

/// The lines with "#PBS ", in the order in which people read them. The values must have no line ends. There
/// is no mpiprocs, so the node file has one line for each chunk.
std::vector<std::string> render_directives(const Directives& directives);

}  // namespace ddprun::pbs
