#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <glob.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "env/clock.h"
#include "env/os/system.h"
#include "env/text.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"
#include "launcher/doctor/collect.h"

namespace ddprun::doctor {
namespace {

constexpr Duration kPatience = std::chrono::seconds(10);  ///< of a library on a slow file system

/// What the process that opened a library sends back. Written in one piece.
struct Opened {
    int version = 0;
    char path[2000] = "";
    char problem[2000] = "";
};

void copy_text(char* to, std::size_t room, const char* from) {
    std::strncpy(to, from == nullptr ? "" : from, room - 1);
}

/// In the child: nothing here returns to the launcher's code.
Opened open_and_ask(const std::vector<std::string>& names, const char* version_function) {
    Opened opened;
    void* library = nullptr;
    for (const std::string& name : names) {
        library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
        if (library != nullptr) break;
        if (opened.problem[0] == '\0') copy_text(opened.problem, sizeof opened.problem, ::dlerror());
    }
    if (library == nullptr) return opened;
    auto* const ask = reinterpret_cast<int (*)(int*)>(::dlsym(library, version_function));
    link_map* map = nullptr;
    if (ask == nullptr || ask(&opened.version) != 0) {
        copy_text(opened.problem, sizeof opened.problem, "it does not tell its version");
        return opened;
    }
    if (::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr)
        copy_text(opened.path, sizeof opened.path, map->l_name);
    return opened;
}

bool read_whole(int fd, Opened& opened) {
    auto* const bytes = reinterpret_cast<char*>(&opened);
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kPatience);
    for (std::size_t got = 0; got < sizeof opened;) {
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - MonotonicClock::now()).count();
        pollfd ready{fd, POLLIN, 0};
        if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return false;
        const ssize_t n = ::read(fd, bytes + got, sizeof opened - got);
        if (n <= 0) return false;
        got += static_cast<std::size_t>(n);
    }
    return true;
}

LibraryFacts look_at(const std::vector<std::string>& names, const char* version_function) {
    LibraryFacts facts;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return facts;
    const UniqueFd in(ends[0]);
    UniqueFd out(ends[1]);
    const pid_t child = ::fork();
    if (child == 0) {
        const Opened opened = open_and_ask(names, version_function);
        const ssize_t n = ::write(out.get(), &opened, sizeof opened);
        ::_exit(n == static_cast<ssize_t>(sizeof opened) ? 0 : 1);
    }
    out.reset();
    Opened opened;
    const bool answered = child > 0 && read_whole(in.get(), opened);
    if (child > 0) {
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
    }
    if (!answered) {
        facts.problem = "opening it ended or did not end";
        return facts;
    }
    facts.version = opened.version;
    facts.path = opened.path;
    facts.problem = opened.problem;
    return facts;
}

/// The value of the variable alone when it is set, as libddp does.
std::vector<std::string> names_for(const char* variable, std::vector<std::string> defaults) {
    const std::optional<std::string> named = process_environment(variable);
    return named ? std::vector<std::string>{*named} : std::move(defaults);
}

/// Places where pip and conda put packages: of the active environment, of the python3 in PATH, of the user.
std::vector<std::string> package_roots() {
    std::vector<std::string> roots;
    for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        if (const auto root = process_environment(variable))
            roots.push_back(*root + "/lib/python3*/site-packages");
    }
    const std::string path = process_environment("PATH").value_or("/usr/local/bin:/usr/bin");
    for (const std::string_view directory : split(path, ':')) {
        std::error_code error;
        const std::filesystem::path python = std::filesystem::path(directory) / "python3";
        if (!std::filesystem::exists(python, error)) continue;
        for (const std::filesystem::path& one : {python, std::filesystem::canonical(python, error)}) {
            const std::string root = one.parent_path().parent_path().string();
            roots.push_back(root + "/lib/python3*/site-packages");
            roots.push_back(root + "/lib/python3*/dist-packages");
            roots.push_back(root + "/lib/python3/dist-packages");
        }
    }
    if (const auto home = process_environment("HOME"))
        roots.push_back(*home + "/.local/lib/python3*/site-packages");
    return roots;
}

/// The first file below the package roots that fits; "" none.
std::string find_in_packages(const std::vector<std::string>& patterns) {
    for (const std::string& root : package_roots()) {
        for (const std::string& pattern : patterns) {
            glob_t found{};
            const bool some =
                ::glob((root + "/nvidia/" + pattern).c_str(), 0, nullptr, &found) == 0 && found.gl_pathc > 0;
            const std::string first = some ? found.gl_pathv[0] : "";
            ::globfree(&found);
            if (some) return first;
        }
    }
    return "";
}

bool matters(std::string_view name) {
    for (const std::string_view prefix : {"NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "DDP_", "CUDA_DEVICE_",
                                          "CUDA_LAUNCH_", "CUDA_MODULE_", "CUBLAS_"}) {
        if (name.starts_with(prefix)) return true;
    }
    return name == "LD_PRELOAD";
}

std::vector<std::pair<std::string, std::string>> read_variables() {
    std::vector<std::pair<std::string, std::string>> variables;
    for (const std::string& one : os::own_environment()) {
        const std::string_view text(one);
        const std::size_t equals = text.find('=');
        if (equals != std::string_view::npos && matters(text.substr(0, equals)))
            variables.emplace_back(text.substr(0, equals), text.substr(equals + 1));
    }
    std::sort(variables.begin(), variables.end());
    return variables;
}

}  // namespace

SoftwareFacts collect_software() {
    SoftwareFacts facts;
    facts.cuda_runtime =
        look_at({"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"}, "cudaRuntimeGetVersion");
    facts.nccl = look_at(names_for("DDP_NCCL_LIBRARY", {"libnccl.so.2"}), "ncclGetVersion");
    if (facts.nccl.path.empty()) facts.nccl.other = find_in_packages({"nccl/lib/libnccl.so.2"});
    facts.variables = read_variables();
    return facts;
}

}  // namespace ddprun::doctor
