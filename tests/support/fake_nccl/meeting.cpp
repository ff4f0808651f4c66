#include "tests/support/fake_nccl/meeting.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace fake {

struct Meeting::Mailbox {
    std::atomic<bool> full;
    alignas(4096) std::byte message[kMailboxBytes];
};
struct Meeting::Shared {
    std::atomic<int> joined;
    std::atomic<int> finalized;
    std::atomic<bool> aborted;
    std::atomic<std::uint64_t> arrived[kMaxRanks];
    alignas(4096) std::byte areas[kMaxRanks][kAreaBytes];
    Mailbox mailboxes[kMaxRanks][kMaxRanks];  ///< [from][to]
};

namespace {

/// Names created by this process; the remaining ones are removed at exit.
struct Names {
    std::mutex mutex;
    std::vector<std::string> made;
    ~Names() {
        for (const std::string& name : made) ::shm_unlink(name.c_str());
    }
};
Names& names() {
    static Names all;
    return all;
}

}  // namespace

void nap() {
    constexpr timespec kNap{.tv_sec = 0, .tv_nsec = 50'000};
    ::nanosleep(&kNap, nullptr);
}

std::string Meeting::create() {
    static std::atomic<int> counter{0};
    std::string name = "/fake-nccl-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    const int fd = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) std::abort();
    ::close(fd);
    const std::lock_guard lock(names().mutex);
    names().made.push_back(name);
    return name;
}

Meeting::Meeting(const std::string& name, int rank, int ranks) : rank_(rank), ranks_(ranks) {
    const int fd = ::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) std::abort();
    void* const address = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) std::abort();
    ::close(fd);
    shared_ = static_cast<Shared*>(address);
    if (shared_->joined.fetch_add(1) + 1 == ranks) ::shm_unlink(name.c_str());
}

Meeting::~Meeting() { ::munmap(shared_, sizeof(Shared)); }

bool Meeting::complete() const { return shared_->joined.load() == ranks_; }

bool Meeting::arrive(const std::atomic<bool>& aborted) {
    shared_->arrived[rank_].store(++step_);
    for (int peer = 0; peer < ranks_; ++peer) {
        while (shared_->arrived[peer].load() < step_) {
            if (aborted) return false;
            nap();
        }
    }
    return true;
}

bool Meeting::post(int to, std::span<const std::byte> message, const std::atomic<bool>& aborted) {
    Mailbox& box = shared_->mailboxes[rank_][to];
    while (box.full) {
        if (aborted) return false;
        nap();
    }
    std::copy(message.begin(), message.end(), box.message);
    box.full = true;
    return true;
}

bool Meeting::fetch(int from, std::span<std::byte> message, const std::atomic<bool>& aborted) {
    Mailbox& box = shared_->mailboxes[from][rank_];
    while (!box.full) {
        if (aborted) return false;
        nap();
    }
    std::copy_n(box.message, message.size(), message.begin());
    box.full = false;
    return true;
}

std::byte* Meeting::area(int rank) const { return shared_->areas[rank]; }
void Meeting::finalize() { shared_->finalized.fetch_add(1); }
void Meeting::note_abort() { shared_->aborted = true; }
bool Meeting::somebody_aborted() const { return shared_->aborted; }
bool Meeting::all_finalized() const { return shared_->finalized.load() == ranks_; }

}  // namespace fake
