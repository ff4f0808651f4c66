#pragma once

/// The memory that the fake MPI's latest operation reads and writes.
struct FakeMpiMemory {
    const void* in;
    void* out;
};
extern "C" FakeMpiMemory fake_mpi_memory();
