#include "env/os/spawn.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <linux/close_range.h>
#include <linux/mempolicy.h>
#include <linux/sched.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

// The child runs on memory shared with its parent, which the kernel suspends until the child's exec or end
// (CLONE_VM | CLONE_VFORK): nothing is copied, so the cost does not grow with our memory. In return the child
// may only make plain system calls on what the parent prepared: no allocation, no locks, and no sanitizer's
// book-keeping, which would take the child for a thread of ours.
#define DDPRUN_IN_CHILD __attribute__((noinline, no_sanitize("address", "thread", "undefined")))

namespace ddprun::os {
namespace {

using Words = std::vector<unsigned long>;
constexpr std::size_t kBitsPerWord = 8 * sizeof(unsigned long);
constexpr int kSignalCount = 64;
constexpr std::size_t kSignalSetBytes = kSignalCount / 8;  ///< the kernel's, not glibc's, sigset_t

struct Move {
    int from;
    int to;
    bool first_aside;  ///< `from` is another move's target and would be overwritten
};

/// All data that the child reads, and the two fields that it writes.
struct Launch {
    pid_t parent = 0;
    const char* program = nullptr;
    const char* directory = nullptr;
    char* const* arguments = nullptr;
    char* const* shell_arguments = nullptr;
    char* const* environment = nullptr;
    Move* moves = nullptr;
    std::size_t move_count = 0;
    /// The descriptor table is shared, and the child needs it below this number only; 0: it is a copy.
    unsigned shared_above = 0;
    int free_number = 3;  ///< no move's target is at or above this number
    const unsigned long* cpus = nullptr;
    std::size_t cpu_bytes = 0;
    const unsigned long* nodes = nullptr;
    std::size_t node_bits = 0;
    rlimit open_files{};  ///< set when rlim_cur is not 0
    rlimit file_locks{};  ///< set when rlim_cur is not 0
    bool foreground_terminal = false;
    std::uint64_t signals_to_reset = 0;  ///< bit n: signal n + 1

    const char* failed_stage = nullptr;
    int error = 0;
};

DDPRUN_IN_CHILD long fail(Launch& launch, const char* stage) {
    launch.failed_stage = stage;
    launch.error = errno;
    return -1;
}

/// Replaces the descriptor table shared with the parent by a copy of its beginning.
DDPRUN_IN_CHILD long leave_shared_table(Launch& launch) {
    if (launch.shared_above == 0) return 0;
    if (::syscall(SYS_close_range, launch.shared_above, ~0U, CLOSE_RANGE_UNSHARE) == 0) return 0;
    return ::syscall(SYS_unshare, CLONE_FILES) == 0 ? 0 : fail(launch, "unshare");
}

/// Makes the child die with its parent, even if that has died already.
DDPRUN_IN_CHILD long bind_to_parent(Launch& launch) {
    if (::syscall(SYS_setpgid, 0, 0) != 0) return fail(launch, "setpgid");
    if (::syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0) return fail(launch, "prctl");
    if (::syscall(SYS_getppid) == launch.parent) return 0;
    errno = ESRCH;
    return fail(launch, "parent");
}

DDPRUN_IN_CHILD long set_limits_and_places(Launch& launch) {
    if (launch.cpus != nullptr && ::syscall(SYS_sched_setaffinity, 0, launch.cpu_bytes, launch.cpus) != 0) {
        return fail(launch, "sched_setaffinity");
    }
    if (launch.open_files.rlim_cur != 0 &&
        ::syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &launch.open_files, nullptr) != 0) {
        return fail(launch, "prlimit");
    }
    // The limit is only a mark: when it is refused, the environment still has one. Ignoring.
    if (launch.file_locks.rlim_cur != 0)
        ::syscall(SYS_prlimit64, 0, RLIMIT_LOCKS, &launch.file_locks, nullptr);
    if (launch.nodes == nullptr) return 0;
    // Prefer the nodes, do not bind: a full node then costs speed and not the job. Before Linux 5.15 only
    // MPOL_PREFERRED exists, which takes the first node of the mask. Containers often deny the call, and the
    // nodes may have changed since we read them; the policy only tunes: ignoring.
    const long set = ::syscall(SYS_set_mempolicy, MPOL_PREFERRED_MANY, launch.nodes, launch.node_bits);
    if (set != 0) ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, launch.nodes, launch.node_bits);
    return 0;
}

DDPRUN_IN_CHILD long enter_directory(Launch& launch) {
    if (launch.directory != nullptr && ::syscall(SYS_chdir, launch.directory) != 0)
        return fail(launch, "chdir");
    return 0;
}

DDPRUN_IN_CHILD long move_one(const Move& move) {
    if (move.from == move.to) return ::syscall(SYS_fcntl, move.to, F_SETFD, 0);
    return ::syscall(SYS_dup3, move.from, move.to, 0);
}

DDPRUN_IN_CHILD long move_descriptors(Launch& launch) {
    // Close also descriptors that we inherited from a scheduler or a shell. Kernels before 5.11 cannot; then
    // only ours, born CLOEXEC, are closed: ignoring.
    ::syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC);
    for (std::size_t i = 0; i < launch.move_count; ++i) {
        Move& move = launch.moves[i];
        if (!move.first_aside) continue;
        move.from = static_cast<int>(::syscall(SYS_fcntl, move.from, F_DUPFD_CLOEXEC, launch.free_number));
        if (move.from < 0) return fail(launch, "dup");
    }
    for (std::size_t i = 0; i < launch.move_count; ++i) {
        if (move_one(launch.moves[i]) < 0) return fail(launch, "dup");
    }
    return 0;
}

DDPRUN_IN_CHILD void set_disposition(int signal, void (*handler)(int)) {
    // The kernel's struct sigaction, which begins with the handler.
    unsigned long action[8] = {reinterpret_cast<unsigned long>(handler)};
    ::syscall(SYS_rt_sigaction, signal, action, nullptr, kSignalSetBytes);
}

/// Takes the terminal, sets dispositions, then unblocks all signals. They were blocked so that no handler of
/// ours runs in the child and SIGTTOU does not stop it. exec resets handlers, but keeps ignored signals.
DDPRUN_IN_CHILD long settle_signals(Launch& launch) {
    pid_t group = static_cast<pid_t>(::syscall(SYS_getpid));
    if (launch.foreground_terminal && ::syscall(SYS_ioctl, 0, TIOCSPGRP, &group) != 0) {
        return fail(launch, "tcsetpgrp");
    }
    for (std::uint64_t left = launch.signals_to_reset; left != 0; left &= left - 1)
        set_disposition(__builtin_ctzll(left) + 1, SIG_DFL);
    // A background group that touches the terminal would be stopped for ever. With these signals ignored, a
    // read of the terminal fails instead (EIO), in the child's own children too.
    if (!launch.foreground_terminal) {
        set_disposition(SIGTTIN, SIG_IGN);
        set_disposition(SIGTTOU, SIG_IGN);
    }
    std::uint64_t none = 0;
    ::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, nullptr, kSignalSetBytes);
    return 0;
}

/// True when the file is a binary, which no shell can run.
DDPRUN_IN_CHILD bool is_elf(const char* path) {
    char magic[4] = {};
    const long file = ::syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) ::syscall(SYS_read, file, magic, sizeof magic);
    return magic[0] == '\x7f' && magic[1] == 'E' && magic[2] == 'L' && magic[3] == 'F';
}

DDPRUN_IN_CHILD long execute(Launch& launch) {
    ::syscall(SYS_execve, launch.program, launch.arguments, launch.environment);
    // The shell runs a script without "#!", as with execvp(3) and every shell.
    if (errno == ENOEXEC && !is_elf(launch.program))
        ::syscall(SYS_execve, "/bin/sh", launch.shell_arguments, launch.environment);
    return fail(launch, "exec");
}

DDPRUN_IN_CHILD int child_main(void* raw) {
    Launch& launch = *static_cast<Launch*>(raw);
    if (leave_shared_table(launch) == 0 && bind_to_parent(launch) == 0 &&
        set_limits_and_places(launch) == 0 && enter_directory(launch) == 0 && move_descriptors(launch) == 0 &&
        settle_signals(launch) == 0) {
        execute(launch);
    }
    ::syscall(SYS_exit_group, 127);
    return 127;
}

// The parent's side: preparation, start, errors.

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
    std::vector<char*> pointers;
    pointers.reserve(strings.size() + 1);
    // execve takes char* for historical reasons and does not write.
    for (const std::string& string : strings) pointers.push_back(const_cast<char*>(string.c_str()));
    pointers.push_back(nullptr);
    return pointers;
}

std::vector<char*> shell_arguments(const SpawnSpec& spec, const std::vector<char*>& arguments) {
    std::vector<char*> shell{const_cast<char*>("sh"), const_cast<char*>(spec.program.c_str())};
    const auto rest = arguments.size() > 1 ? arguments.begin() + 1 : arguments.begin();
    shell.insert(shell.end(), rest, arguments.end());
    return shell;
}

Words bit_mask(const std::vector<int>& bits) {
    if (bits.empty()) return {};
    const int highest = *std::max_element(bits.begin(), bits.end());
    Words words(static_cast<std::size_t>(highest) / kBitsPerWord + 1);
    for (const int bit : bits) {
        const auto at = static_cast<std::size_t>(bit);
        words[at / kBitsPerWord] |= 1UL << (at % kBitsPerWord);
    }
    return words;
}

std::vector<Move> plan_moves(const std::vector<FdMapping>& mappings) {
    std::vector<Move> moves;
    for (const FdMapping& mapping : mappings) {
        const bool overwritten = std::any_of(mappings.begin(), mappings.end(), [&](const FdMapping& other) {
            return &other != &mapping && other.childs == mapping.ours;
        });
        moves.push_back({mapping.ours, mapping.childs, overwritten});
    }
    return moves;
}

int above_all_targets(const std::vector<Move>& moves) {
    int highest = 2;
    for (const Move& move : moves) highest = std::max(highest, move.to);
    return highest + 1;
}

/// True for a signal by which a user or a shell asks for something, and which a child goes on ignoring: POSIX
/// keeps ignored signals ignored through exec, and nohup(1) relies on it. The others are a runtime's own
/// (SIGPIPE), and SIGTERM is how ddprun stops its children.
bool stays_ignored(int signal) {
    constexpr int kKept[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP};
    return std::find(std::begin(kKept), std::end(kKept), signal) != std::end(kKept);
}

std::uint64_t read_signals_to_reset() {
    std::uint64_t ignored = 0;
    for (int signal = 1; signal <= kSignalCount; ++signal) {
        if (stays_ignored(signal)) continue;
        struct sigaction action {};
        // sigaction fails for the two signals that glibc reserves, which are never ignored.
        if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN)
            ignored |= 1ULL << (signal - 1);
    }
    return ignored;
}

/// Refuses mistakes of a caller that would give the process wrong descriptors or masks.
Status check(const SpawnSpec& spec) {
    const auto invalid = [&](std::string_view why) {
        return Error{Errc::InvalidArgument, fmt::format("start {}: {}", spec.program, why), 0};
    };
    std::vector<int> targets;
    for (const FdMapping& mapping : spec.descriptors) targets.push_back(mapping.childs);
    std::sort(targets.begin(), targets.end());
    if (std::adjacent_find(targets.begin(), targets.end()) != targets.end()) {
        return invalid("two descriptors for one number");
    }
    constexpr int kMaxIndex = 1 << 16;
    for (const std::vector<int>* const list : {&spec.cpus, &spec.memory_nodes}) {
        for (const int index : *list) {
            if (index < 0 || index >= kMaxIndex)
                return invalid(fmt::format("no such cpu or node: {}", index));
        }
    }
    return {};
}

/// Blocks every signal in this thread for its lifetime.
class AllSignalsBlocked {
  public:
    AllSignalsBlocked() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    AllSignalsBlocked(const AllSignalsBlocked&) = delete;
    AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

#if defined(__x86_64__)
/// clone3(2), which has no wrapper: the child calls run(argument), which must not return, on the stack of
/// `arguments`. Returns the pid, or a negative error number.
long clone_with(clone_args& arguments, int (*run)(void*), void* argument) {
    long result;
    asm volatile(
        "syscall\n\t"
        "testq %%rax, %%rax\n\t"
        "jnz 1f\n\t"
        "movq %[argument], %%rdi\n\t"
        "callq *%[run]\n\t"
        "ud2\n"
        "1:"
        : "=a"(result)
        : "a"(SYS_clone3), "D"(&arguments), "S"(sizeof arguments), [run] "r"(run), [argument] "r"(argument)
        : "rcx", "r11", "cc", "memory");
    return result;
}
#else
/// Not written for this processor: workers start in our own cgroup.
long clone_with(clone_args&, int (*)(void*), void*) { return -ENOSYS; }
#endif

/// The child's stack, because it shares our memory. It only makes system calls.
struct alignas(64) ChildStack {
    std::array<char, std::size_t{32} << 10> bytes;
};

/// Starts the child in the cgroup: moving it there later takes a lock that waits for every processor, some
/// milliseconds.
long clone_into(int cgroup, int flags, int exit_signal, ChildStack& stack, int (*run)(void*),
                void* argument) {
    clone_args arguments{};
    arguments.flags = static_cast<std::uint64_t>(flags) | CLONE_INTO_CGROUP;
    arguments.exit_signal = static_cast<std::uint64_t>(exit_signal);
    arguments.stack = reinterpret_cast<std::uintptr_t>(stack.bytes.data());
    arguments.stack_size = stack.bytes.size();
    arguments.cgroup = static_cast<std::uint64_t>(cgroup);
    return clone_with(arguments, run, argument);
}

DDPRUN_IN_CHILD int exit_at_once(void*) {
    ::syscall(SYS_exit_group, 0);
    return 0;
}

/// The child's pid once it has executed or failed, or -1 with errno of clone.
pid_t start(Launch& launch, int cgroup) {
    ChildStack stack;
    const AllSignalsBlocked blocked;
    const int flags = CLONE_VM | CLONE_VFORK | (launch.shared_above != 0 ? CLONE_FILES : 0);
    if (cgroup >= 0) {
        const long pid = clone_into(cgroup, flags, SIGCHLD, stack, child_main, &launch);
        if (pid > 0) return static_cast<pid_t>(pid);
    }
    return ::clone(child_main, stack.bytes.data() + stack.bytes.size(), flags | SIGCHLD, &launch);
}

void reap_failed(pid_t pid) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
}

Error explain(const SpawnSpec& spec, const Launch& launch) {
    const std::string_view stage = launch.failed_stage;
    if (stage == "exec")
        return {Errc::Refused, Error::system("exec " + spec.program, launch.error).what, launch.error};
    std::string attempt = fmt::format("start {}: {}", spec.program, stage);
    if (stage == "chdir") attempt += " " + spec.directory;
    return Error::system(attempt, launch.error);
}

}  // namespace

std::uint64_t SpawnSlots::signals_to_reset() {
    if (!signals_to_reset_) signals_to_reset_ = read_signals_to_reset();
    return *signals_to_reset_;
}

bool SpawnSlots::open() {
    constexpr int kSlots = 8;
    null_.reset(::open("/dev/null", O_RDWR | O_CLOEXEC));
    for (int i = 0; null_ && i < kSlots; ++i) {
        slots_.emplace_back(::fcntl(null_.get(), F_DUPFD_CLOEXEC, 3));
        if (!slots_.back()) break;
        end_ = std::max(end_, slots_.back().get() + 1);
    }
    if (slots_.size() == kSlots && slots_.back()) return true;
    slots_.clear();
    return false;
}

bool SpawnSlots::fill(std::vector<FdMapping>& mappings) {
    if (slots_.empty() && !open()) return false;
    std::vector<FdMapping> moved = mappings;
    for (FdMapping& mapping : moved) {
        if (mapping.ours < end_) continue;  // it is in the child's part of the table already
        if (used_ == slots_.size() || ::dup3(mapping.ours, slots_[used_].get(), O_CLOEXEC) < 0) {
            clear();
            return false;
        }
        mapping.ours = slots_[used_++].get();
    }
    mappings = std::move(moved);
    return true;
}

void SpawnSlots::clear() {
    for (; used_ > 0; --used_) ::dup3(null_.get(), slots_[used_ - 1].get(), O_CLOEXEC);
}

Result<pid_t> spawn_process(const SpawnSpec& spec, SpawnSlots& slots) {
    if (const Status checked = check(spec); !checked) return checked.error();
    const std::vector<char*> arguments = pointers_to(spec.arguments);
    const std::vector<char*> through_shell = shell_arguments(spec, arguments);
    const std::vector<char*> environment = pointers_to(spec.environment);
    const Words cpus = bit_mask(spec.cpus);
    const Words nodes = bit_mask(spec.memory_nodes);
    std::vector<FdMapping> descriptors = spec.descriptors;
    const bool in_slots = slots.fill(descriptors);
    std::vector<Move> moves = plan_moves(descriptors);

    Launch launch;
    launch.shared_above = in_slots ? static_cast<unsigned>(slots.end()) : 0;
    launch.parent = ::getpid();
    launch.program = spec.program.c_str();
    launch.directory = spec.directory.empty() ? nullptr : spec.directory.c_str();
    launch.arguments = arguments.data();
    launch.shell_arguments = through_shell.data();
    launch.environment = environment.data();
    launch.moves = moves.data();
    launch.move_count = moves.size();
    launch.free_number = above_all_targets(moves);
    launch.cpus = cpus.empty() ? nullptr : cpus.data();
    launch.cpu_bytes = cpus.size() * sizeof(unsigned long);
    launch.nodes = nodes.empty() ? nullptr : nodes.data();
    launch.node_bits = nodes.size() * kBitsPerWord + 1;  // the kernel reads one bit less
    launch.foreground_terminal = spec.foreground_terminal;
    launch.signals_to_reset = slots.signals_to_reset();
    if (spec.open_files != 0 && ::getrlimit(RLIMIT_NOFILE, &launch.open_files) == 0) {
        launch.open_files.rlim_cur = std::min<rlim_t>(spec.open_files, launch.open_files.rlim_max);
    }
    if (spec.lock_limit != 0 && ::getrlimit(RLIMIT_LOCKS, &launch.file_locks) == 0) {
        launch.file_locks.rlim_cur = spec.lock_limit;
    }

    const pid_t pid = start(launch, spec.cgroup);
    const int error = errno;
    slots.clear();
    if (pid < 0) return Error::system("fork", error);
    if (launch.failed_stage == nullptr) return pid;
    reap_failed(pid);
    return explain(spec, launch);
}

bool can_be_born_in(int cgroup) {
    ChildStack stack;
    const AllSignalsBlocked blocked;
    const long pid = clone_into(cgroup, CLONE_VM | CLONE_VFORK, 0, stack, exit_at_once, nullptr);
    if (pid <= 0) return false;
    int status = 0;
    while (::waitpid(static_cast<pid_t>(pid), &status, __WALL) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace ddprun::os
