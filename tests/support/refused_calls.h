#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <cstddef>

namespace ddprun::test {

/// System calls by number, and the errno with which they fail without doing anything.
struct Refused {
    unsigned first, last, error;
};

/// Installs a filter of system calls. False: filters are not available.
template <std::size_t length>
bool install_filter(sock_filter (&filter)[length]) {
    const sock_fprog program{length, filter};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/// Applies to this process and its children from now on. False: filters are not available.
inline bool refuse_calls(const Refused& calls) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, calls.first, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, calls.last, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | calls.error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return install_filter(filter);
}

/// The same for one call with this second argument, such as a command of fcntl. For little-endian machines.
inline bool refuse_call(unsigned number, unsigned second_argument, unsigned error) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, second_argument, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return install_filter(filter);
}

}  // namespace ddprun::test
