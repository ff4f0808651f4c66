#!/usr/bin/env python3
"""Samples per second of the train program on one GPU against PyTorch in the same run.

    bench_train_torch.py DDPRUN TRAIN [--json FILE] [--seconds N] [--batch N] [--hidden N,N,..] [--precision P]

The model is the perceptron 784-4096-4096-4096-10 in bfloat16 with batches of 8192 and SGD with momentum; samples lie
in the GPU's memory on both sides and are picked by a random order. PyTorch: DistributedDataParallel over NCCL with a
world of one, bfloat16 parameters, samples already in bfloat16, fused SGD; as it is, and compiled with the loss. Ours
keeps float32 samples, and float32 weights beside the bfloat16 ones; so that nobody is flattered, PyTorch's time with
float32 weights (autocast) is shown too. Both multiply by what cuBLAS's heuristic chooses, PyTorch compiled too.

On both sides the time is that of whole epochs of training: the order of the samples, the steps, and the wait for the
epoch's loss at its end. Not in it: start-up, making data, held-out samples, checkpoints, compiling. Passes take turns;
medians count. Prints ratios and, with --json, writes them. Exit code 77, with one line, where there is no GPU or no
PyTorch. What this PyTorch cannot compile is said, and not compared.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 77
INPUTS, CLASSES = 784, 10
BARS = {"eager": 1.2, "compiled": 1.0}


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    import torch
except ImportError:
    skip("no PyTorch in this Python")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("ddprun")
    parser.add_argument("train")
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--batches", type=int, default=24, help="of one epoch")
    parser.add_argument("--hidden", default="4096,4096,4096")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32", "tf32"])
    return parser.parse_args()


def ours(options, extra):
    """Median samples/s of the epochs but the first two."""
    # A tenth is held out.
    samples = options.batch * options.batches * 10 // 9 + 16
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.json"
        epochs = options.epochs
        command = [options.ddprun, "--nproc-per-node=1", options.train, "--device=cuda",
                   f"--precision={options.precision}", f"--data=synthetic:{samples},{INPUTS},{CLASSES}",
                   f"--hidden={options.hidden}", f"--batch-size={options.batch}", f"--epochs={epochs}",
                   "--lr=0.001", "--backend=nccl", "--keep-data=device", f"--checkpoint-every={epochs}",
                   f"--checkpoint-dir={folder}/checkpoints", f"--log-json={log}"] + extra
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"train {' '.join(extra)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
            sys.exit(1)
        result = json.loads(Path(log).read_text())
        return statistics.median(epoch["samples_per_second"] for epoch in result["epochs"][2:])


class Perceptron(torch.nn.Module):
    """With its loss, so that both are compiled as one."""

    def __init__(self, widths):
        super().__init__()
        layers = []
        for at in range(len(widths) - 1):
            layers.append(torch.nn.Linear(widths[at], widths[at + 1]))
            if at + 2 < len(widths):
                layers.append(torch.nn.ReLU())
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x).float(), y)


class Contestant:
    """PyTorch's side: one model, set up once, timed in turns."""

    def __init__(self, options, data, compiled=False, autocast=False):
        from torch.nn.parallel import DistributedDataParallel
        widths = [INPUTS] + [int(width) for width in options.hidden.split(",")] + [CLASSES]
        dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        self.autocast = autocast
        model = Perceptron(widths).cuda()
        if not autocast:
            model = model.to(dtype)
        model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
        self.model = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4, fused=True)
        values, self.labels = data
        self.values = values.to(dtype)
        self.batch = options.batch
        for _ in range(3):
            self.epoch()

    def epoch(self):
        order = torch.randperm(len(self.labels), device="cuda")
        loss_sum = torch.zeros((), device="cuda")
        for begin in range(0, len(order), self.batch):
            rows = order[begin:begin + self.batch]
            x, y = self.values[rows], self.labels[rows]
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                loss = self.model(x, y)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach()
        return loss_sum.item()

    def rate(self, seconds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        samples = 0
        while time.perf_counter() - start < seconds:
            self.epoch()
            samples += len(self.labels)
        torch.cuda.synchronize()
        return samples / (time.perf_counter() - start)


def make_data(options):
    count = options.batch * options.batches
    generator = torch.Generator(device="cuda").manual_seed(1)
    values = torch.rand(count, INPUTS, device="cuda", generator=generator) * 2 - 1
    return values, torch.randint(CLASSES, (count,), device="cuda", generator=generator)


def main():
    options = arguments()
    if not torch.cuda.is_available():
        skip("PyTorch sees no GPU")
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    torch.cuda.set_device(0)
    # In this process alone: no port, no name to look up.
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1,
                                         device_id=torch.device("cuda", 0))

    data = make_data(options)
    pytorch = {"PyTorch eager, DDP": Contestant(options, data)}
    not_compiled = ""
    try:
        pytorch["PyTorch compiled, DDP"] = Contestant(options, data, compiled=True)
    except Exception as error:  # a compiler or its headers may be missing; what it throws is not documented
        not_compiled = str(error).strip().split("\n")[0]
        print(f"PyTorch cannot compile the model here: {type(error).__name__}: {error}")
    if options.precision == "bf16":
        pytorch["PyTorch eager, DDP, autocast"] = Contestant(options, data, autocast=True)
    # So many epochs that a measurement of ours takes as long as PyTorch's.
    warm = pytorch["PyTorch eager, DDP"].rate(options.seconds)
    options.epochs = max(5, min(400, int(warm * options.seconds / (options.batch * options.batches)) + 2))
    runs = {"train": lambda: ours(options, []),
            "train, steps in a graph": lambda: ours(options, ["--cuda-graph"])}
    for name, contestant in pytorch.items():
        runs[name] = lambda contestant=contestant: contestant.rate(options.seconds)
    rates = {name: [] for name in runs}
    for _ in range(options.passes):
        for name, run in runs.items():
            rates[name].append(run())
    median = {name: statistics.median(values) for name, values in rates.items()}

    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; perceptron {INPUTS}-"
          f"{options.hidden.replace(',', '-')}-{CLASSES}, {options.precision}, batch {options.batch}, "
          f"{options.passes} passes")
    for name, values in rates.items():
        spread = (max(values) - min(values)) / median[name]
        print(f"  {name:32} {median[name]:14,.0f} samples/s  (spread {100 * spread:.0f} %)")
    ratios = {"eager": median["train"] / median["PyTorch eager, DDP"]}
    if not not_compiled:
        ratios["compiled"] = median["train, steps in a graph"] / median["PyTorch compiled, DDP"]
    verdicts = [f"{'train' if name == 'eager' else 'train with graphs'} {ratio:.2f} times PyTorch {name} "
                f"(bar {BARS[name]}, {'met' if ratio >= BARS[name] else 'not met'})" for name, ratio in ratios.items()]
    if not_compiled:
        verdicts.append("nothing compiled to compare with")
    print("; ".join(verdicts))
    if options.json:
        Path(options.json).write_text(json.dumps({
            "gpu": torch.cuda.get_device_name(), "pytorch": torch.__version__, "hidden": options.hidden,
            "precision": options.precision, "batch": options.batch, "samples_per_second": rates,
            "ratios": ratios, "bars": BARS, "not_compiled": not_compiled}, indent=2) + "\n")
    torch.distributed.destroy_process_group()


main()
