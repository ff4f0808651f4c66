#!/usr/bin/env python3
"""Samples per second of the train program on CPUs against PyTorch's DistributedDataParallel with gloo, in turns.

    bench_train_gloo.py DDPRUN TRAIN [--isa avx2|avx512|native] [--epochs N] [--passes N] [--json FILE]

The model is the perceptron 784-1024-1024-1024-10 in float32, SGD with momentum, batches of 128 on each rank, one thread
for each rank. Both libraries are told the same instruction set, or the ratio would be one of OpenBLAS to MKL (which takes
AVX-512 on Intel's processors only); `native` leaves the choice to each. Both run with 1 rank and with 2, in turns: the ratio
with 1 rank is that of the computation alone, and what 2 ranks add to it is the reduction's. On both sides the time is that of
training steps on samples in memory, picked by a random order; medians count. Of ours the part of the time that was spent in
collectives is shown, apart from waiting for the other. Exit code 77, with one line, where there is no PyTorch.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INPUTS, HIDDEN, CLASSES, BATCH, STEPS = 784, [1024, 1024, 1024], 10, 128, 12
BAR = 1.5
EXPOSED_BAR = 0.08
RANKS = (1, 2)
#: What holds OpenBLAS, MKL, oneDNN and PyTorch's own loops to an instruction set.
ISA = {
    "native": {},
    "avx2": {"OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
             "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"OPENBLAS_CORETYPE": "SkylakeX", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
               "ATEN_CPU_CAPABILITY": "avx512"},
}

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ImportError:
    print("skipped: no PyTorch in this Python")
    sys.exit(77)


def ours(options, ranks):
    """Median over the epochs but the first, and the shares of communication and waiting."""
    samples = STEPS * BATCH * ranks * 10 // 9 + 16  # a tenth is held out
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.json"
        command = [options.ddprun, f"--nproc-per-node={ranks}", options.train, "--device=cpu",
                   f"--data=synthetic:{samples},{INPUTS},{CLASSES}", f"--hidden={','.join(map(str, HIDDEN))}",
                   f"--batch-size={BATCH}", f"--epochs={options.epochs}", "--lr=0.001", "--no-scale-lr",
                   f"--checkpoint-every={options.epochs}", f"--checkpoint-dir={folder}/checkpoints", f"--log-json={log}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"train failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
        epochs = json.loads(Path(log).read_text())["epochs"][1:]
    return {key: statistics.median(epoch[key] for epoch in epochs)
            for key in ("samples_per_second", "communication_share", "waiting_share")}


def pytorch_rank(rank, options, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    widths = [INPUTS] + HIDDEN
    layers = [layer for i, o in zip(widths, HIDDEN) for layer in (torch.nn.Linear(i, o), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], CLASSES)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4, fused=True)
    values, labels = torch.rand(STEPS * BATCH, INPUTS) * 2 - 1, torch.randint(CLASSES, (STEPS * BATCH,))

    def epoch():
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(values[rows]), labels[rows]).backward()
            optimizer.step()

    rates = []
    for _ in range(options.epochs):
        dist.barrier()
        start = time.perf_counter()
        epoch()
        rates.append(STEPS * BATCH * ranks / (time.perf_counter() - start))
    if rank == 0:
        Path(f"{folder}/rate").write_text(str(statistics.median(rates[1:])))
    dist.destroy_process_group()


def pytorch(options, ranks):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(pytorch_rank, args=(options, ranks, folder), nprocs=ranks)
        return float(Path(f"{folder}/rate").read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ddprun")
    parser.add_argument("train")
    parser.add_argument("--isa", choices=ISA, default="avx2")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in {name for settings in ISA.values() for name in settings} | {"MKL_CBWR"}:
        os.environ.pop(name, None)
    os.environ.update(ISA[options.isa])
    mine, theirs = {ranks: [] for ranks in RANKS}, {ranks: [] for ranks in RANKS}
    for _ in range(options.passes):
        for ranks in RANKS:
            mine[ranks].append(ours(options, ranks))
            theirs[ranks].append(pytorch(options, ranks))
    print(f"PyTorch {torch.__version__}, {options.passes} passes in turns, instruction set {options.isa}, {os.cpu_count()} CPUs, "
          f"load {os.getloadavg()[0]:.1f}")
    print(f"{'ranks':>5} {'train':>10} {'PyTorch':>10} {'ratio':>6} {'communication':>14} {'waiting':>8}")
    ratio = {}
    for ranks in RANKS:
        median = {key: statistics.median(one[key] for one in mine[ranks]) for key in mine[ranks][0]}
        ratio[ranks] = statistics.median(a["samples_per_second"] / b for a, b in zip(mine[ranks], theirs[ranks]))
        print(f"{ranks:5} {median['samples_per_second']:10,.0f} {statistics.median(theirs[ranks]):10,.0f} {ratio[ranks]:6.2f} "
              f"{100 * median['communication_share']:13.1f}% {100 * median['waiting_share']:7.1f}%")
    most = max(RANKS)
    exposed = statistics.median(one["communication_share"] for one in mine[most])
    print(f"{most} ranks: {ratio[most]:.2f} times PyTorch (bar {BAR}, {'met' if ratio[most] >= BAR else 'not met'}); communication "
          f"{'under' if exposed < EXPOSED_BAR else 'not under'} {100 * EXPOSED_BAR:.0f} %")
    if options.json:
        Path(options.json).write_text(json.dumps({"isa": options.isa, "train": mine, "pytorch": theirs, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
