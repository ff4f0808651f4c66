#include "env/io/background_call.h"

#include <signal.h>

#include <system_error>

namespace ddprun {

Result<std::thread> start_thread(std::string_view attempt, std::function<void()> run) {
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    int error = 0;
    try {
        thread = std::thread(std::move(run));
    } catch (const std::system_error& failure) {
        error = failure.code().value();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error != 0) return Error::system(attempt, error);
    return thread;
}

void call_in_background(std::function<void()> call) {
    Result<std::thread> thread = start_thread("start a thread", call);
    if (thread) thread->detach();
    else call();
}

}  // namespace ddprun
