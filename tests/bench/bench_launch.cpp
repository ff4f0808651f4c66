// Launch, restart and stop of ddprun against the limit (a bare vfork+exec loop) and its peers (MPICH's
// mpiexec.hydra, Open MPI's mpirun, PyTorch's torchrun where PATH has one), all in one run, interleaved.
// Prints ratios; asserts nothing. usage: bench_launch DDPRUN STAMP [quick]
#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

extern char** environ;

namespace {

double now_ms() {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

/// The file that stamped workers write into, mapped.
class Stamps {
  public:
    Stamps() {
        std::strcpy(path_, "/tmp/ddprun-bench-XXXXXX");
        const int fd = ::mkstemp(path_);
        if (fd < 0 || ::ftruncate(fd, kBytes) != 0) std::abort();
        words_ =
            static_cast<std::uint64_t*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        ::close(fd);
    }
    ~Stamps() { ::unlink(path_); }
    Stamps(const Stamps&) = delete;
    Stamps& operator=(const Stamps&) = delete;
    [[nodiscard]] const char* path() const { return path_; }
    void clear() { std::memset(words_, 0, kBytes); }
    [[nodiscard]] std::uint64_t count() const { return __atomic_load_n(&words_[0], __ATOMIC_ACQUIRE); }
    [[nodiscard]] double last_ms() const {
        return static_cast<double>(*std::max_element(words_ + 1, words_ + 1 + count())) / 1e6;
    }
    bool wait_for(std::uint64_t wanted, double until_ms) const {
        while (count() < wanted || words_[wanted] == 0) {
            if (now_ms() > until_ms) return false;
            const timespec pause{0, 200'000};
            ::nanosleep(&pause, nullptr);
        }
        return true;
    }

  private:
    static constexpr std::size_t kBytes = 65536 * 8;
    char path_[64];
    std::uint64_t* words_ = nullptr;
};

std::vector<char*> c_array(const std::vector<std::string>& words) {
    std::vector<char*> result;
    for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
    result.push_back(nullptr);
    return result;
}

pid_t start(const std::vector<std::string>& command) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    std::vector<char*> argv = c_array(command);
    pid_t pid = -1;
    if (::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid = -1;
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

/// Waits for a launcher, without taking processor time from it; one that has not ended after 60 s is killed
/// and its run does not count.
bool finish(pid_t pid) {
    const auto fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    pollfd ended{fd, POLLIN, 0};
    const bool in_time = fd >= 0 && ::poll(&ended, 1, 60'000) == 1;
    if (!in_time) ::kill(pid, SIGKILL);
    if (fd >= 0) ::close(fd);
    ::waitpid(pid, nullptr, 0);
    return in_time;
}

/// The limit: what the kernel needs for the same processes.
void bare_loop(const std::vector<std::string>& command, int n) {
    std::vector<char*> argv = c_array(command);
    for (int i = 0; i < n; ++i) {
        const pid_t pid = ::vfork();
        if (pid == 0) {
            ::execve(argv[0], argv.data(), environ);
            ::_exit(127);
        }
    }
    for (int i = 0; i < n; ++i) ::wait(nullptr);
}

double median(std::vector<double> values) {
    if (values.empty()) return -1;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

struct Launcher {
    std::string name;
    std::function<std::vector<std::string>(int n, const std::vector<std::string>& worker)> command;
};

struct Sample {
    std::vector<double> last_instruction, wall;
};

bool exists(const std::string& program) { return ::access(program.c_str(), X_OK) == 0; }

/// The program's path, "" where PATH has none.
std::string in_path(const std::string& name) {
    const char* const path = std::getenv("PATH");
    std::istringstream directories(path != nullptr ? path : "");
    for (std::string directory; std::getline(directories, directory, ':');) {
        if (exists(directory + "/" + name)) return directory + "/" + name;
    }
    return "";
}

std::vector<Launcher> launchers(const std::string& ddprun) {
    std::vector<Launcher> all;
    const auto append = [](std::vector<std::string> head, const std::vector<std::string>& tail) {
        head.insert(head.end(), tail.begin(), tail.end());
        return head;
    };
    all.push_back({"ddprun", [=](int n, const std::vector<std::string>& worker) {
                       return append({ddprun, "--nproc-per-node=" + std::to_string(n)}, worker);
                   }});
    for (const std::string hydra : {"/usr/bin/mpiexec.hydra", "/usr/bin/mpiexec.mpich"}) {
        if (!exists(hydra)) continue;
        all.push_back({"hydra", [=](int n, const std::vector<std::string>& worker) {
                           return append({hydra, "-n", std::to_string(n)}, worker);
                       }});
        break;
    }
    if (exists("/usr/bin/mpirun.openmpi")) {
        all.push_back({"openmpi", [=](int n, const std::vector<std::string>& worker) {
                           return append({"/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe",
                                          "-n", std::to_string(n)},
                                         worker);
                       }});
    }
    if (const std::string torchrun = in_path("torchrun"); !torchrun.empty()) {
        all.push_back({"torchrun", [=](int n, const std::vector<std::string>& worker) {
                           return append({torchrun, "--standalone", "--no-python",
                                          "--nproc-per-node=" + std::to_string(n)},
                                         worker);
                       }});
    }
    return all;
}

void measure_start(const std::string& ddprun, const std::string& stamp, bool quick) {
    fmt::print("start-up: ms to the last worker's first instruction, ms to the launcher's exit (medians)\n");
    fmt::print(
        "{:>5} {:>9} {:>9} | {:>9} {:>9} {:>7} {:>7} | peers: last instruction, exit (ddprun's share of their last)\n",
        "N", "bare", "exit", "ddprun", "exit", "x bare", "x exit");
    Stamps stamps;
    const std::vector<std::string> worker{stamp, stamps.path()};
    for (const int n : {1, 8, 64, 256, 1024}) {
        const int runs = quick ? 3 : n >= 256 ? 5 : 9;
        Sample bare;
        std::vector<Launcher> all = launchers(ddprun);
        // Open MPI 4.1.4 hangs in about half of its launches of 64 workers that exit at once.
        // torchrun takes seconds: 8 workers tell enough.
        std::erase_if(all, [n](const Launcher& one) {
            return (n >= 64 && one.name == "openmpi") || (n != 8 && one.name == "torchrun");
        });
        std::vector<Sample> samples(all.size());
        for (int run = 0; run <= runs; ++run) {  // run 0 warms up
            stamps.clear();
            double begin = now_ms();
            bare_loop(worker, n);
            if (run > 0) {
                bare.wall.push_back(now_ms() - begin);
                bare.last_instruction.push_back(stamps.last_ms() - begin);
            }
            for (std::size_t i = 0; i < all.size(); ++i) {
                stamps.clear();
                begin = now_ms();
                const pid_t pid = start(all[i].command(n, worker));
                if (pid < 0 || !finish(pid) || run == 0) continue;
                samples[i].wall.push_back(now_ms() - begin);
                if (stamps.count() == static_cast<std::uint64_t>(n))
                    samples[i].last_instruction.push_back(stamps.last_ms() - begin);
            }
        }
        const double bare_last = median(bare.last_instruction);
        const double bare_wall = median(bare.wall);
        const double last = median(samples[0].last_instruction);
        fmt::print("{:>5} {:>9.2f} {:>9.2f} | {:>9.2f} {:>9.2f} {:>7.2f} {:>7.2f} |", n, bare_last, bare_wall,
                   last, median(samples[0].wall), last / bare_last, median(samples[0].wall) / bare_wall);
        for (std::size_t i = 1; i < all.size(); ++i) {
            const double theirs = median(samples[i].last_instruction);
            fmt::print(" {} {:.2f}, {:.2f} ({:.3f});", all[i].name, theirs, median(samples[i].wall),
                       last / theirs);
        }
        fmt::print("  [bar: {:.2f} (2 x bare + 5 ms): {}]\n", 2 * bare_last + 5,
                   last <= 2 * bare_last + 5 ? "met" : "MISSED");
        std::fflush(stdout);
    }
}

double read_kib(pid_t pid, const char* file, const std::string& field) {
    std::ifstream in(fmt::format("/proc/{}/{}", pid, file));
    std::string word;
    while (in >> word) {
        if (word == field) {
            double kib = 0;
            in >> kib;
            return kib;
        }
    }
    return 0;
}

double cpu_seconds(pid_t pid) {
    std::ifstream in(fmt::format("/proc/{}/stat", pid));
    std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const std::size_t end = text.rfind(')');
    unsigned long user = 0, system = 0;
    char state = 0;
    std::sscanf(text.c_str() + end + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &state, &user,
                &system);
    return static_cast<double>(user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

void measure_idle(const std::string& ddprun, const std::string& stamp, bool quick) {
    Stamps stamps;
    const int n = 256;
    const pid_t pid = start({ddprun, "--nproc-per-node=256", stamp, stamps.path(), "hold"});
    if (!stamps.wait_for(n, now_ms() + 30'000)) {
        fmt::print("idle: workers did not start\n");
    } else {
        const double settle = 0.5, span = quick ? 2 : 10;
        const timespec pause{0, static_cast<long>(settle * 1e9)};
        ::nanosleep(&pause, nullptr);
        const double cpu = cpu_seconds(pid);
        const double switches = read_kib(pid, "status", "voluntary_ctxt_switches:");
        const timespec watch{static_cast<time_t>(span), 0};
        ::nanosleep(&watch, nullptr);
        fmt::print(
            "idle supervision of {} workers: {:.1f} MiB PSS, {:.1f} MiB peak RSS, {:.3f} % CPU, {:.1f} wake-ups/s  [bars: 10 MB, 0.1 %]\n",
            n, read_kib(pid, "smaps_rollup", "Pss:") / 1024, read_kib(pid, "status", "VmHWM:") / 1024,
            100 * (cpu_seconds(pid) - cpu) / span,
            (read_kib(pid, "status", "voluntary_ctxt_switches:") - switches) / span);
    }
    ::kill(pid, SIGTERM);
    finish(pid);
}

/// One of 8 workers is killed; time until 8 new ones run.
void measure_restart(const std::string& ddprun, const std::string& stamp, bool quick) {
    std::vector<double> times;
    Stamps stamps;
    const int deaths = quick ? 5 : 15;
    const pid_t launcher = start({ddprun, "--nproc-per-node=8", fmt::format("--max-restarts={}", deaths),
                                  stamp, stamps.path(), "hold"});
    for (int death = 0; death < deaths; ++death) {
        const auto before = static_cast<std::uint64_t>(8 * (death + 1));
        if (!stamps.wait_for(before, now_ms() + 10'000)) break;
        // Any worker: the group id of a child of the launcher other than its warden.
        std::ifstream children(fmt::format("/proc/{}/task/{}/children", launcher, launcher));
        std::vector<pid_t> pids;
        for (pid_t pid = 0; children >> pid;) {
            std::ifstream comm(fmt::format("/proc/{}/comm", pid));
            std::string name;
            comm >> name;
            if (name == "stamp") pids.push_back(pid);
        }
        if (pids.size() != 8) break;
        const double begin = now_ms();
        ::kill(pids[3], SIGKILL);
        if (!stamps.wait_for(before + 8, now_ms() + 10'000)) break;
        times.push_back(stamps.last_ms() - begin);
    }
    ::kill(launcher, SIGTERM);
    finish(launcher);
    fmt::print(
        "a worker's death to 8 new workers' first instruction: median {:.2f} ms of {} deaths  [bar: 20 ms]\n",
        median(times), times.size());
}

/// One of 8 workers is killed, no restarts; time until the launcher has exited.
void measure_failure(const std::string& ddprun, const std::string& stamp, const char* mode, double grace_ms,
                     bool quick) {
    std::vector<double> times;
    for (int run = 0; run < (quick ? 2 : 5); ++run) {
        Stamps stamps;
        const pid_t launcher =
            start({ddprun, "--nproc-per-node=8", "--shutdown-timeout=1", stamp, stamps.path(), mode});
        if (!stamps.wait_for(8, now_ms() + 10'000)) break;
        std::ifstream children(fmt::format("/proc/{}/task/{}/children", launcher, launcher));
        pid_t victim = 0;
        for (pid_t pid = 0; children >> pid;) victim = pid;
        const double begin = now_ms();
        ::kill(victim, SIGKILL);
        finish(launcher);
        times.push_back(now_ms() - begin);
    }
    fmt::print("failure to exit, survivors {}: median {:.2f} ms  [bar: {:.0f} ms]\n",
               std::strcmp(mode, "ignore") == 0 ? "ignore SIGTERM (grace 1 s)" : "die of SIGTERM",
               median(times), grace_ms + 20);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        fmt::print(stderr, "usage: bench_launch DDPRUN STAMP [quick]\n");
        return 64;
    }
    const std::string ddprun = argv[1], stamp = argv[2];
    const bool quick = argc > 3;
    measure_start(ddprun, stamp, quick);
    measure_idle(ddprun, stamp, quick);
    measure_restart(ddprun, stamp, quick);
    measure_failure(ddprun, stamp, "hold", 0, quick);
    measure_failure(ddprun, stamp, "ignore", 1000, quick);
    return 0;
}
