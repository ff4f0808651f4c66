// Merging the output of many workers: ddprun's tagged merge against an untagged shared pipe into `cat` and
// hydra's -prepend-rank, all in one run, interleaved. Counts torn and lost lines of every run. Asserts
// nothing. usage: bench_logs DDPRUN [LINES]              (default 200000 lines of each of 8 workers)
//        bench_logs --write MODE LINES          (a worker; its rank from RANK or PMI_RANK)
#include <fcntl.h>
#include <fmt/core.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

extern char** environ;

namespace {

constexpr int kWorkers = 8;
constexpr std::size_t kLineBytes = 100;
constexpr std::size_t kBlockBytes = 4096;
constexpr int kRepetitions = 5;

using Words = std::vector<std::string>;

/// CPU time of all children that have ended: what a run costs, also on a machine with other work.
double children_cpu_s() {
    rusage usage{};
    ::getrusage(RUSAGE_CHILDREN, &usage);
    const auto seconds = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double now_s() {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

// ---- the worker

/// Line `number` of a rank, with its newline. Known to writer and checker.
void make_line(char* line, int rank, int number) {
    std::memset(line, 'a' + (rank + number) % 26, kLineBytes - 1);
    const auto head = fmt::format_to_n(line, kLineBytes - 1, "r{:03} n{:08} ", rank, number);
    (void)head;
    line[kLineBytes - 1] = '\n';
}

void write_all(const char* bytes, std::size_t size) {
    while (size > 0) {
        const ssize_t n = ::write(1, bytes, size);
        if (n < 0) std::exit(1);
        bytes += n;
        size -= static_cast<std::size_t>(n);
    }
}

void pause_for(long nanoseconds) {
    const timespec span{0, nanoseconds};
    ::nanosleep(&span, nullptr);
}

int write_lines(std::string_view mode, int lines) {
    const char* rank_text = ::getenv("RANK") != nullptr ? ::getenv("RANK") : ::getenv("PMI_RANK");
    const int rank = rank_text != nullptr ? std::atoi(rank_text) : 0;
    std::string block;
    char line[kLineBytes];
    for (int number = 0; number < lines; ++number) {
        make_line(line, rank, number);
        if (mode == "lines") {
            write_all(line, kLineBytes);
        } else if (mode == "blocks") {  // stdio's way: blocks end in mid-line
            block.append(line, kLineBytes);
            for (; block.size() >= kBlockBytes; block.erase(0, kBlockBytes))
                write_all(block.data(), kBlockBytes);
        } else {  // pauses in mid-line
            const std::size_t half = kLineBytes / 3 + static_cast<std::size_t>(number) % 17;
            write_all(line, half);
            if (number % 16 == 0) pause_for(20'000);
            write_all(line + half, kLineBytes - half);
        }
    }
    write_all(block.data(), block.size());
    return 0;
}

// ---- running and checking

struct Outcome {
    long torn = 0;
    long lost = 0;
};

/// A file in memory that takes the merged output.
int make_sink() {
    const int fd = ::memfd_create("bench-logs", 0);
    if (fd < 0) std::abort();
    return fd;
}

pid_t start(const Words& words, int out, const Words& extra_environment = {}) {
    std::vector<char*> argv, environment;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    for (const std::string& variable : extra_environment)
        environment.push_back(const_cast<char*>(variable.c_str()));
    for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, out, 1);
    pid_t pid = 0;
    const int failed = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environment.data());
    ::posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) {
        fmt::print(stderr, "{}: {}\n", words[0], std::strerror(failed));
        std::exit(1);
    }
    return pid;
}

void finish(pid_t pid, const std::string& name) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (status != 0) fmt::print("  {}: ended with status {:#x}\n", name, status);
}

/// Without its tag ("[3]: " or "[3] ") a line must be exactly the next one of its rank.
Outcome check(int sink, int lines) {
    Outcome outcome;
    struct stat status {};
    ::fstat(sink, &status);
    const auto size = static_cast<std::size_t>(status.st_size);
    std::vector<long> seen(kWorkers, 0);
    void* mapped = size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_SHARED, sink, 0);
    std::string_view rest(static_cast<const char*>(mapped), size);
    char expected[kLineBytes];
    while (!rest.empty()) {
        const std::size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
        std::string_view line = rest.substr(0, end);
        rest.remove_prefix(end);
        if (line.size() > kLineBytes) line.remove_prefix(line.size() - kLineBytes);
        const int rank = line.size() == kLineBytes && line[0] == 'r'
                             ? std::atoi(std::string(line.substr(1, 3)).c_str())
                             : -1;
        bool whole = rank >= 0 && rank < kWorkers;
        if (whole) {
            make_line(expected, rank, std::atoi(std::string(line.substr(6, 8)).c_str()));
            whole = line == std::string_view(expected, kLineBytes);
        }
        if (whole) ++seen[static_cast<std::size_t>(rank)];
        else ++outcome.torn;
    }
    for (const long count : seen) outcome.lost += lines - count;
    if (mapped != nullptr) ::munmap(mapped, size);
    return outcome;
}

struct Contender {
    std::string name;
    std::function<void(const Words& worker, int sink)> run;
};

void close_all(std::initializer_list<int> descriptors) {
    for (const int fd : descriptors) ::close(fd);
}

/// The limit: all workers write into one pipe, nobody looks at lines.
void shared_pipe(const Words& worker, int sink) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    const int kept_stdin = ::fcntl(0, F_DUPFD_CLOEXEC, 3);
    ::dup2(ends[0], 0);
    const pid_t cat = start({"cat"}, sink);
    ::dup2(kept_stdin, 0);
    std::vector<pid_t> workers;
    for (int rank = 0; rank < kWorkers; ++rank)
        workers.push_back(start(worker, ends[1], {fmt::format("RANK={}", rank)}));
    close_all({ends[0], ends[1], kept_stdin});
    for (const pid_t pid : workers) finish(pid, "worker");
    finish(cat, "cat");
}

/// `words` with its standard output going to the sink, through `cat` or directly.
void run_launcher(Words words, const Words& worker, int sink, bool through_cat) {
    words.insert(words.end(), worker.begin(), worker.end());
    if (!through_cat) return finish(start(words, sink), words[0]);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    const int kept_stdin = ::fcntl(0, F_DUPFD_CLOEXEC, 3);
    ::dup2(ends[0], 0);
    const pid_t cat = start({"cat"}, sink);
    ::dup2(kept_stdin, 0);
    const pid_t launcher = start(words, ends[1]);
    close_all({ends[0], ends[1], kept_stdin});
    finish(launcher, words[0]);
    finish(cat, "cat");
}

bool is_installed(const std::string& program) {
    return std::system(("command -v " + program + " >/dev/null 2>&1").c_str()) == 0;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void compare(const std::vector<Contender>& contenders, const std::string& self, const std::string& mode,
             int lines) {
    const Words worker = {self, "--write", mode, std::to_string(lines)};
    std::vector<std::vector<double>> seconds(contenders.size()), cpu(contenders.size());
    std::vector<Outcome> worst(contenders.size());
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
        for (std::size_t i = 0; i < contenders.size(); ++i) {
            const int sink = make_sink();
            const double begin = now_s();
            const double cpu_begin = children_cpu_s();
            contenders[i].run(worker, sink);
            seconds[i].push_back(now_s() - begin);
            cpu[i].push_back(children_cpu_s() - cpu_begin);
            const Outcome outcome = check(sink, lines);
            worst[i].torn = std::max(worst[i].torn, outcome.torn);
            worst[i].lost = std::max(worst[i].lost, outcome.lost);
            ::close(sink);
        }
    }
    const double limit = median(seconds[0]);
    fmt::print("\n{} ({} workers x {} lines of {} bytes, median of {})\n", mode, kWorkers, lines, kLineBytes,
               kRepetitions);
    fmt::print("  {:<26} {:>9} {:>9} {:>12} {:>10} {:>8} {:>8}\n", "", "ms", "cpu ms", "lines/s", "of cat's",
               "torn", "lost");
    for (std::size_t i = 0; i < contenders.size(); ++i) {
        const double time = median(seconds[i]);
        fmt::print("  {:<26} {:>9.0f} {:>9.0f} {:>12.0f} {:>9.2f}x {:>8} {:>8}\n", contenders[i].name,
                   time * 1e3, median(cpu[i]) * 1e3, kWorkers * static_cast<double>(lines) / time,
                   limit / time, worst[i].torn, worst[i].lost);
        std::fflush(stdout);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const Words args(argv, argv + argc);
    if (args.size() == 4 && args[1] == "--write") return write_lines(args[2], std::atoi(argv[3]));
    if (args.size() < 2) {
        fmt::print(stderr, "usage: bench_logs DDPRUN [LINES]\n");
        return 64;
    }
    const int lines = args.size() > 2 ? std::atoi(argv[2]) : 200'000;
    const Words ddprun = {args[1], "--standalone", "--quiet", fmt::format("--nproc-per-node={}", kWorkers)};
    const Words hydra = {"mpiexec.hydra", "-prepend-rank", "-n", std::to_string(kWorkers)};
    std::vector<Contender> contenders = {
        {"shared pipe into cat", shared_pipe},
        {"ddprun", [&](const Words& worker, int sink) { run_launcher(ddprun, worker, sink, false); }},
        {"ddprun | cat", [&](const Words& worker, int sink) { run_launcher(ddprun, worker, sink, true); }},
    };
    if (is_installed("mpiexec.hydra")) {
        contenders.push_back({"hydra -prepend-rank", [&](const Words& worker, int sink) {
                                  run_launcher(hydra, worker, sink, false);
                              }});
    }
    char self[4096];
    const ssize_t n = ::readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) return 70;
    for (const char* mode : {"lines", "blocks", "pauses"})
        compare(contenders, std::string(self, static_cast<std::size_t>(n)), mode, lines);
    return 0;
}
