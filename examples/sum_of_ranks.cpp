// The smallest collective program: every worker contributes its rank, and all get the sum.
//
//     ddprun --nproc-per-node=4 ./sum_of_ranks
//
// Exits 0 when every sum is right, 1 otherwise.

#include <ddp/run.h>

#include <cstdio>
#include <vector>

int main() {
    return ddp::run([](ddp::World& world) {
        std::vector<double> values(1000, world.rank());
        world.group().all_reduce(ddp::buffer_of(std::span(values))).wait();

        const double expected = 0.5 * world.size() * (world.size() - 1);
        for (const double value : values) {
            if (value != expected) {
                std::fprintf(stderr, "rank %d: %g in place of %g\n", world.rank(), value, expected);
                return 1;
            }
        }
        if (world.rank() == 0)
            std::printf("%d workers, the sum of their ranks is %g\n", world.size(), expected);
        return 0;
    });
}
