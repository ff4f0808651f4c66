// Runs a program with system calls that answer an error and do nothing.
//
//   refused_calls FIRST LAST ERRNO PROGRAM [ARGUMENT...]     numbers of calls, from FIRST to LAST
//
// From number 424 on a call has the same number on every processor, and came with Linux 5.1 or later: without
// those (ENOSYS) what is left is the kernel of RHEL 8 (4.18) and SLES 15. Exit code 77 where filters are not
// to be had.
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
