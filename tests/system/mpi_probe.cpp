// A worker that uses MPI only. Its arguments choose what it does:
//   abort RANK CODE       this rank calls MPI_Abort
//   leave RANK            this rank ends with exit code 0 and without MPI_Finalize
//   kill-once RANK FILE   this rank kills itself, unless the file exists; it makes it first
//   hold                  says that it is up and waits for ever
//   apart                 makes a directory of its own in TMPDIR, for the daemon that MPI starts without a
//                         launcher: two daemons that make the same directories at the same time can fail
// Otherwise it passes a number around a ring, adds up all ranks and says what it found.
#define OMPI_SKIP_MPICXX 1
#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

int rank = 0, size = 1;

bool is_my_turn(int argc, char** argv, const char* act) {
    return argc > 2 && std::strcmp(argv[1], act) == 0 && std::atoi(argv[2]) == rank;
}

/// The sum when the number is back at rank 0: the size of the world.
int ring() {
    int value = 1;
    if (size == 1) return value;
    if (rank == 0) {
        MPI_Send(&value, 1, MPI_INT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(&value, 1, MPI_INT, size - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        return value;
    }
    MPI_Recv(&value, 1, MPI_INT, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    ++value;
    MPI_Send(&value, 1, MPI_INT, (rank + 1) % size, 0, MPI_COMM_WORLD);
    return value;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::strcmp(argv[1], "apart") == 0) {
        const std::string own = std::string(std::getenv("TMPDIR")) + "/" + std::to_string(::getpid());
        if (::mkdir(own.c_str(), 0700) != 0 || ::setenv("TMPDIR", own.c_str(), 1) != 0) return 1;
    }
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc > 1 && std::strcmp(argv[1], "hold") == 0) {
        MPI_Barrier(MPI_COMM_WORLD);
        std::printf("up: %d of %d\n", rank, size);
        std::fflush(stdout);
        for (;;) ::pause();
    }
    if (is_my_turn(argc, argv, "abort")) MPI_Abort(MPI_COMM_WORLD, std::atoi(argv[3]));
    if (is_my_turn(argc, argv, "leave")) ::_exit(0);
    if (is_my_turn(argc, argv, "kill-once") && ::open(argv[3], O_CREAT | O_EXCL, 0600) >= 0) ::raise(SIGKILL);
    const int passed = ring();
    int sum = 0;
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    std::printf("rank %d of %d: ring %d, sum %d\n", rank, size, passed, sum);
    MPI_Finalize();
    return 0;
}
