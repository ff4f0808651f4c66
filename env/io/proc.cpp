#include "env/io/proc.h"

#include <unistd.h>

#include <cstdlib>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

/// Our pid in /proc; 0 when /proc does not tell.
pid_t number_in_proc() {
    char text[32] = {};
    return ::readlink("/proc/self", text, sizeof text - 1) > 0 ? std::atoi(text) : 0;
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
