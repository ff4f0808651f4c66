// A module of backend "mpi" (workers/ddp/mpi/module.h): this process is rank 0 of 2, and no request ever
// completes.
#include "fake_mpi.h"

#include "ddp/mpi/module.h"

namespace ddp::mpi {

struct Communicator {};
struct Request {};

namespace {

Communicator world;
Request endless;
Operation begun;

const char* open(Communicator** made, About* about) {
    *made = &world;
    *about = {.library = "a fake", .takes_threads = false};
    return nullptr;
}
const char* place(Communicator*, int* rank, int* size) {
    *rank = 0;
    *size = 2;
    return nullptr;
}
const char* begin(Communicator*, const Operation* operation, Request** request) {
    begun = *operation;
    *request = &endless;
    return nullptr;
}
const char* test(Request*, bool* done) {
    *done = false;
    return nullptr;
}
const char* split(Communicator*, int, int, Communicator**) { return "there is no split"; }
void close(Communicator*) {}
void abandon() {}

constexpr Module kModule{kModuleVersion, open, place, begin, test, split, close, abandon};

}  // namespace
}  // namespace ddp::mpi

extern "C" __attribute__((visibility("default"))) const ddp::mpi::Module* ddp_mpi_module();
extern "C" const ddp::mpi::Module* ddp_mpi_module() { return &ddp::mpi::kModule; }

extern "C" __attribute__((visibility("default"))) FakeMpiMemory fake_mpi_memory() {
    return {ddp::mpi::begun.in, ddp::mpi::begun.out};
}
