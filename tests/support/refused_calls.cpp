// Runs a program with system calls that answer an error and do nothing.
//
//   refused_calls FIRST LAST ERRNO PROGRAM [ARGUMENT...]     numbers of calls, from FIRST to LAST
//
// From number 424 on a call has the same number on every processor, and came with Linux 5.1 or later: without those
// (ENOSYS) what is left is the kernel of RHEL 8 (4.18) and SLES 15. Exit code 77 where filters are not to be had.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kSkipped = 77;

struct Refused {
    unsigned first, last, error;
};

bool refuse(const Refused& calls) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, calls.first, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, calls.last, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | calls.error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof filter / sizeof *filter, filter};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

unsigned number(const char* text) { return static_cast<unsigned>(std::strtoul(text, nullptr, 10)); }

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: refused_calls FIRST LAST ERRNO PROGRAM [ARGUMENT...]\n");
        return 64;
    }
    if (!refuse({number(argv[1]), number(argv[2]), number(argv[3])})) {
        std::perror("refused_calls: seccomp");
        return kSkipped;
    }
    ::execvp(argv[4], argv + 4);
    std::perror(argv[4]);
    return 127;
}
