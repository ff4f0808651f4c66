#pragma once

#include <signal.h>

namespace ddprun::test {

/// Resets every signal to its default, in a child before exec: ddprun leaves ignored what its starter
/// ignores, and a shell ignores some for the tests that it runs in the background.
inline void take_default_signals() {
    for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
}

}  // namespace ddprun::test
