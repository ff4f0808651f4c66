#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The places to search for programs.
struct ProgramSearch {
    std::vector<std::string> own_directories;  ///< ddprun's own workers, before PATH
    std::string path;                          ///< PATH
    std::vector<std::string> own_words = {};   ///< subcommands and options to suggest: "ps", "--help"
    std::string python;                        ///< PYTHON_EXEC; "" python3 from PATH
    std::string environment = {};  ///< the Python environment (venv, conda) that ddprun lies in; "" none
};

/// The places of this ddprun and of its environment: own workers are in libexec beside an installed ddprun
/// (in share after `pip install`), and in the build tree beside a built one.
ProgramSearch program_search();

/// A program that can be executed.
struct ResolvedProgram {
    std::string path;                    ///< path for execve
    std::vector<std::string> arguments;  ///< argv, including argv[0]; macros are not yet substituted
    std::string how;        ///< "found in PATH", "run by /usr/bin/python3, the first python3 in PATH"
    std::string name = {};  ///< name in reports: the script or module that Python runs, else the path
};

/// The Python that runs scripts and modules, and why.
struct PythonChoice {
    std::string program;      ///< a path, or a name to look for in PATH
    std::string_view why;     ///< for the plan and the report
    std::string_view remedy;  ///< follows the error when `program` cannot be executed
};

/// PYTHON_EXEC, else the Python of the environment that ddprun lies in, whether that is activated or not (as
/// a torchrun there would choose), else the first python3 in PATH, which is that of the activated
/// environment.
PythonChoice choose_python(const ProgramSearch& search);

/// True when the first line of a script names Python: "#!/usr/bin/env python3".
bool names_python(std::string_view first_line);

/// Finds the program. A name with a slash is a path. "x.py" is a path too, relative to the current directory.
/// Python runs it, and a path that is not executable and whose first line names Python. Any other name is
/// searched in own_directories, then in PATH. Error: NotFound (with a near name), or System (a directory, not
/// executable).
Result<ResolvedProgram> resolve_program(const ProgramSpec& program, const ProgramSearch& search);
/// True when Python runs the program: a script or module, python itself, or a file whose first line names
/// Python (lightning, accelerate).
bool is_run_by_python(const ResolvedProgram& program);
/// The file that the user calls the program: the script rather than the Python that runs it.
std::string program_file(const ResolvedProgram& program);
/// ddprun's exit code after that error: 127 or 126, as a shell's.
ExitCode program_exit_code(const Error& error);

}  // namespace ddprun
