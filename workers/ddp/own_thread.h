#pragma once

#include <functional>
#include <thread>

namespace ddp {

/// A thread of libddp's own, under a name of 15 letters at most. The program's signals are for the program's
/// threads: SIGTERM must not interrupt a collective.
std::thread start_own_thread(const char* name, std::function<void()> run);

}  // namespace ddp
