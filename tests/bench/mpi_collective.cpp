// Open MPI's side of bench_collectives and bench_nodes, which start it with mpirun. Prints "bytes
// microseconds". Arguments: the collective, then the sizes.
#include <mpi.h>

#include "collective_loop.h"

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    bench::Job job(argc, argv);
    float *const from = job.from.data(), *const to = job.to.data();
    bench::print_all(rank, ranks, from, job.sizes, [&](std::size_t count) {
        const int all = static_cast<int>(count), each = all / ranks;
        const auto world = MPI_COMM_WORLD;
        switch (job.collective) {
            case bench::Collective::AllReduce:
                return MPI_Allreduce(MPI_IN_PLACE, from, all, MPI_FLOAT, MPI_SUM, world);
            case bench::Collective::ReduceScatter:
                return MPI_Reduce_scatter_block(from, to, each, MPI_FLOAT, MPI_SUM, world);
            case bench::Collective::AllGather:
                return MPI_Allgather(from, each, MPI_FLOAT, to, each, MPI_FLOAT, world);
            case bench::Collective::AllToAll:
                return MPI_Alltoall(from, each, MPI_FLOAT, to, each, MPI_FLOAT, world);
            case bench::Collective::Broadcast: return MPI_Bcast(from, all, MPI_FLOAT, ranks - 1, world);
        }
        return MPI_ERR_OTHER;
    });
    MPI_Finalize();
    return 0;
}
