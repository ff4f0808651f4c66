#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/cli/option_list.h"
#include "launcher/tools/batch/batch.h"
#include "launcher/tools/commands.h"
#include "launcher/tools/doctor/doctor.h"

namespace ddprun {

/// A `ddprun pbs ...` or `ddprun slurm ...` command line, without that word.
struct BatchCommand {
    enum class Kind { Script, Submit, Show, Help } kind = Kind::Help;
    JobRequest request;  ///< of Script and Submit; complete
    std::string file;    ///< --file
    bool follow = true;  ///< --no-follow
    std::string job;     ///< of Show
    std::vector<std::string> remarks;
};

/// The values of a subcommand's options. Each subcommand uses one of the parts.
struct SubcommandDraft {
    AskOptions ask;  ///< its `words` are those of every subcommand
    CleanOptions clean;
    doctor::Options doctor;
    BatchCommand batch;
    bool help = false;  ///< -h, --help
};

/// A subcommand of ddprun, such as `ps`. Its name must be exactly the first word of the command line; `ddprun
/// -- ps`, or any option before it, runs a program of that name.
struct Subcommand {
    std::string_view name;
    std::string_view
        arguments;  ///< the words that are no options, as a usage line shows them; "" it takes none
    /// What completions offer for these words: first the words, later "@file" or "@directory".
    std::string_view offered;
    std::string_view help;
    /// Declares its options. nullptr: they are those of a job.
    void (*declare)(OptionList& options, SubcommandDraft& draft);
    /// Returns the exit code: 0; 1: the job cannot or will not do it; 64: wrong usage; 69: no such job.
    int (*run)(SubcommandDraft& draft);
    /// True when `run` reads the options itself, from the words.
    bool reads_options = false;
};
const std::vector<Subcommand>& subcommands();
/// nullptr: there is none of that name.
const Subcommand* find_subcommand(std::string_view name);

/// The options of a subcommand, --help among them, with the place of their values.
struct SubcommandOptions {
    SubcommandDraft draft;
    OptionList list;
    explicit SubcommandOptions(const Subcommand& row) {
        if (row.declare != nullptr) row.declare(list, draft);
        list.flag("-h,--help", draft.help, "Print this text and exit.");
    }
};

/// Reads the words behind the subcommand's name. Error: InvalidArgument, ready to follow "ddprun ps: ".
Result<SubcommandDraft> parse_subcommand(std::string_view name, const std::vector<std::string>& words);
/// Runs the subcommand that `arguments` begin with. Returns the exit code.
int run_subcommand(const std::vector<std::string>& arguments);

void declare_batch_options(OptionList& options, SubcommandDraft& draft);
/// Reads `words` and a site's file. The words after the options are ddprun's own command line, which is
/// checked as ddprun would. `env` tells which job this process belongs to. Error: InvalidArgument, NotFound,
/// System, ready to follow "ddprun pbs: ".
Result<BatchCommand> parse_batch_command(Scheduler scheduler, const std::vector<std::string>& words,
                                         const EnvironmentLookup& env);
/// `ddprun pbs` and `ddprun slurm`. Returns the exit code.
int run_batch_command(Scheduler scheduler, const std::vector<std::string>& words);

/// `ddprun env`: takes the options of a job. Returns the exit code.
int show_environment(const std::vector<std::string>& options);

}  // namespace ddprun
