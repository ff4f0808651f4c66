// A worker for launch measurements. Its first statement reads the clock; linked statically, so that the time
// before main is the kernel's. usage: stamp FILE [hold|ignore]
//   FILE    4096+ bytes: u64 count, then one CLOCK_MONOTONIC nanosecond stamp per process that ran
//   hold    stays until a signal ends it
//   ignore  the same, deaf to SIGTERM

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

int main(int argc, char** argv) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (argc < 2) return 2;
    const int fd = open(argv[1], O_RDWR | O_CLOEXEC);
    if (fd < 0) return 3;
    constexpr std::size_t kBytes = 65536 * 8;
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return 4;
    auto* words = static_cast<std::uint64_t*>(memory);
    const std::uint64_t slot = __atomic_fetch_add(&words[0], 1, __ATOMIC_RELAXED);
    __atomic_store_n(
        &words[slot + 1],
        static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec),
        __ATOMIC_RELEASE);
    const char* mode = argc > 2 ? argv[2] : "";
    if (*mode == '\0') return 0;
    if (std::strcmp(mode, "ignore") == 0) signal(SIGTERM, SIG_IGN);
    for (;;) pause();
}
