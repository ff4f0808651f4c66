// Ranks exchange values that need no collective, through the job's key-value store.
//
//     ddprun --nproc-per-node=4 ./roll_call
//
// Every worker writes a note, one worker is elected and reads them all. Exits 0 when no note is missing, 1
// otherwise. Without ddprun there is no store, and the program ends at once.

#include <ddp/run.h>
#include <ddp/store.h>

#include <cstdio>
#include <string>

namespace {

std::string note_of(int rank) { return "note of rank " + std::to_string(rank); }

int call_roll(ddp::Store& store, int ranks) {
    int missing = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        if (store.get(note_of(rank)) != "here is " + std::to_string(rank)) ++missing;
    }
    std::printf("%d workers, %d missing\n", ranks, missing);
    return missing;
}

int run(ddp::World& world) {
    if (!world.context().has_store()) {
        std::printf("a world without a store\n");
        return 0;
    }
    ddp::Store store(world.context());
    store.set(note_of(world.rank()), "here is " + std::to_string(world.rank()));
    const bool elected = store.compare_set("caller", std::nullopt, std::to_string(world.rank())).swapped;
    const int missing = elected ? call_roll(store, world.size()) : 0;
    store.barrier("called");
    const bool all_done = store.add("done", 1) <= world.size();
    return missing == 0 && all_done ? 0 : 1;
}

}  // namespace

int main() { return ddp::run(run); }
