#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/exit_codes.h"
#include "launcher/report.h"

namespace ddprun {
namespace {

/// Something a program says on stderr before it dies, and what it usually means.
struct Saying {
    std::string_view text;      ///< part of a line
    std::string_view meaning;   ///< "{}" is replaced by the rest of the line behind `text`, up to a colon or quote
};

// From the special to the general: the first that is found counts.
constexpr Saying kSayings[] = {
    {"error while loading shared libraries: ",
     "the shared library {} is not found on this node (LD_LIBRARY_PATH, or a module that is not loaded)"},
    {"version `GLIBC_", "the program was built on a system with a newer C library than this node's"},
    {"version `GLIBCXX_", "the program was built with a newer C++ library than this node's"},
    {"No module named '", "the Python module {} is not installed for the Python that ran (PYTHON_EXEC chooses it)"},
    {"No module named ", "the Python module {} is not installed for the Python that ran (PYTHON_EXEC chooses it)"},
    {"bad interpreter", "the interpreter in the script's first line (#!) does not exist on this node"},
    {"CUDA out of memory", "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"torch.OutOfMemoryError", "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"CUDA error: out of memory", "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"invalid device ordinal", "more workers than visible GPUs: see --nproc-per-node and CUDA_VISIBLE_DEVICES"},
    {"no CUDA-capable device", "no GPU is visible to this worker: see CUDA_VISIBLE_DEVICES and the allocation"},
    {"CUDA driver version is insufficient", "the node has no NVIDIA driver, or one that is older than the program's CUDA needs"},
    {"no kernel image is available", "the program was built for another GPU generation than this node's"},
    {"device-side assert triggered", "a CUDA kernel failed an assertion, often an index out of range; CUDA_LAUNCH_BLOCKING=1 finds it"},
    {"an illegal memory access was encountered", "a CUDA kernel accessed memory it must not; compute-sanitizer finds it"},
    {"uncorrectable ECC error", "the GPU's memory is defective: take the node out of service"},
    {"Watchdog caught collective operation timeout",
     "NCCL's watchdog gave up a collective: some rank did not take part in it or is far behind; look at the other ranks"},
    {"ncclRemoteError", "NCCL lost a peer: another worker or its node died first, or the network failed"},
    {"ncclSystemError", "a system call or the network failed inside NCCL; NCCL_DEBUG=WARN says which"},
    {"ncclUnhandledCudaError", "a CUDA call failed inside NCCL; NCCL_DEBUG=WARN says which"},
    {"ncclInvalidUsage", "NCCL was called wrongly, for example with two ranks on one GPU; NCCL_DEBUG=WARN says how"},
    {"NCCL error", "NCCL failed; NCCL_DEBUG=WARN says why"},
    {"Address already in use", "a port is taken, often by an earlier job; leave --master-port out to get a free one"},
    {"EADDRINUSE", "a port is taken, often by an earlier job; leave --master-port out to get a free one"},
    {"No space left on device", "a disk, or /dev/shm, is full"},
    {"Disk quota exceeded", "the user's disk quota is used up"},
    {"Too many open files", "the limit on open files is too low (ulimit -n)"},
    {"std::bad_alloc", "the host's memory, or the job's limit on it, is used up"},
    {"Cannot allocate memory", "the host's memory, or the job's limit on it, is used up"},
    {"MemoryError", "the host's memory, or the job's limit on it, is used up"},
    {"AddressSanitizer", "AddressSanitizer found a memory error: see the lines above"},
    {"stack smashing detected", "a buffer on the stack was overrun"},
    {"free(): ", "the heap is damaged: memory was freed twice or overrun"},
    {"malloc(): ", "the heap is damaged: memory was freed twice or overrun"},
    {"double free or corruption", "the heap is damaged: memory was freed twice or overrun"},
    {"terminate called after throwing", "an exception was not caught"},
    {"Assertion `", "an assertion of the program failed"},
    {"command not found", "a script called a command that does not exist on this node"},
};

/// "libfoo.so.1" of "libfoo.so.1: cannot open shared object file", "numpy" of "numpy'".
std::string subject(std::string_view rest) { return std::string(rest.substr(0, rest.find_first_of(":'\n"))); }

std::string explain_sayings(const std::vector<std::string>& lines) {
    for (const Saying& saying : kSayings) {
        for (const std::string& line : lines) {
            const std::size_t at = line.find(saying.text);
            if (at == std::string::npos) continue;
            std::string meaning(saying.meaning);
            const std::size_t hole = meaning.find("{}");
            if (hole != std::string::npos) {
                meaning.replace(hole, 2, subject(std::string_view(line).substr(at + saying.text.size())));
            }
            return meaning;
        }
    }
    return "";
}

std::string explain_exec_failure(const std::string& failure) {
    const auto says = [&](std::string_view text) { return failure.find(text) != std::string::npos; };
    if (says("No such file")) {
        return "the program does not exist on this node, or the interpreter in its first line (#!) or its dynamic loader does not";
    }
    if (says("Exec format error")) return "not a program for this machine: built for another architecture, or a script without #!";
    if (says("Permission denied")) return "not executable, or on a file system mounted with noexec";
    if (says("Argument list too long")) return "the arguments and the environment together are too long";
    if (says("Resource temporarily unavailable")) return "the limit on processes is reached (ulimit -u, or the cgroup's pids.max)";
    return "";
}

bool any_says(const WorkerEnd& end, std::string_view text) {
    return std::any_of(end.last_stderr.begin(), end.last_stderr.end(),
                       [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

std::string explain_signal(int signal) {
    switch (signal) {
        case SIGKILL: return "killed from outside: usually the kernel's out-of-memory killer, else a person or the scheduler";
        case SIGBUS: return "usually /dev/shm is full (64 MB in many containers), or a mapped file became shorter";
        case SIGSEGV: return "the program accessed memory it must not: a bug in it, or in a library it uses";
        case SIGILL: return "the program was built for a newer CPU than this node's";
        case SIGFPE: return "an integer was divided by zero";
        case SIGABRT: return "the program, or a library it uses, gave up by abort(); its last lines should say why";
        case SIGTERM:
        case SIGINT:
        case SIGHUP: return "stopped from outside ddprun: the scheduler (walltime, deletion) or a person";
        case SIGXCPU: return "the limit on CPU time was reached (ulimit -t)";
        case SIGXFSZ: return "the limit on file size was reached (ulimit -f)";
        case SIGPIPE: return "it wrote to a pipe or socket that nobody reads any more";
        case SIGSYS: return "it made a system call that the container or sandbox forbids";
        default: return "";
    }
}

std::string explain_code(int code) {
    if (code == static_cast<int>(ExitCode::DoNotRequeue)) return "it asks not to be started again";
    if (code == static_cast<int>(ExitCode::NotFound)) return "a shell did not find the command, or a library is missing";
    if (code == static_cast<int>(ExitCode::NotExecutable)) return "a shell found the command but may not execute it";
    if (code > 128 && code < 128 + SIGRTMIN) return fmt::format("a process that it had started was ended by {}", signal_name(code - 128));
    return "";
}

/// With signals whose cause is named by the last lines, the lines know better.
std::string explain_cause(const WorkerEnd& end) {
    if (!end.exec_failure.empty()) return explain_exec_failure(end.exec_failure);
    if (end.signaled && end.status == SIGBUS && any_says(end, "/dev/shm")) return explain_signal(SIGBUS);
    // What killed it from outside has nothing to do with what it said before.
    const bool from_outside = end.signaled && (end.status == SIGKILL || end.status == SIGTERM);
    if (!from_outside) {
        if (std::string meaning = explain_sayings(end.last_stderr); !meaning.empty()) return meaning;
    }
    return end.signaled ? explain_signal(end.status) : explain_code(end.status);
}

/// The file name that a pattern without a pipe gives: the specifiers of core(5) that we can know.
std::string expand_core_pattern(std::string_view pattern, const WorkerEnd& end) {
    std::string name;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
        if (pattern[i] != '%' || i + 1 == pattern.size()) {
            name += pattern[i];
            continue;
        }
        switch (pattern[++i]) {
            case '%': name += '%'; break;
            case 'p':
            case 'P': name += fmt::format("{}", end.pid); break;
            case 's': name += fmt::format("{}", end.status); break;
            case 'h': name += end.host; break;
            default: name += '*';
        }
    }
    return name;
}

}  // namespace

std::string explain_end(const WorkerEnd& end) {
    const bool succeeded = !end.signaled && end.status == 0 && end.exec_failure.empty();
    if (succeeded || end.by_us || end.stopped_failing) return "";
    return explain_cause(end);
}

std::string core_location(std::string_view core_pattern, const WorkerEnd& end, std::string_view directory) {
    const std::string_view pattern = trim(core_pattern);
    if (pattern.starts_with('|')) {
        const std::string_view program = pattern.substr(1, pattern.find(' ') - 1);
        const bool systemd = program.find("systemd-coredump") != std::string_view::npos;
        return fmt::format("core handed to {}{}", program, systemd ? fmt::format(" (coredumpctl info {})", end.pid) : "");
    }
    const std::string name = expand_core_pattern(pattern.empty() ? "core" : pattern, end);
    if (name.starts_with('/')) return "core file: " + name;
    return fmt::format("core file: {}/{}", directory, name);
}

}  // namespace ddprun
