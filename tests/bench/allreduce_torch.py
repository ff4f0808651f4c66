"""PyTorch's side of bench_allreduce and bench_nodes: gloo under ddprun, prints "bytes microseconds" as allreduce_loop.h does."""

import statistics
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
for size in map(int, sys.argv[1:]):
    buffer = torch.empty(size // 4)
    # Each call by itself, and many of them: a mean of few is what the slowest took.
    calls = max(31, min(501, (128 << 20) // size))
    times = []
    for turn in range(calls + 20):
        buffer.fill_(1.0 + turn % 3)
        before = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - before)
    if dist.get_rank() == 0:
        print(size, 1e6 * statistics.median(times[20:]), flush=True)
dist.destroy_process_group()
