// Open MPI's side of bench_allreduce, which starts it with mpirun. Prints "bytes microseconds".
#include <mpi.h>

#include "allreduce_loop.h"

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const std::vector<std::size_t> sizes = bench::sizes_from(argc, argv);
    std::vector<float> buffer(*std::max_element(sizes.begin(), sizes.end()) / sizeof(float));
    bench::print_all(rank, buffer.data(), sizes, [&](std::size_t count) {
        MPI_Allreduce(MPI_IN_PLACE, buffer.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD);
    });
    MPI_Finalize();
    return 0;
}
