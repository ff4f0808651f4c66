// A worker for the system tests. Each word of the command line is one act; they are done in order:
//   env NAME        prints NAME=value ("NAME unset")
//   say TEXT        one line to stdout            err TEXT     one line to stderr
//   rank R ... end  these acts only on rank R     once FILE ... end   only if FILE does not exist (makes it)
//   exit N          exits                         kill N       sends itself signal N
//   generation G ... end  these acts only in generation G
//   ignore N        ignores signal N              on N CODE    exits with CODE on signal N
//   note N TEXT     prints TEXT on signal N and goes on     noted N   waits until that has happened
//   hold            waits for signals for ever    stop         stops itself (SIGSTOP)
//   child           leaves a child in its group   daemon       leaves a child in a session of its own
//   sleep MS        sleeps                        lines N      N numbered lines of 100 bytes
//   blocks N        N lines in 4096-byte writes   halves N     N lines written in two halves
//   cat             copies stdin to stdout        fds          prints its open descriptors
//   cpus            prints its CPU affinity       sigs         prints blocked and ignored signals
//   closeout        closes stdout and stderr
//   cwd             prints its directory          part TEXT    TEXT without a newline
//   await FILE      waits until FILE exists
//   report TEXT     leaves an error report, as torch's @record does
//   inside N        tells the launcher that it is inside all_reduce number N, as libddp would
//   tell STEP VALUE NAME   tells a scalar, as ddprun.step() in Python would, if somebody reads them
//   scribble        writes over the segment's header
//   nameless        leaves a daemon whose environment is empty, but its arguments name PROBE_JOB
//   grow   takes memory until it is killed
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "env/segment.h"

namespace {

volatile sig_atomic_t exit_code_on[65];
const char* note_on[65];
volatile sig_atomic_t noted[65];

void write_all(int fd, const std::string& text) {
    std::size_t done = 0;
    while (done < text.size()) {
        const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
        if (n <= 0) ::_exit(111);
        done += static_cast<std::size_t>(n);
    }
}

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

void handle(int signal) {
    if (note_on[signal] != nullptr) {
        const std::size_t length = std::strlen(note_on[signal]);
        if (::write(1, note_on[signal], length) < 0 || ::write(1, "\n", 1) < 0) ::_exit(111);
        noted[signal] = 1;
        return;
    }
    ::_exit(exit_code_on[signal]);
}

/// Waits for a file that another worker makes; polls every millisecond.
void wait_for_file(const std::string& path) {
    while (::access(path.c_str(), F_OK) != 0) ::usleep(1000);
}

/// Waits for a signal without missing one that arrives before the wait.
void wait_for_note(int signal) {
    sigset_t blocked, before;
    ::sigemptyset(&blocked);
    ::sigaddset(&blocked, signal);
    ::sigprocmask(SIG_BLOCK, &blocked, &before);
    while (noted[signal] == 0) ::sigsuspend(&before);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
}

void leave_child(bool own_session) {
    if (::fork() != 0) return;
    if (own_session) {
        ::setsid();
        if (::fork() != 0) ::_exit(0);
    }
    for (;;) ::pause();
}

/// Returns after the child's exec, which closes the pipe.
void leave_nameless_daemon() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) ::_exit(111);
    if (::fork() == 0) {
        ::setsid();
        if (::fork() != 0) ::_exit(0);
        char self[] = "/proc/self/exe", hold[] = "hold";
        std::string known_by = variable("PROBE_JOB");
        char* const arguments[] = {self, hold, known_by.data(), nullptr};
        char* const environment[] = {nullptr};
        ::execve(self, arguments, environment);
        ::_exit(111);
    }
    ::close(ends[1]);
    char byte = 0;
    if (::read(ends[0], &byte, 1) != 0) ::_exit(111);
    ::close(ends[0]);
}

[[noreturn]] void take_all_memory() {
    constexpr std::size_t kPiece = 4 << 20;
    for (;;) {
        void* piece = ::mmap(nullptr, kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (piece == MAP_FAILED) ::_exit(112);
        std::memset(piece, 1, kPiece);
    }
}

std::string line(int number) {
    std::string text = "rank " + variable("RANK") + " line " + std::to_string(number) + " ";
    text.resize(99, 'x');
    return text + "\n";
}

void print_descriptors() {
    DIR* directory = ::opendir("/proc/self/fd");
    std::string text = "fds:";
    while (const dirent* entry = ::readdir(directory)) {
        const int fd = std::atoi(entry->d_name);
        if (entry->d_name[0] != '.' && fd != ::dirfd(directory)) text += " " + std::to_string(fd);
    }
    ::closedir(directory);
    write_all(1, text + "\n");
}

void say_inside(std::uint64_t number) {
    const auto local_rank = static_cast<std::size_t>(std::atoi(variable("LOCAL_RANK").c_str()));
    const std::size_t bytes = ddprun::kRankLinesOffset + sizeof(ddprun::RankLine) * (local_rank + 1);
    const int fd = std::atoi(variable("DDPRUN_SEGMENT_FD").c_str());
    char* const segment =
        static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    if (segment == MAP_FAILED) ::_exit(111);
    ddprun::RankLine& line =
        reinterpret_cast<ddprun::RankLine*>(segment + ddprun::kRankLinesOffset)[local_rank];
    line.operation = static_cast<std::uint32_t>(ddprun::SegmentOp::AllReduce);
    line.finished_seq = number - 1;
    line.started_seq = number;
    line.joined = 1;
}

void tell(std::uint64_t step, double value, const std::string& name) {
    const auto local_rank = static_cast<std::uint64_t>(std::atoi(variable("LOCAL_RANK").c_str()));
    const auto local_size = static_cast<std::uint32_t>(std::atoi(variable("LOCAL_WORLD_SIZE").c_str()));
    const std::uint64_t offset =
        ddprun::segment_scalars_offset(local_size) + sizeof(ddprun::ScalarRing) * local_rank;
    const int fd = std::atoi(variable("DDPRUN_SEGMENT_FD").c_str());
    void* const memory = ::mmap(nullptr, sizeof(ddprun::ScalarRing), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                static_cast<off_t>(offset));
    if (memory == MAP_FAILED) ::_exit(111);
    ddprun::ScalarRing& ring = *static_cast<ddprun::ScalarRing*>(memory);
    if (ring.is_read == 0) return;
    const std::uint64_t written = ring.written, tag = ring.tag_count;
    name.copy(ring.tags[tag], ddprun::kScalarTagBytes - 1);
    ring.tag_count = tag + 1;
    ring.records[written % ddprun::kScalarRecords] = {step, 1700000000.0 + static_cast<double>(step), value,
                                                      tag};
    ring.written = written + 1;
}

void scribble() {
    const int fd = std::atoi(variable("DDPRUN_SEGMENT_FD").c_str());
    void* const header =
        ::mmap(nullptr, sizeof(ddprun::SegmentHeader), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED) ::_exit(111);
    std::memset(header, 'A', sizeof(ddprun::SegmentHeader));
}

void print_cpus() {
    cpu_set_t set;
    ::sched_getaffinity(0, sizeof set, &set);
    std::string text = "cpus:";
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) text += " " + std::to_string(cpu);
    }
    write_all(1, text + "\n");
}

void print_signals() {
    std::ifstream status("/proc/self/status");
    for (std::string text; std::getline(status, text);) {
        if (text.starts_with("SigBlk") || text.starts_with("SigIgn")) write_all(1, text + "\n");
    }
}

void print_lines(const std::string& how, int count) {
    std::string block;
    for (int i = 0; i < count; ++i) {
        const std::string text = line(i);
        if (how == "lines") {
            write_all(1, text);
        } else if (how == "halves") {
            write_all(1, text.substr(0, 50));
            ::usleep(20'000);
            write_all(1, text.substr(50));
        } else {
            block += text;
            while (block.size() >= 4096) {
                write_all(1, block.substr(0, 4096));
                block.erase(0, 4096);
            }
        }
    }
    write_all(1, block);
}

}  // namespace

int main(int argc, char** argv) {
    int at = 1;
    const auto next = [&]() -> std::string { return at < argc ? argv[at++] : ""; };
    while (at < argc) {
        const std::string act = next();
        if (act == "rank" || act == "generation") {
            // "rank R" guards the acts up to "end".
            if (next() != variable(act == "rank" ? "RANK" : "DDPRUN_GENERATION")) {
                while (at < argc && next() != "end") {
                }
            }
        } else if (act == "once") {
            const int fd = ::open(next().c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
            if (fd < 0) {
                while (at < argc && next() != "end") {
                }
            } else {
                ::close(fd);
            }
        } else if (act == "end") {
        } else if (act == "env") {
            const std::string name = next();
            const char* value = std::getenv(name.c_str());
            write_all(1, value == nullptr ? name + " unset\n" : name + "=" + value + "\n");
        } else if (act == "say") {
            write_all(1, next() + "\n");
        } else if (act == "err") {
            write_all(2, next() + "\n");
        } else if (act == "part") {
            write_all(1, next());
        } else if (act == "exit") {
            return std::atoi(next().c_str());
        } else if (act == "kill") {
            ::raise(std::atoi(next().c_str()));
        } else if (act == "ignore") {
            ::signal(std::atoi(next().c_str()), SIG_IGN);
        } else if (act == "on") {
            const int signal = std::atoi(next().c_str());
            exit_code_on[signal] = std::atoi(next().c_str());
            ::signal(signal, handle);
        } else if (act == "note") {
            const int signal = std::atoi(next().c_str());
            note_on[signal] = argv[at++];
            ::signal(signal, handle);
        } else if (act == "noted") {
            wait_for_note(std::atoi(next().c_str()));
        } else if (act == "report") {
            std::ofstream(variable("TORCHELASTIC_ERROR_FILE"))
                << "{\"message\": {\"message\": \"" << next() << "\", \"extraInfo\": {}}}";
        } else if (act == "await") {
            wait_for_file(next());
        } else if (act == "hold") {
            for (;;) ::pause();
        } else if (act == "stop") {
            ::raise(SIGSTOP);
        } else if (act == "child" || act == "daemon") {
            leave_child(act == "daemon");
        } else if (act == "nameless") {
            leave_nameless_daemon();
        } else if (act == "grow") {
            take_all_memory();
        } else if (act == "sleep") {
            ::usleep(static_cast<useconds_t>(std::atoi(next().c_str())) * 1000);
        } else if (act == "lines" || act == "blocks" || act == "halves") {
            print_lines(act, std::atoi(next().c_str()));
        } else if (act == "cat") {
            char piece[4096];
            for (ssize_t n = 0; (n = ::read(0, piece, sizeof piece)) > 0;)
                write_all(1, {piece, static_cast<std::size_t>(n)});
        } else if (act == "fds") {
            print_descriptors();
        } else if (act == "cpus") {
            print_cpus();
        } else if (act == "sigs") {
            print_signals();
        } else if (act == "inside") {
            say_inside(static_cast<std::uint64_t>(std::atoi(next().c_str())));
        } else if (act == "tell") {
            const std::string step = next(), value = next();
            tell(static_cast<std::uint64_t>(std::atoi(step.c_str())), std::atof(value.c_str()), next());
        } else if (act == "scribble") {
            scribble();
        } else if (act == "closeout") {
            ::close(1);
            ::close(2);
        } else if (act == "cwd") {
            char path[4096];
            if (::getcwd(path, sizeof path) != nullptr) write_all(1, std::string(path) + "\n");
        } else {
            write_all(2, "probe: '" + act + "' is not an act\n");
            return 64;
        }
    }
    return 0;
}
