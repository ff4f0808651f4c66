#pragma once

#include "ddp/process_group.h"

/// What every backend asks of the arguments of a collective. `call` is its name. Each throws InvalidInput.
namespace ddp {

void require_buffer(const char* call, const Buffer& buffer);
/// Memory of the CUDA device that the `backend` of this rank of the world works on.
void require_memory_of(const char* backend, const char* call, const Buffer& buffer, Device device, int rank);
/// Everything but averages of integers.
void require_reducible(const char* call, const Buffer& buffer, ReduceOp op);
void require_root(const char* call, int root, int size);
/// Another rank of the group.
void require_peer(const char* call, int peer, int rank, int size);
/// `large` (the call's "input" or "output") has n times the elements of `small`.
void require_n_times(const char* call, const char* large_name, const Buffer& large, const Buffer& small,
                     int n);
/// Two equal buffers of n slices.
void require_slices(const char* call, const Buffer& output, const Buffer& input, int n);

}  // namespace ddp
