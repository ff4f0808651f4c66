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
    batch = 8 if size <= 4096 else 1  # it takes milliseconds on busy cores
    rounds = 11
    times = []
    for turn in range(rounds + 3):
        buffer.fill_(1.0 + turn % 3)
        before = time.perf_counter()
        for _ in range(batch):
            dist.all_reduce(buffer)
        times.append((time.perf_counter() - before) / batch)
    if dist.get_rank() == 0:
        print(size, 1e6 * statistics.median(times[3:]), flush=True)
dist.destroy_process_group()
