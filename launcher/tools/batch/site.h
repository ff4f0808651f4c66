#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"

namespace ddprun {

/// The common part of one cluster's job scripts. Texts that are "" and numbers that are 0 are left out.
struct SiteProfile {
    std::string name = "generic";
    std::optional<Scheduler> scheduler = {};  ///< of a built-in site's machine; none: any
    int cpus_per_node = 0;
    int gpus_per_node = 0;
    std::string memory = {};       ///< of a node: "480GB"
    std::string queue = {};        ///< PBS queue, Slurm partition
    std::string place = {};        ///< PBS: -l place=
    std::string select = {};       ///< PBS: further resources of each chunk
    std::string filesystems = {};  ///< PBS: -l filesystems=
    std::string keep = "doe";      ///< PBS: -k
    std::string gpu_type = {};     ///< Slurm: --gpus-per-node=TYPE:N
    std::vector<std::string> modules = {};
    std::vector<std::pair<std::string, std::string>> environment = {};
    std::vector<std::string> setup = {};       ///< lines of the script, before the modules
    std::vector<std::string> directives = {};  ///< without "#PBS" or "#SBATCH"
    bool operator==(const SiteProfile&) const = default;
};

/// True for text without blanks, '#' and quotes, which schedulers treat specially in a directive.
bool is_directive_word(std::string_view text);
/// True for a name that a shell takes for a variable.
bool is_variable_name(std::string_view name);

/// "generic", "derecho", "polaris".
const std::vector<SiteProfile>& built_in_sites();

/// Parses a profile: a JSON object with the fields' names. Other fields are as in "generic", or as in the
/// profile that "like" names. Error: InvalidArgument naming the field.
Result<SiteProfile> parse_site(std::string_view json);

/// Finds a built-in profile by its name, or reads a file: a word with a '/' or that ends in ".json". Error:
/// InvalidArgument, System.
Result<SiteProfile> find_site(const std::string& word);

/// What `--site` is where it is not given: DDPRUN_SITE, else the first of `files` that exists, else
/// "generic".
std::string default_site(const std::optional<std::string>& ddprun_site,
                         const std::vector<std::string>& files);

}  // namespace ddprun
