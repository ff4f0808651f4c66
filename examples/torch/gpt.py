"""The model of gpt.cpp in Python, with PyTorch's DistributedDataParallel over gloo: for comparison.

    ddprun --nproc-per-node=2 gpt.py devil.txt --steps 2000

It takes the options of gpt.cpp except --checkpoints and --save-every. Weights, order of the windows, dropout and schedule
are those of gpt.cpp: where both use the same LibTorch, their losses agree to six digits."""

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BYTES, HEAD, SEED = 256, 32, 1


class Block(torch.nn.Module):
    """Attention to the bytes up to this one, then a perceptron."""

    def __init__(self, options):
        super().__init__()
        width = options.width
        self.dropout = options.dropout
        self.norm1 = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def drop(self, x):
        return torch.dropout(x, self.dropout, self.training)

    def attend(self, x, mask):
        batch, length, width = x.shape
        parts = self.attention(x).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4).unbind()
        scores = torch.matmul(parts[0] / math.sqrt(HEAD), parts[1].transpose(2, 3)) + mask
        mixed = torch.matmul(torch.softmax(scores, -1), parts[2])
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, mask):
        x = x + self.drop(self.attend(self.norm1(x), mask))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.positions = torch.nn.Parameter(torch.empty(options.context, options.width))
        self.embedding = torch.nn.Embedding(BYTES, options.width)
        self.blocks = torch.nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = torch.nn.LayerNorm(options.width)
        torch.manual_seed(SEED)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, text):
        length = text.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.embedding(text) + self.positions[:length]
        x = torch.dropout(x, self.options.dropout, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.options.recompute else block(x, mask)
        return functional.linear(self.norm(x), self.embedding.weight)


def read_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", default="/usr/share/common-licenses/GPL-3")
    for name, default in (("steps", 500), ("batch", 12), ("accumulate", 1), ("context", 64), ("width", 128),
                          ("layers", 4), ("zero", 1), ("recompute", 0), ("log-every", 20), ("sample", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser.parse_args()


def make_optimizer(model, options):
    kind = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    kind["fused" if [int(part) for part in torch.__version__.split(".")[:2]] >= [2, 4] else "foreach"] = True
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if options.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **kind)
    return torch.optim.AdamW(groups, **kind)


def make_schedule(optimizer, options):
    warmup = options.steps // 20
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps - warmup)
    if warmup == 0:
        return cosine
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, cosine], [warmup])


def batches(text, options):
    """For ever: epoch after epoch of windows in random order."""
    samples = range((len(text) - 1) // options.context)
    sampler = torch.utils.data.DistributedSampler(samples, seed=SEED)
    starts = torch.arange(options.context + 1)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        mine = torch.tensor(list(sampler))
        for rows in mine.split(options.batch):
            if len(rows) == options.batch:
                yield text[rows[:, None] * options.context + starts].long()
        epoch += 1


@torch.no_grad()
def sample(model, options):
    """Continues a new line, byte by byte."""
    model.eval()
    torch.manual_seed(SEED)
    known = torch.full((1, 1), ord("\n"))
    for _ in range(options.sample):
        logits = model(known[:, -options.context:])[0, -1] / 0.8
        known = torch.cat([known, torch.multinomial(torch.softmax(logits, 0), 1)[None]], 1)
    return bytes(known[0].tolist()).decode(errors="replace")


def main():
    options = read_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with open(options.file, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    gpt = Gpt(options)
    model = torch.nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, options)
    schedule = make_schedule(optimizer, options)
    source = batches(text, options)
    loss_sum, unprinted, since = torch.zeros(1, dtype=torch.double), 0, time.perf_counter()
    for step in range(1, options.steps + 1):
        parts = next(source).chunk(options.accumulate)
        torch.manual_seed(SEED + 1 + (step - 1) * ranks + rank)
        optimizer.zero_grad()
        for part in parts:
            model.require_backward_grad_sync = part is parts[-1]  # as no_sync()
            logits = model(part[:, :-1])
            loss = functional.cross_entropy(logits.view(-1, BYTES), part[:, 1:].reshape(-1)) / len(parts)
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        unprinted += 1
        if step % options.log_every == 0 or step == options.steps:
            dist.all_reduce(loss_sum)
            tokens = unprinted * options.batch * options.context * ranks / (time.perf_counter() - since)
            if rank == 0:
                print(f"step {step}: loss {loss_sum.item() / unprinted / ranks:.6f}, {tokens:.0f} tokens/s", flush=True)
            unprinted, since = 0, time.perf_counter()
            loss_sum.zero_()
    if rank == 0:
        print(sample(gpt, options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
