// The smallest collective program: every worker contributes its rank, and all get the sum.
//
//     ddprun --nproc-per-node=4 ./sum_of_ranks
//
// Exits 0 when every sum is right, 1 otherwise.

#include <ddp/context.h>
#include <ddp/process_group.h>

#include <cstdio>
#include <exception>
#include <vector>

int main() try {
    const ddp::Context context = ddp::Context::from_env();
    const auto group = ddp::ProcessGroup::create(context);

    std::vector<double> values(1000, group->rank());
    group->all_reduce(ddp::buffer_of(std::span(values))).wait();

    const double expected = 0.5 * group->size() * (group->size() - 1);
    for (const double value : values) {
        if (value != expected) {
            std::fprintf(stderr, "rank %d: %g in place of %g\n", group->rank(), value, expected);
            return 1;
        }
    }
    if (group->rank() == 0)
        std::printf("%d workers, the sum of their ranks is %g\n", group->size(), expected);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "sum_of_ranks: %s\n", error.what());
    return 1;
}
