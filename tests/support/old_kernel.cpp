// Runs a program as on an old kernel: system calls that came later answer ENOSYS.
//
//   old_kernel PROGRAM [ARGUMENT...]
//
// From number 424 on a call has the same number on every processor, and came with Linux 5.1 or later: what is left is
// the kernel of RHEL 8 (4.18) and SLES 15. Exit code 77 where filters are not to be had.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>

namespace {

constexpr unsigned kFirstNewCall = 424;
constexpr int kSkipped = 77;

bool forget_new_calls() {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kFirstNewCall, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof filter / sizeof *filter, filter};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: old_kernel PROGRAM [ARGUMENT...]\n");
        return 64;
    }
    if (!forget_new_calls()) {
        std::perror("old_kernel: seccomp");
        return kSkipped;
    }
    ::execvp(argv[1], argv + 1);
    std::perror(argv[1]);
    return 127;
}
