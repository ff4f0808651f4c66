// Runs a program whose system calls from FIRST to LAST fail with an error and do nothing.
//
//   refused_calls FIRST LAST ERRNO PROGRAM [ARGUMENT...]     FIRST and LAST are numbers of calls
//
// Calls from number 424 on have the same number on every processor and exist since Linux 5.1 or later: if
// they fail with ENOSYS, the kernel behaves like that of RHEL 8 (4.18) and SLES 15. Exit code 77 if filters
// are not available.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tests/support/refused_calls.h"

namespace {

constexpr int kSkipped = 77;

unsigned number(const char* text) { return static_cast<unsigned>(std::strtoul(text, nullptr, 10)); }

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: refused_calls FIRST LAST ERRNO PROGRAM [ARGUMENT...]\n");
        return 64;
    }
    if (!ddprun::test::refuse_calls({number(argv[1]), number(argv[2]), number(argv[3])})) {
        std::perror("refused_calls: seccomp");
        return kSkipped;
    }
    ::execvp(argv[4], argv + 4);
    std::perror(argv[4]);
    return 127;
}
