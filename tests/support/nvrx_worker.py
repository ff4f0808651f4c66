# A program that recovers by itself, with NVRx (nvidia-resiliency-ext): its ranks all-reduce on gloo, the last but one
# kills itself, and the others begin again without it. Prints "rank R of N has summed S".
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

port = int(os.environ["MASTER_PORT"])
often = timedelta(seconds=0.2)


@inprocess.Wrapper(
    store_kwargs={"port": port + 1, "timeout": timedelta(seconds=60)},
    initialize=inprocess.initialize.RetryController(max_iterations=3),
    abort=inprocess.abort.AbortTorchDistributed(),
    monitor_thread_interval=often,
    monitor_process_interval=often,
    progress_watchdog_interval=often,
    last_call_wait=often,
)
def train(call: inprocess.CallWrapper = None):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Gloo cannot be aborted: a rank whose own neighbours live learns of the failure by its time-out.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port + 2 + call.iteration, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=8))
    for step in range(20):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if call.iteration == 0 and step == 5 and rank == size - 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    print(f"rank {rank} of {size} has summed {ones.item():.0f}", flush=True)
    dist.destroy_process_group()


train()
