#!/usr/bin/env python3
"""Step time and memory of train with each --shard against none, in turns.

    bench_shard.py DDPRUN TRAIN [--ranks N] [--passes N]

The model is the perceptron 784-1024-1024-1024-10 with AdamW, batches of 128 on each rank. Prints one worker's memory and the
median over the passes of the ratio of step times in one pass. Exit code 1 where a ratio is above its bar.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

INPUTS, HIDDEN, CLASSES, BATCH, STEPS, EPOCHS = 784, "1024,1024,1024", 10, 128, 12, 4
BARS = {"optimizer": 1.05, "gradients": 1.05, "parameters": 1.25}


def train(options, shard):
    """Seconds a step, the median over the epochs but the first, and one worker's bytes."""
    samples = STEPS * BATCH * options.ranks * 10 // 9 + 16  # a tenth is held out
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.json"
        command = [options.ddprun, f"--nproc-per-node={options.ranks}", options.train, "--device=cpu", "--optimizer=adamw",
                   f"--data=synthetic:{samples},{INPUTS},{CLASSES}", f"--hidden={HIDDEN}", f"--batch-size={BATCH}",
                   f"--epochs={EPOCHS}", "--no-scale-lr", f"--checkpoint-every={EPOCHS}", f"--shard={shard}",
                   f"--checkpoint-dir={folder}/checkpoints", f"--log-json={log}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"train failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
        epochs = json.loads(Path(log).read_text())["epochs"][1:]
    rate = statistics.median(epoch["samples_per_second"] for epoch in epochs)
    return BATCH * options.ranks / rate, [epochs[0][f"{part}_bytes"] for part in ("weights", "gradients", "optimizer")]


parser = argparse.ArgumentParser()
parser.add_argument("ddprun")
parser.add_argument("train")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--passes", type=int, default=5)
options = parser.parse_args()

passes = [{shard: train(options, shard) for shard in ("none", *BARS)} for _ in range(options.passes)]
print(f"{options.ranks} ranks    step ms   weights  gradients  optimizer MiB   step against none (bar)")
failed = False
for shard in ("none", *BARS):
    seconds = statistics.median(one[shard][0] for one in passes)
    ratio = statistics.median(one[shard][0] / one["none"][0] for one in passes)
    memory = "  ".join(f"{part / 2**20:9.2f}" for part in passes[0][shard][1])
    print(f"{shard:12}{seconds * 1e3:6.1f} {memory}       {ratio:.3f}" + (f" ({BARS[shard]})" if shard in BARS else ""))
    failed = failed or ratio > BARS.get(shard, 1)
sys.exit(failed)
