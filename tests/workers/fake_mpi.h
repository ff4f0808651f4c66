#pragma once

/// What the latest operation that the fake MPI was given reads and writes.
struct FakeMpiMemory {
    const void* in;
    void* out;
};
extern "C" FakeMpiMemory fake_mpi_memory();
