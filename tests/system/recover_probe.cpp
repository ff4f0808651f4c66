// A worker that survives the end of a generation, without libddp: it speaks the lifeline's letters
// (env/lifeline.h) and commits a unit every few milliseconds. All ranks of a generation meet before they go
// on.
//
//   recover_probe UNITS [ACT RANK]    ends after UNITS units; ACT is what rank RANK does:
//     refuse      announces that it does not survive
//     deaf        never leaves a generation
//     crash-new   a replacement of this rank exits with code 3 before it joins
//     exit-new    a replacement of this rank exits with 0 before it joins
//     stuck-new   a replacement of this rank never joins
//     throw       reports an error after 10 units, once, and hangs in its exit
//     link        leaves its first generation after 10 units, as if a connection had broken
// On several hosts the ranks meet by files in the directory RECOVER_MEETING, and end when its file `finish`
// is there.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "env/kept.h"
#include "env/lifeline.h"
#include "env/segment.h"

namespace {

using namespace ddprun;

std::map<std::string, std::string> g_changed;  // by the last letter G
volatile sig_atomic_t g_stopped = 0;

std::string variable(const char* name) {
    if (const auto found = g_changed.find(name); found != g_changed.end()) return found->second;
    const char* const value = std::getenv(name);
    return value == nullptr ? "" : value;
}
int number(const char* name) { return std::atoi(variable(name).c_str()); }

[[noreturn]] void fail(const char* what) {
    std::perror(what);
    std::_Exit(9);
}

char* map(int fd, std::size_t offset, std::size_t bytes) {
    void* const at =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
    if (at == MAP_FAILED) fail("mmap");
    return static_cast<char*>(at);
}

class Worker {
  public:
    Worker(std::uint64_t units, std::string act)
        : units_(units),
          act_(std::move(act)),
          local_rank_(number("LOCAL_RANK")),
          lifeline_(number("DDPRUN_LIFELINE_FD")),
          generation_(static_cast<std::uint64_t>(number("DDPRUN_GENERATION"))) {
        if (!variable("DDPRUN_KEPT_FD").empty()) {
            auto* const base = map(number("DDPRUN_KEPT_FD"), 0, kept_slots_offset(64));
            kept_ = reinterpret_cast<KeptLine*>(base + kKeptLinesOffset) + local_rank_;
        }
        is_new_ = generation_ > 1;
    }

    int run() {
        if (act_ == "crash-new" && is_new_) return 3;
        if (act_ == "exit-new" && is_new_) return 0;
        if (kept_ != nullptr) say(act_ == "refuse" ? "Rrestart it is told to" : "Rin-place 0");
        if (act_ == "stuck-new" && is_new_) ::pause();
        open_segment(number("DDPRUN_SEGMENT_FD"));
        for (;;) {
            if (meet() && work()) return 0;
            if (!follow()) return 7;
        }
    }

  private:
    static unsigned long long as_number(std::uint64_t value) { return value; }
    std::uint64_t commits() const { return kept_ == nullptr ? 0 : kept_->commits.load(); }
    void say(const std::string& packet) const {
        (void)::send(lifeline_, packet.data(), packet.size(), MSG_NOSIGNAL);
    }
    bool is_aborted() const { return act_ != "deaf" && header_->aborted.load() != 0; }

    void open_segment(int fd) {
        char* const base = map(fd, 0, segment_scalars_offset(64));
        header_ = reinterpret_cast<SegmentHeader*>(base);
        line_ = reinterpret_cast<RankLine*>(base + kRankLinesOffset) + local_rank_;
        met_ = reinterpret_cast<std::atomic<std::uint32_t>*>(map(fd, header_->arena_offset, 4096));
        line_->pid = static_cast<std::uint32_t>(::getpid());
        line_->joined = 1;
        ::close(fd);
    }

    /// The same by a file to which each rank adds its number of commits.
    bool meet_by_files() const {
        const std::string file = meeting_ + "/g" + std::to_string(generation_);
        const int fd = ::open(file.c_str(), O_RDWR | O_APPEND | O_CREAT, 0600);
        std::uint64_t most = commits();
        if (fd < 0 || ::write(fd, &most, sizeof most) != sizeof most) fail(file.c_str());
        std::vector<std::uint64_t> all(static_cast<std::size_t>(number("WORLD_SIZE")));
        const auto bytes = static_cast<ssize_t>(all.size() * sizeof most);
        while (::pread(fd, all.data(), static_cast<std::size_t>(bytes), 0) < bytes) {
            if (is_aborted()) return ::close(fd), false;
            ::usleep(1000);
        }
        ::close(fd);
        kept_->commits = *std::max_element(all.begin(), all.end());
        say("Rin-place " + std::to_string(generation_));
        return true;
    }

    /// False: the generation has ended.
    bool meet() const {
        if (!meeting_.empty()) return meet_by_files();
        std::atomic<std::uint32_t>& most = met_[1];
        const auto own = static_cast<std::uint32_t>(commits());
        for (std::uint32_t seen = most; seen < own && !most.compare_exchange_weak(seen, own);) {
        }
        met_->fetch_add(1);
        while (met_->load() < header_->world_size) {
            if (is_aborted()) return false;
            ::usleep(200);
        }
        if (kept_ != nullptr) kept_->commits = most;
        say("Rin-place " + std::to_string(generation_));
        return true;
    }

    bool is_told_to_finish() const {
        return !meeting_.empty() && ::access((meeting_ + "/finish").c_str(), F_OK) == 0;
    }

    void tell() const {
        std::printf("rank %d runs in generation %llu as %d from %llu\n", number("RANK"),
                    as_number(generation_), ::getpid(), as_number(commits()));
        std::fflush(stdout);
    }

    /// True: this rank may end.
    bool work() {
        for (int units = 0; !is_aborted(); ++units) {
            ::usleep(2000);
            if (units == 3) tell();
            if (g_stopped != 0) return true;
            if (commits() >= units_ || is_told_to_finish()) return await_release();
            if (act_ == "link" && generation_ == 1 && units == 10) return false;
            if (act_ == "throw" && !is_new_ && units == 10) {
                std::FILE* const report = std::fopen(variable("TORCHELASTIC_ERROR_FILE").c_str(), "w");
                std::fputs(R"({"message": "the first process failed"})", report);
                std::fclose(report);
                ::pause();
                std::_Exit(3);
            }
            if (kept_ == nullptr) continue;
            kept_->commits.fetch_add(1);
            kept_->generation = generation_;
        }
        return false;
    }

    /// Waits until all ranks have finished. False: the generation has ended.
    bool await_release() {
        if (kept_ == nullptr) return true;
        say("F" + std::to_string(generation_));
        while (!is_aborted() && !has_next_) {
            pollfd one{lifeline_, POLLIN, 0};
            if (::poll(&one, 1, 1) > 0 && hear() == lifeline::kRelease) return true;
        }
        return false;
    }

    /// Leaves the generation and waits for the next one. False: there is none.
    bool follow() {
        say("L" + std::to_string(generation_) + ' ' + std::to_string(commits()) + " a peer has ended");
        for (const std::uint64_t before = generation_; generation_ == before;) {
            if (!has_next_ && hear() == 0) return false;
            if (!has_next_) continue;
            has_next_ = false;
            generation_ = static_cast<std::uint64_t>(number("DDPRUN_GENERATION"));
        }
        return true;
    }

    /// Reads one packet and returns its letter; 0: no generation follows.
    char hear() {
        char packet[lifeline::kMaxPacket];
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        iovec bytes{packet, sizeof packet};
        msghdr message{};
        message.msg_iov = &bytes;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        const ssize_t n = ::recvmsg(lifeline_, &message, 0);
        if (n <= 0) return 0;
        if (packet[0] != lifeline::kGeneration) return packet[0];
        if (n == 1) return 0;
        std::string text(packet + 1, static_cast<std::size_t>(n) - 1);
        for (char* line = std::strtok(text.data(), "\n"); line != nullptr;
             line = std::strtok(nullptr, "\n")) {
            char* const value = std::strchr(line, '=');
            g_changed[std::string(line, value)] = value + 1;
        }
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
        open_segment(fd);
        has_next_ = true;
        return packet[0];
    }

    std::uint64_t units_;
    std::string act_, meeting_ = variable("RECOVER_MEETING");
    int local_rank_, lifeline_;
    std::uint64_t generation_;
    KeptLine* kept_ = nullptr;
    bool is_new_ = false, has_next_ = false;
    SegmentHeader* header_ = nullptr;
    RankLine* line_ = nullptr;
    std::atomic<std::uint32_t>* met_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
    const bool acts = argc > 3 && std::atoi(argv[3]) == std::atoi(std::getenv("RANK"));
    ::signal(SIGTERM, [](int) { g_stopped = 1; });
    return Worker(std::strtoull(argv[1], nullptr, 10), acts ? argv[2] : "").run();
}
