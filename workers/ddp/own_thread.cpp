#include "ddp/own_thread.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace ddp {

std::thread start_own_thread(const char* name, std::function<void()> run) {
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread(std::move(run));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_setname_np(thread.native_handle(), name);
    return thread;
}

}  // namespace ddp
