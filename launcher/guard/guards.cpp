#include "launcher/guard/guards.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <optional>
#include <utility>

#include "env/hmac.h"
#include "launcher/guard/descriptors.h"
#include "rendezvous/wire/session.h"

namespace ddprun {

/// Shared between ddprun and its warden, so that a worker is in it from the moment it exists.
struct Warden::Table {
    std::atomic<bool> farewell{false};
    std::atomic<std::int64_t> stall_limit_ns{0};  ///< 0: stalls are not watched for
    std::atomic<std::int64_t> alive_ns{0};        ///< last note_alive(), on the monotonic clock
    std::atomic<bool> has_killed{false};          ///< after a stall
    std::atomic<pid_t> groups[1];
};

namespace {

std::size_t table_bytes(int max_groups) {
    constexpr std::size_t kHead = 64;  ///< bytes before the groups
    return kHead + sizeof(std::atomic<pid_t>) * static_cast<std::size_t>(max_groups);
}

/// Kills until two searches in a row find nothing, for five seconds at most: a process can fork meanwhile.
void sweep_marked(const JobMark& mark) {
    const timespec pause{0, 5'000'000};
    int quiet = 0;
    for (int look = 0; look < 1000 && quiet < 2; ++look) {
        quiet = kill_marked_processes(mark) == 0 ? quiet + 1 : 0;
        if (quiet < 2) ::nanosleep(&pause, nullptr);
    }
}

/// Also closes our copy of ddprun's end: while it is open, ddprun's death is not seen.
void close_from(int first) {
    if (::syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, 0U) == 0) return;
    for (const int fd : open_descriptors()) {  // before Linux 5.9
        if (fd >= first) ::close(fd);
    }
}

void detach_from_everything(int alive) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_NAME, "warden");
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGTSTP}) {
        ::signal(signal, SIG_IGN);
    }
    const int null = ::open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; ++fd) ::dup2(null, fd);
    ::dup2(alive, 3);
    close_from(4);
}

}  // namespace

Result<std::unique_ptr<Warden>> Warden::start(JobMark mark, std::string cgroup, int max_groups,
                                              std::string files, std::string secret) {
    void* memory =
        ::mmap(nullptr, table_bytes(max_groups), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Error::system("mmap the warden's table");
    std::unique_ptr<Warden> warden(new Warden(std::move(mark), std::move(cgroup), std::move(files),
                                              std::move(secret), static_cast<Table*>(memory), max_groups));
    const Status forked = warden->fork_child();
    if (!forked) return forked.error();
    return warden;
}

Status Warden::fork_child() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return Error::system("socketpair");
    UniqueFd read_end(ends[0]);
    alive_.reset(ends[1]);
    pid_ = ::fork();
    if (pid_ < 0) return Error::system("fork the warden");
    if (pid_ > 0) {
        // The child does so too, but on a busy machine after workers run; until then a signal to our group
        // would hit it.
        ::setpgid(pid_, pid_);
        return {};
    }

    detach_from_everything(read_end.get());
    await_end();
    if (table_->farewell.load()) ::_exit(0);
    if (!secret_.empty()) ::unlink(secret_.c_str());
    kill_workers();
    if (!cgroup_.empty()) remove_cgroup(cgroup_);
    sweep_marked(mark_);
    if (!files_.empty()) remove_job_directory(files_);  // last: no process is left to write into it
    ::_exit(0);
}

void Warden::kill_workers() const {
    for (int i = 0; i < max_groups_; ++i) {
        const pid_t group = table_->groups[i].load();
        if (group > 1) ::kill(-group, SIGKILL);
    }
}

/// Returns when ddprun has ended. Until then kills its workers once for each stall.
void Warden::await_end() const {
    std::optional<rdzv::SilenceWatch> watch;
    // A replacement for another warden goes on with its watch.
    TimePoint next = table_->stall_limit_ns.load() == 0 ? kNever : MonotonicClock::now(), killed_for{};
    for (;;) {
        pollfd end{3, POLLIN, 0};
        const int seen = ::poll(&end, 1, poll_milliseconds(MonotonicClock::now(), next));
        char byte = 0;
        if (const ssize_t got = seen > 0 ? ::read(3, &byte, 1) : 1; got == 0 || (got < 0 && errno != EINTR))
            return;
        const rdzv::Heartbeats limits{Duration(table_->stall_limit_ns.load())};
        if (limits.timeout == Duration::zero()) continue;
        const TimePoint now = MonotonicClock::now(), alive(Duration(table_->alive_ns.load()));
        if (!watch) watch.emplace(limits, now);
        const bool is_over = alive == killed_for;
        const rdzv::SilenceWatch::Verdict verdict = watch->look(now, is_over ? kNever : alive);
        next = is_over ? now + limits.interval : verdict.next;
        if (!verdict.are_lost) continue;
        table_->has_killed.store(true);
        kill_workers();
        if (!cgroup_.empty()) kill_cgroup(cgroup_);
        sweep_marked(mark_);
        killed_for = alive;
    }
}

void Warden::watch_for_stalls(Duration limit) {
    note_alive();
    table_->stall_limit_ns.store(limit.count());
    const char wake = 0;
    (void)!::send(alive_.get(), &wake, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Duration Warden::note_alive() {
    const std::int64_t now = MonotonicClock::now().time_since_epoch().count();
    return Duration(now - table_->alive_ns.exchange(now));
}

bool Warden::has_killed() const { return table_->has_killed.load(); }
void Warden::forget_kill() { table_->has_killed.store(false); }

Warden::~Warden() {
    say_farewell();
    if (pid_ > 0) wait_for_exit();
    ::munmap(table_, table_bytes(max_groups_));
}

void Warden::say_farewell() {
    table_->farewell.store(true);
    if (pid_ > 0) ask_to_exit();
}

void Warden::ask_to_exit() const {
    ::shutdown(alive_.get(), SHUT_WR);
    ::kill(pid_, SIGCONT);
}

// Our end stays open until the warden is gone: poll() on it tells when the other end has closed.
void Warden::wait_for_exit() {
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kExitTimeout);
    pollfd other{alive_.get(), 0, 0};
    int gone = 0;
    do gone = ::poll(&other, 1, poll_milliseconds(MonotonicClock::now(), deadline));
    while (gone < 0 && errno == EINTR);
    if (gone <= 0) ::kill(pid_, SIGKILL);
    // A process that SIGKILL does not end (uninterruptible) is left to its next parent.
    for (int look = 0; look < 1000 && ::waitpid(pid_, nullptr, WNOHANG) == 0; ++look)
        ::usleep(look < 100 ? 50 : 1000);
}

void Warden::end_all() {
    if (pid_ > 0) {
        ask_to_exit();
        wait_for_exit();
    }
    pid_ = 0;
}

void Warden::set_group(int local_rank, pid_t group) {
    if (local_rank < max_groups_) table_->groups[local_rank].store(group);
}

pid_t Warden::group(int local_rank) const {
    return local_rank < max_groups_ ? table_->groups[local_rank].load() : 0;
}

void Warden::wake_if_stopped() const {
    siginfo_t info{};
    if (pid_ <= 0 || ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG) != 0 ||
        info.si_pid == 0)
        return;
    ::kill(pid_, SIGCONT);
}

Status Warden::restart() {
    pid_ = 0;
    return fork_child();
}

Result<Guards> Guards::set_up(int workers, bool use_cgroup, const std::string& secret_file, os::Log& log) {
    Result<std::string> id = random_hex(8);
    if (!id) return id.error();
    Guards guards;
    guards.id = *std::move(id);
    guards.mark = make_job_mark(guards.id, own_lock_limit());
    OwnCgroup own;
    if (use_cgroup) own = look_for_own_cgroup();
    else own.why = "--cgroup none";
    if (!own.directory.empty()) {
        for (const std::string& name : remove_abandoned_cgroups(own.directory)) {
            log.info("a ddprun that was killed had left the cgroup {}/{}; ended what was in it",
                     own.directory, name);
        }
    }
    const std::string directory =
        own.directory.empty() ? "" : own.directory + "/" + job_cgroup_name(guards.id);
    const std::string place = place_of_job_directories(), files = place + "/" + job_directory_name(guards.id);
    // Start the warden first: it removes the cgroup if we are killed after we have made it.
    Result<std::unique_ptr<Warden>> warden =
        Warden::start(guards.mark, directory, workers, files, secret_file);
    if (!warden) return warden.error();
    guards.warden = *std::move(warden);
    if (!directory.empty()) {
        Result<std::unique_ptr<JobCgroup>> cgroup = JobCgroup::create(directory);
        if (cgroup) guards.cgroup = *std::move(cgroup);
        else own.why = cgroup.error().what;
    }
    if (guards.cgroup) log.debug("the workers live in the cgroup {}", directory);
    else log.debug("the workers live in our own cgroup: {}", own.why);
    for (const std::string& name : remove_abandoned_job_directories(place))
        log.info("a ddprun that was killed had left {}/{}; removed it", place, name);
    Result<std::unique_ptr<JobDirectory>> made = JobDirectory::create(files);
    if (!made) return made.error().with("a place for the files of this job (TMPDIR names another)");
    guards.files = *std::move(made);
    if (const Status opened = guards.open_store(); !opened) return opened.error();
    return guards;
}

void Guards::begin_end() {
    files.reset();
    cgroup.reset();
    if (warden) warden->say_farewell();
}

/// Opens the socket for this host's workers, in the job's directory until they can use it without a name.
Status Guards::open_store() {
    const std::string path = files->path() + "/store";
    Result<UnixListener> listener = listen_unix(path);
    if (!listener) return listener.error().with("the workers' way to the store");
    ::unlink(path.c_str());
    store = *std::move(listener);
    return {};
}

}  // namespace ddprun
