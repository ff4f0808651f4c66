#!/usr/bin/env python3
"""Kills ranks of a training on a GPU and checks that it recovers in place with the bits of an undisturbed run.

    check_recovery.py DDPRUN TRAIN --backend NAME [--ranks N] [--kills N] [--samples N] [--epochs N] [--json FILE]

The training runs twice: undisturbed, then with DDP_RECOVER_ON_GPUS=1 while ranks are killed one after the other, each
after a further epoch. ddprun has to end with 0, every kill has to be recovered in place, the survivors have to keep
their processes, and the digests of the parameters have to be equal. Prints the time of each recovery as ddprun
measures it (from the death to the next step). Exit codes: 0 so it was, 1 not.
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def children(parent, name):
    """Processes of that name among the children of a process, by their ids."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        command, rest = stat[stat.index("(") + 1:].rsplit(")", 1)
        state, its_parent = rest.split()[:2]
        if command == name and its_parent == str(parent) and state != "Z":
            found.add(int(pid))
    return found


def fail(problem):
    print(f"FAILED: {problem}")
    sys.exit(1)


class Training:
    def __init__(self, options, folder, name):
        self.log = f"{folder}/{name}.json"
        self.name = Path(options.train).name
        command = [options.ddprun, "--standalone", f"--nproc-per-node={options.ranks}", "--no-python", options.train,
                   "--device=cuda", f"--backend={options.backend}", f"--data=synthetic:{options.samples},64,10",
                   "--hidden=256,256", f"--epochs={options.epochs}", "--batch-size=64", "--lr=0.05", "--no-scale-lr",
                   "--seed=1", "--deterministic", f"--checkpoint-every={options.epochs}",
                   f"--checkpoint-dir={folder}/{name}.checkpoints", f"--log-json={self.log}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env={**os.environ, "DDP_RECOVER_ON_GPUS": "1"})

    def read_until(self, pattern):
        """Shows lines to the one that matches; None when the output ends before it."""
        for line in self.process.stdout:
            print(line, end="", flush=True)
            if match := re.search(pattern, line):
                return match
        return None

    def digest(self):
        """Waits for the end. Returns the digest of the parameters."""
        self.read_until("(?!)")
        if self.process.wait() != 0:
            fail(f"ddprun ended with {self.process.returncode}")
        return json.loads(Path(self.log).read_text())["parameters_sha256"]


def disturbed(options, folder):
    """The digest of a training whose ranks are killed, and the time of each recovery in ms."""
    training = Training(options, folder, "disturbed")
    times = []
    for kill in range(options.kills):
        if not training.read_until(r"epoch +\d+/"):
            fail(f"the training ended before kill {kill + 1}")
        ranks = children(training.process.pid, training.name)
        victim = sorted(ranks)[kill % len(ranks)]
        os.kill(victim, signal.SIGKILL)
        recovered = training.read_until(r"\] recovered after ([\d.]+) (ms|s)\b")
        if not recovered:
            fail(f"kill {kill + 1} was not recovered in place")
        times.append(float(recovered[1]) * (1000 if recovered[2] == "s" else 1))
        lost = ranks - {victim} - children(training.process.pid, training.name)
        if lost:
            fail(f"the survivors {sorted(lost)} ended too")
    return training.digest(), times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ddprun")
    parser.add_argument("train")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected = Training(options, folder, "undisturbed").digest()
        digest, times = disturbed(options, folder)
    if options.json:
        Path(options.json).write_text(json.dumps({"backend": options.backend, "ranks": options.ranks, "ms": times}))
    if digest != expected:
        fail(f"the digest is {digest[:12]}, that of the undisturbed run {expected[:12]}")
    print(f"{options.kills} kills of {options.ranks} ranks over {options.backend}, bits as undisturbed; recovered after "
          f"{statistics.median(times):.0f} ms (median), {max(times):.0f} ms (longest)")


main()
