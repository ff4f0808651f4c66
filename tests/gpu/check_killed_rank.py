#!/usr/bin/env python3
"""Kills a rank in the middle of an all-reduce and checks what the others hear, and what is left.

    check_killed_rank.py DDPRUN SURVIVOR_WORKER [--ranks N] [--backend NAME] [--within SECONDS]

Every survivor must get an exception within a second that names the dead rank; ddprun must end with 128+9; no process of
the job and no process on the GPU may be left. Exit codes: 0 so it was, 1 not, 77 (with one line) there is no GPU.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time

SKIPPED, KILLED = 77, 128 + 9


def processes_of_the_job(mark):
    """Living processes whose environment carries our mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment:
                marked = mark in environment.read().split(b"\0")
            with open(f"/proc/{pid}/stat", "rb") as stat:
                zombie = stat.read().rsplit(b")", 1)[1].split()[0] == b"Z"
        except OSError:
            continue
        if marked and not zombie and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def programs_on_the_gpu(name):
    if not shutil.which("nvidia-smi"):
        return []
    listing = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader"], capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if name in line]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ddprun")
    parser.add_argument("worker")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="staged")
    parser.add_argument("--within", type=float, default=1.0, help="seconds between the death and each exception")
    options = parser.parse_args()

    mark = f"KILLED_RANK_CHECK={os.getpid()}"
    dying = options.ranks // 2
    command = [options.ddprun, "--standalone", f"--nproc-per-node={options.ranks}", "--no-python", options.worker,
               options.backend, "1000000", str(dying), "200"]
    name, value = mark.split("=")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, name: value}, timeout=60)
    skipped = re.search(r"skipped: (.*)", done.stdout)
    if skipped:
        print(skipped.group(0))
        sys.exit(SKIPPED)

    problems = []
    killed = [int(at) for at in re.findall(r"killed at (\d+)", done.stdout)]
    heard = re.findall(r"\[(\d+)\]: heard at (\d+): (.*)", done.stdout)
    if len(killed) != 1:
        problems.append("no rank died")
    if len(heard) != options.ranks - 1:
        problems.append(f"{len(heard)} of {options.ranks - 1} survivors heard of it")
    delays = [(int(at) - killed[0]) / 1000 for _, at, _ in heard] if killed else []
    problems += [f"an exception came after {delay:.2f} s" for delay in delays if delay > options.within]
    # A survivor of the shared segment may look at the dead process before the launcher has told it.
    names_it = re.compile(rf"rank {dying} (was lost|\(pid \d+\) ended without taking part)")
    problems += [f"rank {rank} heard: {text}" for rank, _, text in heard if not names_it.search(text)]
    if done.returncode != KILLED:
        problems.append(f"ddprun ended with {done.returncode} in place of {KILLED}")
    if left := processes_of_the_job(f"{name}={value}".encode()):
        problems.append(f"processes are left: {left}")
    # The driver gives memory back a moment after the process has gone.
    deadline = time.monotonic() + 5
    while (left := programs_on_the_gpu(os.path.basename(options.worker))) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        problems.append(f"on the GPU is left: {left}")
    for problem in problems:
        print(problem)
    if problems:
        print(done.stdout[-3000:] + done.stderr[-3000:])
        print(f"FAILED: {problems[0]}")
        sys.exit(1)
    print(f"{len(heard)} survivors heard of rank {dying}'s death within {max(delays):.3f} s; nothing is left")


main()
