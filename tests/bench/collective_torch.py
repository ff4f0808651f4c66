"""PyTorch's side of bench_collectives and bench_nodes: gloo under ddprun, prints "bytes microseconds" as collective_loop.h does."""

import statistics
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
for size in map(int, sys.argv[2:]):
    whole, other = torch.empty(size // 4), torch.empty(size // 4)
    each = size // 4 // ranks
    call = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(other[:each], whole[: each * ranks]),
        "all_gather": lambda: dist.all_gather_into_tensor(other[: each * ranks], whole[:each]),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=ranks - 1),
    }[sys.argv[1]]
    # Each call by itself, and many of them: a mean of few is what the slowest took.
    calls = max(31, min(501, (128 << 20) // size))
    times = []
    for turn in range(calls + 20):
        whole.fill_(1.0 + turn % 3)
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    if dist.get_rank() == 0:
        print(size, 1e6 * statistics.median(times[20:]), flush=True)
dist.destroy_process_group()
