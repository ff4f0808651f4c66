#include "launcher/ends/explain.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>

#include "env/io/file.h"
#include "env/text.h"
#include "launcher/ends/report.h"
#include "launcher/ends/walltime.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// A message that programs write to stderr before they die, and its usual meaning.
struct KnownMessage {
    std::string_view text;     ///< part of a line
    std::string_view meaning;  ///< "{}" stands for the rest of the line after `text`, up to a colon or quote
};

// Special rows come before general ones, because the first match counts. docs/troubleshooting.md has a remedy
// for each row.
constexpr KnownMessage kKnownMessages[] = {
    {"error while loading shared libraries: ",
     "the shared library {} is not found on this node (LD_LIBRARY_PATH, or a module that is not loaded)"},
    {"version `GLIBC_", "the program was built on a system with a newer C library than this node's"},
    {"version `GLIBCXX_", "the program was built with a newer C++ library than this node's"},
    {"No module named '", "the Python module {} is not installed for the Python that ran"},
    {"No module named ", "the Python module {} is not installed for the Python that ran"},
    {"bad interpreter", "the interpreter in the script's first line (#!) does not exist on this node"},
    {"CUDA out of memory", "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"torch.OutOfMemoryError", "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"CUDA error: out of memory",
     "the GPU's memory is full: a smaller batch, or another process is on the GPU"},
    {"invalid device ordinal",
     "more workers than visible GPUs: see --nproc-per-node and CUDA_VISIBLE_DEVICES"},
    {"no CUDA-capable device",
     "no GPU is visible to this worker: see CUDA_VISIBLE_DEVICES and the allocation"},
    {"CUDA driver version is insufficient",
     "the node has no NVIDIA driver, or one that is older than the program's CUDA needs"},
    {"no kernel image is available", "the program was built for another GPU generation than this node's"},
    {"device-side assert triggered",
     "a CUDA kernel failed an assertion, often an index out of range; CUDA_LAUNCH_BLOCKING=1 finds it"},
    {"an illegal memory access was encountered",
     "a CUDA kernel accessed memory it must not; compute-sanitizer finds it"},
    {"uncorrectable ECC error", "the GPU's memory is defective: take the node out of service"},
    {"Watchdog caught collective operation timeout",
     "NCCL's watchdog gave up a collective: some rank did not take part in it or is far behind; look at "
     "the other ranks"},
    {"ncclRemoteError", "NCCL lost a peer: another worker or its node died first, or the network failed"},
    {"ncclSystemError", "a system call or the network failed inside NCCL; NCCL_DEBUG=WARN says which"},
    {"ncclUnhandledCudaError", "a CUDA call failed inside NCCL; NCCL_DEBUG=WARN says which"},
    {"ncclInvalidUsage",
     "NCCL was called wrongly, for example with two ranks on one GPU; NCCL_DEBUG=WARN says how"},
    {"NCCL error", "NCCL failed; NCCL_DEBUG=WARN says why"},
    {"Connection closed by peer [",
     "Gloo lost a peer: another worker or its node died first, or the network failed"},
    {"EOF when reading a line",
     "ddprun gives its standard input to a worker only where --stdin RANK says so"},
    {"[Errno 5] Input/output error",
     "a disk failed, or the program read the terminal, as getpass does, which only --attach RANK=COMMAND "
     "gives"},
    {"bdb.BdbQuit",
     "ddprun gives its standard input to a worker, for its debugger, only where --stdin RANK says so"},
    {"Address already in use",
     "a port is taken, often by an earlier job; leave --master-port out to get a free one"},
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

std::string explain_messages(const std::vector<std::string>& lines) {
    for (const KnownMessage& known : kKnownMessages) {
        for (const std::string& line : lines) {
            const std::size_t at = line.find(known.text);
            if (at == std::string::npos) continue;
            std::string meaning(known.meaning);
            const std::size_t hole = meaning.find("{}");
            if (hole != std::string::npos) {
                meaning.replace(hole, 2, subject(std::string_view(line).substr(at + known.text.size())));
            }
            return meaning;
        }
    }
    return "";
}

std::string explain_exec_failure(const WorkerEnd& end) {
    const bool is_explained = end.failed_at_exec || end.start_errno == EAGAIN;
    switch (is_explained ? end.start_errno : 0) {
        case ENOENT:
            return "the program does not exist on this node, or the interpreter in its first line (#!) or "
                   "its dynamic loader does not";
        case ENOEXEC:
            return "not a program for this machine: built for another architecture, or a script without #!";
        case EACCES: return "not executable, or on a file system mounted with noexec";
        case E2BIG: return "the arguments and the environment together are too long";
        case EAGAIN: return "the limit on processes is reached (ulimit -u, or the cgroup's pids.max)";
        default: return "";
    }
}

bool stderr_has(const WorkerEnd& end, std::string_view text) {
    return std::any_of(end.last_stderr.begin(), end.last_stderr.end(),
                       [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

std::string explain_signal(int signal) {
    switch (signal) {
        case SIGKILL:
            return "killed from outside: usually the kernel's out-of-memory killer, else a person or the "
                   "scheduler";
        case SIGBUS:
            return "usually /dev/shm is full (64 MB in many containers), or a mapped file became shorter";
        case SIGSEGV: return "the program accessed memory it must not: a bug in it, or in a library it uses";
        case SIGILL: return "the program was built for a newer CPU than this node's";
        case SIGFPE: return "an integer was divided by zero";
        case SIGABRT:
            return "the program, or a library it uses, gave up by abort(); its last lines should say why";
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
    if (code == static_cast<int>(ExitCode::TryAgain))
        return "it was asked to stop before its end, and asks to be started again";
    if (code == static_cast<int>(ExitCode::NotFound))
        return "a shell did not find the command, or a library is missing";
    if (code == static_cast<int>(ExitCode::NotExecutable))
        return "a shell found the command but may not execute it";
    if (code > 128 && code < 128 + SIGRTMIN)
        return fmt::format("a process that it had started was ended by {}", signal_name(code - 128));
    return "";
}

/// The last lines of stderr take precedence over the signal, unless it came from outside.
std::string explain_cause(const WorkerEnd& end) {
    if (!end.exec_failure.empty()) return explain_exec_failure(end);
    if (end.signaled && end.status == SIGBUS && stderr_has(end, "/dev/shm")) return explain_signal(SIGBUS);
    // A signal from outside has nothing to do with the worker's last lines.
    const bool from_outside = end.signaled && (end.status == SIGKILL || end.status == SIGTERM);
    if (!from_outside) {
        if (std::string meaning = explain_messages(end.last_stderr); !meaning.empty()) return meaning;
    }
    return end.signaled ? explain_signal(end.status) : explain_code(end.status);
}

/// Parts of the errors that libddp, NCCL, Gloo and PyTorch's store give after a peer has ended.
constexpr std::string_view kLostPeerErrors[] = {"ended without taking part",
                                                "ncclRemoteError",
                                                "onnection closed by peer",
                                                "onnection reset by peer",
                                                "onnection was likely closed",
                                                "the connection to ",
                                                "Broken pipe"};

bool reports_lost_peer(const WorkerEnd& end) {
    return std::any_of(std::begin(kLostPeerErrors), std::end(kLostPeerErrors), [&](std::string_view words) {
        return end.error_file.find(words) != std::string::npos || stderr_has(end, words);
    });
}

constexpr std::size_t kMaxSystemFile = 64 * 1024;
constexpr std::size_t kMaxLinesOfADeath = 4096;  ///< read after one death
constexpr Duration kNearWalltime = std::chrono::seconds(90);
/// A job that runs this long past the limit had it extended: the environment has only the first limit.
constexpr Duration kPastWalltime = std::chrono::minutes(3);

std::string oom_text(const DeathFacts& facts, const std::optional<OomKill>& kill) {
    const std::string held =
        kill && kill->rss_bytes > 0 ? fmt::format(" (it held {})", format_bytes(kill->rss_bytes)) : "";
    if (kill && !kill->by_cgroup)
        return fmt::format("out of memory: the node had none left and the kernel killed it{}", held);
    if (facts.memory_limit)
        return fmt::format("out of memory: the cgroup's limit of {} was hit{}",
                           format_bytes(*facts.memory_limit), held);
    return fmt::format("out of memory: the kernel killed a process of this cgroup{}", held);
}

std::string explain_kill(const DeathFacts& facts) {
    for (const std::string& line : facts.kernel_lines) {
        const std::optional<OomKill> kill = parse_oom_kill(line);
        if (kill && kill->pid == facts.pid) return oom_text(facts, kill);
    }
    return facts.cgroup_oom_kills > 0 ? oom_text(facts, std::nullopt) : "";
}

std::string explain_bus_error(const DeathFacts& facts) {
    if (!facts.shm_free || !facts.shm_size || *facts.shm_size == 0 || *facts.shm_free > *facts.shm_size / 64)
        return "";
    return fmt::format("/dev/shm is full ({} of {} free): shared memory could not be given to it",
                       format_bytes(*facts.shm_free), format_bytes(*facts.shm_size));
}

/// The text after `key`, up to one of `ends`; "" when the key is not there.
std::string_view text_after(std::string_view line, std::string_view key, std::string_view ends) {
    const std::size_t at = line.find(key);
    if (at == std::string_view::npos) return {};
    const std::string_view rest = line.substr(at + key.size());
    return rest.substr(0, rest.find_first_of(ends));
}

}  // namespace

std::string explain_end(const WorkerEnd& end) {
    const bool succeeded = !end.signaled && end.status == 0 && end.exec_failure.empty();
    if (succeeded || end.by_us || end.stopped_failing) return "";
    return explain_cause(end);
}

std::string explain_early_end(const WorkerEnd& cause, std::span<const WorkerEnd> workers) {
    if (!reports_lost_peer(cause)) return "";
    std::vector<int> ranks;
    TimePoint last{};
    for (const WorkerEnd& worker : workers) {
        if (worker.failed() || worker.by_us || worker.order > cause.order) continue;
        ranks.push_back(worker.rank);
        last = std::max(last, worker.ended);
    }
    if (ranks.empty()) return "";
    std::sort(ranks.begin(), ranks.end());
    const bool is_one = ranks.size() == 1;
    return fmt::format("rank{} {} had ended with 0, {}{} before: did {} leave the training early?",
                       is_one ? "" : "s", format_ranges(ranks), is_one ? "" : "the last of them ",
                       format_duration(cause.ended - last), is_one ? "it" : "they");
}

std::string explain_python(const WorkerEnd& cause, const std::string& program, const std::string& how) {
    if (!how.starts_with("run by ") || !stderr_has(cause, "No module named ")) return "";
    return fmt::format("{} was {} (PYTHON_EXEC names another)", program, how);
}

std::string explain_death(const DeathFacts& facts) {
    if (facts.signal == SIGKILL) {
        if (std::string text = explain_kill(facts); !text.empty()) return text;
    }
    if (facts.signal == SIGBUS) {
        if (std::string text = explain_bus_error(facts); !text.empty()) return text;
    }
    const bool from_outside = facts.signal == SIGKILL || facts.signal == SIGTERM;
    if (from_outside && facts.walltime_left &&
        *facts.walltime_left<kNearWalltime&& * facts.walltime_left> - kPastWalltime) {
        return "the scheduler's walltime was over: it ends the job's processes";
    }
    if (facts.signal == SIGKILL && facts.cpu_limit) {
        return fmt::format(
            "killed from outside: by the kernel when its CPU time reached the limit of {} s (ulimit -Ht), "
            "or for want of memory; "
            "else by a person or the scheduler",
            *facts.cpu_limit);
    }
    return "";
}

std::optional<OomKill> parse_oom_kill(std::string_view line) {
    const std::string_view pid = text_after(line, "Killed process ", " (,");
    const Result<std::int64_t> number = parse_int(pid);
    if (!number) return std::nullopt;
    OomKill kill;
    kill.pid = static_cast<pid_t>(*number);
    kill.by_cgroup = line.find("Memory cgroup out of memory") != std::string_view::npos;
    kill.program = text_after(line, "(", ")");
    for (const std::string_view part : {"anon-rss:", "file-rss:", "shmem-rss:"}) {
        kill.rss_bytes += parse_uint(text_after(line, part, "k")).value_or(0) * 1024;
    }
    return kill;
}

std::optional<std::uint64_t> parse_counter(std::string_view text, std::string_view key) {
    for (const std::string_view line : split(text, '\n')) {
        if (!line.starts_with(key) || line.substr(key.size(), 1) != " ") continue;
        if (const Result<std::uint64_t> value = parse_uint(trim(line.substr(key.size())))) return *value;
    }
    return std::nullopt;
}

// ---- gathering

DeathWitness::DeathWitness()
    : memory_(cgroup_places(read_file("/proc/self/cgroup", kMaxSystemFile).value_or(""), "memory")),
      kernel_log_(::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (kernel_log_) ::lseek(kernel_log_.get(), 0, SEEK_END);
    oom_kills_seen_ = oom_kills();
}

std::uint64_t DeathWitness::oom_kills() const {
    const char* const file = memory_.version == 2 ? "/memory.events" : "/memory.oom_control";
    for (const std::string& directory : memory_.directories) {
        if (const auto count =
                parse_counter(read_file(directory + file, kMaxSystemFile).value_or(""), "oom_kill"))
            return *count;
    }
    return 0;
}

std::vector<std::string> DeathWitness::new_kernel_lines() {
    std::vector<std::string> lines;
    char record[8192];
    for (std::size_t i = 0; kernel_log_ && i < kMaxLinesOfADeath; ++i) {
        const ssize_t n = ::read(kernel_log_.get(), record, sizeof record);
        if (n < 0 && errno == EPIPE) continue;  // records were overwritten before we read them
        if (n <= 0) break;
        const std::string_view text(record, static_cast<std::size_t>(n));
        if (text.find("Killed process") != std::string_view::npos)
            lines.emplace_back(text.substr(text.find(';') + 1));
    }
    return lines;
}

DeathFacts DeathWitness::facts(pid_t pid, int signal) {
    DeathFacts facts;
    facts.pid = pid;
    facts.signal = signal;
    if (signal == SIGKILL) {
        const std::uint64_t kills = oom_kills();
        facts.cgroup_oom_kills = kills > oom_kills_seen_ ? kills - oom_kills_seen_ : 0;
        oom_kills_seen_ = kills;
        facts.memory_limit =
            tightest_limit(memory_, memory_.version == 2 ? "memory.max" : "memory.limit_in_bytes");
        facts.kernel_lines = new_kernel_lines();
        rlimit cpu{};
        if (::getrlimit(RLIMIT_CPU, &cpu) == 0 && cpu.rlim_max != RLIM_INFINITY)
            facts.cpu_limit = cpu.rlim_max;
    }
    struct statvfs shm {};
    if (signal == SIGBUS && ::statvfs("/dev/shm", &shm) == 0) {
        facts.shm_free = std::uint64_t{shm.f_bavail} * shm.f_frsize;
        facts.shm_size = std::uint64_t{shm.f_blocks} * shm.f_frsize;
    }
    facts.walltime_left = walltime_left();
    return facts;
}

}  // namespace ddprun
