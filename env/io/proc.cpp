#include "env/io/proc.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

pid_t read_number_in_proc() {
    char text[32] = {};
    return ::readlink("/proc/self", text, sizeof text - 1) > 0 ? std::atoi(text) : 0;
}

/// Our pid in /proc; 0 when /proc does not tell. Read once for a process, because ddprun asks several times
/// for each worker; a fork, whose /proc may be another, asks again.
pid_t number_in_proc() {
    static std::atomic<std::uint64_t> known{0};  // our pid above the number
    const auto pid = static_cast<std::uint32_t>(::getpid());
    std::uint64_t pair = known.load(std::memory_order_relaxed);
    if (pair >> 32 != pid) {
        pair = std::uint64_t{pid} << 32 | static_cast<std::uint32_t>(read_number_in_proc());
        known.store(pair, std::memory_order_relaxed);
    }
    return static_cast<pid_t>(pair & 0xffffffffU);
}

}  // namespace

bool has_own_proc() { return number_in_proc() == ::getpid(); }

const std::string& own_proc() {
    // A file can have nothing below it.
    static const std::string proc = "/proc", nothing = "/dev/null";
    return has_own_proc() ? proc : nothing;
}

pid_t own_number_in_proc() {
    const pid_t number = number_in_proc();
    return number > 0 ? number : ::getpid();
}

std::string boot_id() {
    return std::string(trim(read_file("/proc/sys/kernel/random/boot_id", 128).value_or("")));
}

}  // namespace ddprun
