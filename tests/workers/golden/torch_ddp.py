#!/usr/bin/env python3
"""Records how PyTorch's DistributedDataParallel trains with two ranks on CPUs (gloo).

    python3 tests/workers/golden/torch_ddp.py > tests/workers/golden/torch_ddp.h

test_ddp_golden.cpp trains the same model on the same numbers with libddp and compares. Model, numbers and schedule
are described once here and once there; the numbers are of a hash, exact in float32, so none has to be recorded.
"""

import contextlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, BATCH = 2, 12, 4
INPUTS, HIDDEN, OUTPUTS = 6, 8, 3


def number(stream, i):
    """In [-1, 1), a multiple of 2^-23."""
    z = (stream * 0x9E3779B9 + i * 0x85EBCA6B + 0x1234567) & 0xFFFFFFFF
    z ^= z >> 16
    z = z * 0x7FEB352D & 0xFFFFFFFF
    z ^= z >> 15
    z = z * 0x846CA68B & 0xFFFFFFFF
    z ^= z >> 16
    return (z >> 8) / 2**23 - 1


def numbers(stream, *shape):
    count = torch.Size(shape).numel()
    return torch.tensor([number(stream, i) for i in range(count)], dtype=torch.float64).float().reshape(shape)


class Model(torch.nn.Module):
    """A hidden layer of tanh and two heads that are added; the second may be left out."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(INPUTS, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, OUTPUTS)
        self.extra = torch.nn.Linear(HIDDEN, OUTPUTS)
        with torch.no_grad():
            for stream, parameter in enumerate(self.parameters()):
                parameter.copy_(0.5 * numbers(stream, *parameter.shape))

    def forward(self, x, with_extra):
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden) + self.extra(hidden) if with_extra else self.head(hidden)


def batch(rank, step, part):
    stream = 100 + 2 * ((step * 4 + part) * RANKS + rank)
    return numbers(stream, BATCH, INPUTS), numbers(stream + 1, BATCH, OUTPUTS)


def extra_is_used(step, rank):
    """First in step 5 and on both ranks, in step 6 on rank 1 alone, in steps 9 and 10 on both."""
    return step in (5, 9, 10) or (step == 6 and rank == 1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


class PowerSgd(PowerSGDState):
    """Of which the first factors are those that libddp begins with."""

    def __init__(self):
        super().__init__(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)


def power_sgd(state, bucket):
    drawn, torch.randn = torch.randn, lambda *shape, **_: numbers(0, *shape)
    try:
        return powerSGD_hook(state, bucket)
    finally:
        torch.randn = drawn


# name: optimizer, find_unused_parameters, parts of a step (all but the last in no_sync), hook
RUNS = {
    "plain": (sgd, False, 1, None),
    "unused": (adamw, True, 1, None),
    "accumulated": (sgd, False, 3, None),
    "bf16": (sgd, False, 1, bf16_compress_hook),
    "fp16": (sgd, False, 1, fp16_compress_hook),
    "power": (sgd, False, 1, power_sgd),
}


def train(rank, name):
    make_optimizer, find_unused, parts, hook = RUNS[name]
    model = DistributedDataParallel(Model(), find_unused_parameters=find_unused)
    if hook is not None:
        model.register_comm_hook(PowerSgd() if hook is power_sgd else None, hook)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(parts):
            with model.no_sync() if part + 1 < parts else contextlib.nullcontext():
                x, y = batch(rank, step, part)
                loss = ((model(x, not find_unused or extra_is_used(step, rank)) - y) ** 2).mean()
                loss.backward()
                total += loss.item()
        optimizer.step()
        losses.append(total / parts)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def work(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=RANKS)
    torch.save({name: train(rank, name) for name in RUNS}, f"{directory}/{rank}")
    dist.destroy_process_group()


def array(values):
    lines, line = [], "       "
    for value in values:
        word = f" {value:.9g}" + ("" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" else ".0") + "F,"
        if len(line) + len(word) > 110:
            lines.append(line)
            line = "       "
        line += word
    return "{{\n" + "\n".join(lines + [line]) + "\n    }}"


def main():
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, args=(directory,), nprocs=RANKS)
        by_rank = [torch.load(f"{directory}/{rank}") for rank in range(RANKS)]
    size = len(by_rank[0]["plain"][1])
    version = torch.__version__.split("+")[0]
    print("#pragma once\n")
    print("#include <array>\n")
    print("// clang-format off\n")
    print(f"/// Made by torch_ddp.py with torch {version}: see there.")
    print("namespace golden {\n")
    print(f"inline constexpr int kRanks = {RANKS}, kSteps = {STEPS}, kBatch = {BATCH};")
    print(f"inline constexpr int kInputs = {INPUTS}, kHidden = {HIDDEN}, kOutputs = {OUTPUTS};\n")
    print("struct Run {")
    print("    const char* name;")
    print("    /// Of each rank's own samples, before the step.")
    print("    std::array<std::array<float, kSteps>, kRanks> losses;")
    print("    /// Of all ranks, at the end.")
    print(f"    std::array<float, {size}> parameters;")
    print("};\n")
    for name in RUNS:
        losses = [run[name][0] for run in by_rank]
        assert by_rank[0][name][1] == by_rank[1][name][1], "the ranks do not agree"
        print(f"inline constexpr Run k{name.capitalize()} = {{\n    \"{name}\",")
        print("    {{" + ", ".join(array(of_rank) for of_rank in losses) + "}},")
        print("    " + array(by_rank[0][name][1]) + "};\n")
    print("}  // namespace golden")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
