#include "env/io/library.h"

#include <dlfcn.h>
#include <signal.h>

#include <array>
#include <mutex>

namespace ddprun {
namespace {

struct Noted {
    std::mutex mutex;
    int users = 0;
    std::array<struct sigaction, NSIG> dispositions{};
};
Noted noted;

struct sigaction disposition_of(int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action;
}

}  // namespace

KeptSignals::KeptSignals() {
    const std::lock_guard lock(noted.mutex);
    if (++noted.users > 1) return;
    for (int signal = 1; signal < NSIG; ++signal)
        noted.dispositions[static_cast<std::size_t>(signal)] = disposition_of(signal);
}

KeptSignals::~KeptSignals() {
    const std::lock_guard lock(noted.mutex);
    if (--noted.users > 0) return;
    for (int signal = 1; signal < NSIG; ++signal) {
        const struct sigaction& before = noted.dispositions[static_cast<std::size_t>(signal)];
        if (disposition_of(signal).sa_handler != before.sa_handler) ::sigaction(signal, &before, nullptr);
    }
}

void* load_library(const char* file) {
    const KeptSignals kept;
    return ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

}  // namespace ddprun
