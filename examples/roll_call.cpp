// Ranks exchange values that need no collective, through the job's key-value store.
//
//     ddprun --nproc-per-node=4 ./roll_call
//
// Every worker writes a note, one worker is elected and reads them all. Exits 0 when no note is missing, 1
// otherwise. Without ddprun there is no store, and the program ends at once.

#include <ddp/context.h>
#include <ddp/store.h>

#include <cstdio>
#include <exception>
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

}  // namespace

int main() try {
    const ddp::Context context = ddp::Context::from_env();
    if (!context.has_store()) {
        std::printf("a world without a store\n");
        return 0;
    }
    ddp::Store store(context);
    store.set(note_of(context.rank()), "here is " + std::to_string(context.rank()));
    const bool elected = store.compare_set("caller", std::nullopt, std::to_string(context.rank())).swapped;
    const int missing = elected ? call_roll(store, context.world_size()) : 0;
    store.barrier("called");
    const bool all_done = store.add("done", 1) <= context.world_size();
    return missing == 0 && all_done ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "roll_call: %s\n", error.what());
    return 1;
}
