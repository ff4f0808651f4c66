#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/exit_codes.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// Where programs are looked for.
struct ProgramSearch {
    std::vector<std::string> own_directories;  ///< ddprun's own workers, before PATH
    std::string path;                          ///< PATH
    std::vector<std::string> own_words =
        {};                   ///< what else may stand behind ddprun, and is suggested: "ps", "--help"
    std::string python;       ///< PYTHON_EXEC; "" python3 from PATH
    std::string beside = {};  ///< the Python of the virtual environment that ddprun lies in; "" none
};

/// A program that can be executed as it stands.
struct ResolvedProgram {
    std::string path;                    ///< what execve gets
    std::vector<std::string> arguments;  ///< argv, including argv[0]; macros are not yet substituted
    std::string how;        ///< "found in PATH", "run by /usr/bin/python3, the first python3 in PATH"
    std::string name = {};  ///< for reports: of what Python runs the script or module, else the path
};

/// Whether the first line of a script hands it to Python: "#!/usr/bin/env python3".
bool names_python(std::string_view first_line);

/// Finds the program. A name with a slash is a path; "x.py" is a path too, relative to the current directory,
/// and is run by Python, as is a path that is not executable and whose first line says so; any other name is
/// looked for in own_directories, then in PATH. Error: NotFound (it does not exist; a near name is
/// suggested), or System (a directory, not executable).
Result<ResolvedProgram> resolve_program(const ProgramSpec& program, const ProgramSearch& search);
/// Whether Python runs it: a script or a module, python itself, or a file whose first line names Python
/// (lightning, accelerate).
bool is_run_by_python(const ResolvedProgram& program);
/// The file that is the program to its user: a script rather than the Python that runs it.
std::string program_file(const ResolvedProgram& program);
/// What ddprun exits with after that error: 127 or 126, as a shell does.
ExitCode program_exit_code(const Error& error);

}  // namespace ddprun
