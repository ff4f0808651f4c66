#include "env/io/background_call.h"

#include <pthread.h>
#include <signal.h>

namespace ddprun {
namespace {

using Call = std::function<void()>;

void* run_call(void* argument) {
    const std::unique_ptr<Call> call(static_cast<Call*>(argument));
    (*call)();
    return nullptr;
}

}  // namespace

void call_in_background(std::function<void()> call) {
    auto held = std::make_unique<Call>(std::move(call));
    sigset_t all, before;
    ::sigfillset(&all);
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread{};
    const bool started = ::pthread_create(&thread, &attributes, &run_call, held.get()) == 0;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_attr_destroy(&attributes);
    if (started) (void)held.release();  // the thread's now
    else (*held)();
}

}  // namespace ddprun
