#include "launcher/plan/program.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "env/io/file.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddprun {
namespace {

/// The state of a path for execve. Closed: a directory on the way to it may not be entered.
enum class PathState : std::uint8_t { Absent, Directory, Closed, Forbidden, Executable };

PathState path_state(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return errno == EACCES ? PathState::Closed : PathState::Absent;
    if (S_ISDIR(status.st_mode)) return PathState::Directory;
    return ::access(path.c_str(), X_OK) == 0 ? PathState::Executable : PathState::Forbidden;
}

/// The directory on the way to `path`, through at most `links` links, that this user may not enter; "" none.
std::string closed_directory(const std::filesystem::path& path, int links = 8) {
    const auto behind_link = [&](const std::filesystem::path& link) {
        std::error_code error;
        const std::filesystem::path target = std::filesystem::read_symlink(link, error);
        return error || links == 0 ? "" : closed_directory(link.parent_path() / target, links - 1);
    };
    std::filesystem::path directory;
    for (const std::filesystem::path& part : path.parent_path()) {
        directory /= part;
        if (::access(directory.c_str(), X_OK) == 0 || errno != EACCES) continue;
        const std::string inner = behind_link(directory);
        return inner.empty() ? directory.string() : inner;
    }
    return behind_link(path);
}

Error is_closed(const std::string& path) {
    return {Errc::System,
            fmt::format("{}: permission denied (this user may not enter the directory {})", path,
                        closed_directory(path)),
            EACCES};
}

Error not_found(std::string what) { return {Errc::NotFound, std::move(what)}; }
Error is_directory(const std::string& path) {
    return {Errc::System, path + ": is a directory, not a program", EISDIR};
}

/// The first line of a file without its newline; "" when the file cannot be read.
std::string first_line_of(const std::string& path) {
    constexpr std::size_t kLongest = 256;  // the part of a #! line that the kernel reads
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    std::string text(kLongest, '\0');
    const ssize_t n = file ? ::pread(file.get(), text.data(), text.size(), 0) : 0;
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text.substr(0, text.find('\n'));
}

/// The remedy depends on the first line: after chmod +x, Python without a #! line would run in a shell.
Error not_executable(const std::string& path) {
    const bool names_interpreter = first_line_of(path).starts_with("#!");
    const std::string remedy =
        names_interpreter
            ? fmt::format("try chmod +x {}", path)
            : fmt::format("a Python script is run by --run-path, a program needs chmod +x {}", path);
    return {Errc::System, fmt::format("{}: permission denied (not executable; {})", path, remedy), EACCES};
}

bool is_link(const std::string& path) {
    std::error_code ignored;
    return std::filesystem::is_symlink(path, ignored);
}

std::string in_directory(std::string_view directory, std::string_view name) {
    // An empty entry of PATH is the current directory.
    return fmt::format("{}/{}", directory.empty() ? "." : directory, name);
}

std::vector<std::string> executables_in(const std::string& directory) {
    std::vector<std::string> names = names_in(directory);
    std::erase_if(names, [&](const std::string& name) {
        return path_state(in_directory(directory, name)) != PathState::Executable;
    });
    return names;
}

std::vector<std::string> scripts_in(const std::string& directory) {
    std::vector<std::string> names = names_in(directory);
    std::erase_if(names, [](const std::string& name) { return !name.ends_with(".py"); });
    return names;
}

/// "; did you mean dir/train?", or "".
std::string near_file(const std::string& path,
                      std::vector<std::string> (*candidates_in)(const std::string&)) {
    const std::size_t name_at = path.rfind('/') + 1;  // 0: a name in the current directory
    const std::string directory = path.substr(0, name_at);
    const std::string near =
        nearest(std::string_view(path).substr(name_at), candidates_in(directory.empty() ? "." : directory));
    return near.empty() ? "" : fmt::format("; did you mean {}{}?", directory, near);
}

/// A directory to search in, and its name in messages.
struct Place {
    std::string directory;
    std::string_view called;
};

std::vector<Place> places_of(const ProgramSearch& search) {
    std::vector<Place> places;
    for (const std::string& directory : search.own_directories)
        places.push_back({directory, "among ddprun's own workers"});
    for (const std::string_view directory : split(search.path, ':'))
        places.push_back({std::string(directory), "in PATH"});
    return places;
}

/// The nearest word ("stacks" for "stack", "--help" for "help"); "" when none is near.
std::string near_word(const std::string& name, const std::vector<std::string>& words) {
    const std::string option = "--" + name, ps = "ps";
    // What other programs call it.
    if (name == "status" && std::find(words.begin(), words.end(), ps) != words.end()) return ps;
    return std::find(words.begin(), words.end(), option) != words.end() ? option : nearest(name, words);
}

/// "; did you mean ./train?", or "".
std::string suggestion(const std::string& name, const ProgramSearch& search) {
    const PathState here = path_state("./" + name);
    if (here == PathState::Executable || here == PathState::Forbidden) {
        return fmt::format("; it exists in the current directory: did you mean ./{}?", name);
    }
    // ddprun's own workers and words come before PATH.
    const std::string word = near_word(name, search.own_words);
    for (const Place& place : places_of(search)) {
        if (place.called == "in PATH" && !word.empty()) return fmt::format("; did you mean ddprun {}?", word);
        const std::vector<std::string> names =
            executables_in(place.directory.empty() ? "." : place.directory);
        std::string near = nearest(name, names);
        // Among the thousands of names in PATH some name is always near; require the same first letter.
        if (place.called == "in PATH" && !near.empty() && near.front() != name.front()) near.clear();
        // "train_gpt" is no typing error of "train", but "train" is all that we have.
        for (const std::string& other : names) {
            if (near.empty() && place.called != "in PATH" && other.size() >= 3 && name.starts_with(other))
                near = other;
        }
        if (!near.empty()) return fmt::format("; did you mean {}?", near);
    }
    return "";
}

/// Finds a name without a slash.
Result<ResolvedProgram> search_for(const std::string& name, const ProgramSearch& search) {
    // Nothing is known of what a closed directory in PATH holds, but a link in an open one is meant.
    std::string forbidden, closed;
    for (const Place& place : places_of(search)) {
        const std::string path = in_directory(place.directory, name);
        const PathState state = path_state(path);
        if (state == PathState::Executable)
            return ResolvedProgram{path, {name}, fmt::format("found {}", place.called)};
        if (state == PathState::Forbidden && forbidden.empty()) forbidden = path;
        if (state == PathState::Closed && closed.empty() && is_link(path)) closed = path;
    }
    if (!forbidden.empty()) return not_executable(forbidden);
    if (!closed.empty()) return is_closed(closed);
    const bool has_own = !search.own_directories.empty();
    return not_found(fmt::format("{}: not found {}in PATH{}", name,
                                 has_own ? "among ddprun's own workers and " : "", suggestion(name, search)));
}

Result<ResolvedProgram> at_path(const std::string& path) {
    switch (path_state(path)) {
        case PathState::Executable: return ResolvedProgram{path, {path}, "a path"};
        case PathState::Directory: return is_directory(path);
        case PathState::Closed: return is_closed(path);
        case PathState::Forbidden: return not_executable(path);
        case PathState::Absent: break;
    }
    return not_found(fmt::format("{}: no such file{}", path, near_file(path, executables_in)));
}

Result<ResolvedProgram> find_executable(const std::string& name, const ProgramSearch& search) {
    if (name.empty()) return not_found("the program's name is empty");
    return name.find('/') != std::string::npos ? at_path(name) : search_for(name, search);
}

Result<ResolvedProgram> find_python(const ProgramSearch& search) {
    const PythonChoice choice = choose_python(search);
    ProgramSearch path_only = search;
    path_only.own_directories.clear();
    Result<ResolvedProgram> python = find_executable(choice.program, path_only);
    if (!python) {
        Error error = python.error();
        error.what += fmt::format(" ({})", choice.remedy);
        return error;
    }
    python->how = choice.why;
    return python;
}

/// Python opens the script itself, so it must be readable, not executable.
Status check_script(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
        if (errno == EACCES) return is_closed(path);
        const std::string_view where = path.starts_with('/') ? "" : " (relative to the current directory)";
        return not_found(fmt::format("{}: no such file{}{}", path, where, near_file(path, scripts_in)));
    }
    if (S_ISDIR(status.st_mode)) return is_directory(path);
    if (::access(path.c_str(), R_OK) != 0)
        return Error{Errc::System, path + ": permission denied (not readable)", EACCES};
    return {};
}

Result<ResolvedProgram> with_python(const ProgramSearch& search, const std::vector<std::string>& words) {
    Result<ResolvedProgram> python = find_python(search);
    if (!python) return python;
    python->how = fmt::format("run by {}, {}", python->path, python->how);
    python->name = words.back();
    // -u as in torchrun: a line is shown when it is printed.
    python->arguments = {python->path, "-u"};
    python->arguments.insert(python->arguments.end(), words.begin(), words.end());
    return python;
}

/// Runs the script by runpy with the sys.argv and sys.path of a direct run.
constexpr const char* kRunPath =
    "import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')";

/// True for a script that is not executable and whose first line names Python ("./main" with 0644): torchrun
/// runs it, too.
bool is_python_by_its_first_line(const std::string& path) {
    return path.find('/') != std::string::npos && path_state(path) == PathState::Forbidden &&
           names_python(first_line_of(path));
}

Result<ResolvedProgram> resolve_by_kind(const ProgramSpec& program, const ProgramSearch& search) {
    switch (program.kind) {
        case ProgramSpec::Kind::Executable: return find_executable(program.name, search);
        case ProgramSpec::Kind::Module: return with_python(search, {"-m", program.name});
        case ProgramSpec::Kind::RunPath:
        case ProgramSpec::Kind::Detect: break;
    }
    const bool by_runpy = program.kind == ProgramSpec::Kind::RunPath;
    const bool is_script = program.name.ends_with(".py") || is_python_by_its_first_line(program.name);
    if (!by_runpy && !is_script) return find_executable(program.name, search);
    if (const Status script = check_script(program.name); !script) return script.error();
    if (by_runpy) return with_python(search, {"-c", kRunPath, program.name});
    return with_python(search, {program.name});
}

/// The environment of Python that holds `prefix`/bin/ddprun; "" when it is none.
std::string python_environment(const std::filesystem::path& prefix) {
    std::error_code ignored;
    const bool is_venv = std::filesystem::exists(prefix / "pyvenv.cfg", ignored);
    const bool is_conda = std::filesystem::exists(prefix / "conda-meta", ignored);
    return is_venv || is_conda ? prefix.string() : "";
}

}  // namespace

ProgramSearch program_search() {
    ProgramSearch search;
    const std::filesystem::path self = own_directory();
    search.own_directories = {(self / "../libexec/ddprun").lexically_normal().string(),
                              (self / "../share/ddprun").lexically_normal().string(),
                              (self / "../workers/train").lexically_normal().string(),
                              (self / "../workers/check").lexically_normal().string()};
    search.path = process_environment("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
    search.python = process_environment("PYTHON_EXEC").value_or("");
    search.environment = python_environment(self.parent_path());
    return search;
}

PythonChoice choose_python(const ProgramSearch& search) {
    if (!search.python.empty()) return {search.python, "PYTHON_EXEC", "named by PYTHON_EXEC"};
    if (!search.environment.empty())
        return {search.environment + "/bin/python3", "of the environment that ddprun is installed in",
                "the Python of the environment that ddprun is installed in; PYTHON_EXEC names another"};
    return {"python3", "the first python3 in PATH",
            "needed for the program; PYTHON_EXEC names another Python"};
}

bool names_python(std::string_view first_line) {
    if (!first_line.starts_with("#!")) return false;
    for (const std::string_view word : split(trim(first_line.substr(2)), ' ')) {
        if (word.substr(word.rfind('/') + 1).starts_with("python")) return true;
    }
    return false;
}

Result<ResolvedProgram> resolve_program(const ProgramSpec& program, const ProgramSearch& search) {
    Result<ResolvedProgram> resolved = resolve_by_kind(program, search);
    if (!resolved) return resolved;
    if (resolved->name.empty()) resolved->name = resolved->path;
    resolved->arguments.insert(resolved->arguments.end(), program.arguments.begin(), program.arguments.end());
    return resolved;
}

bool is_run_by_python(const ResolvedProgram& program) {
    const std::string file = program.path.substr(program.path.rfind('/') + 1);
    return program.name != program.path || file.starts_with("python") ||
           names_python(first_line_of(program.path));
}

std::string program_file(const ResolvedProgram& program) {
    std::error_code ignored;
    return std::filesystem::is_regular_file(program.name, ignored) ? program.name : program.path;
}

ExitCode program_exit_code(const Error& error) {
    return error.code == Errc::NotFound ? ExitCode::NotFound : ExitCode::NotExecutable;
}

}  // namespace ddprun
