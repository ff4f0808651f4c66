#!/usr/bin/env python3
"""Reads the curves of ddprun and train back by the tensorboard package itself: EventAccumulator, and its HTTP server with both of
its readers. Takes ddprun and train; runs in a Python that has tensorboard (.ci/nightly makes one).
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAG = "step/loss"
PATIENCE = 120


def until(is_so, what):
    end = time.monotonic() + PATIENCE
    while not (found := is_so()):
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {PATIENCE} s")
        time.sleep(0.1)
    return found


def workers_of(pid):
    """The pids of the train processes below ddprun."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "train"]


def train_and_kill_twice(ddprun, train, folder):
    """A run whose worker is killed twice with kill -9; the files that it leaves end inside a record."""
    job = subprocess.Popen([ddprun, "--max-restarts=2", "--rdzv-id=job", "--tensorboard=runs", train, "--epochs=600",
                            "--checkpoint-every=10", "--tensorboard=runs/train"], cwd=folder, stdout=subprocess.PIPE, text=True)
    run, kills = folder / "runs/train", 0
    for line in job.stdout:
        if kills < 2 and re.search(r"epoch +(60|120)/", line):
            worker = workers_of(job.pid)[0]
            os.kill(worker, signal.SIGKILL)
            last = max(run.iterdir())
            until(lambda: not pathlib.Path(f"/proc/{worker}").exists(), "the worker's end")
            os.truncate(last, last.stat().st_size - 11)
            kills += 1
    assert job.wait() == 0 and kills == 2 and len(list(run.iterdir())) == 3


def check(steps, reader):
    assert steps == sorted(set(steps)), f"{reader}: steps are repeated or go back"
    assert steps[-1] == 600 * 101, f"{reader}: the last step is {steps[-1]}"
    assert len(steps) > 600 * 101 * 0.9, f"{reader}: only {len(steps)} points"
    print(f"{reader}: one curve of {len(steps)} points")


def read_by_accumulator(folder):
    events = EventAccumulator(str(folder / "runs/train"), size_guidance={"scalars": 0})
    events.Reload()
    check([event.step for event in events.Scalars(TAG)], "EventAccumulator")
    assert events.Scalars("epoch/held_out_accuracy")[-1].value > 0.95
    job = EventAccumulator(str(folder / "runs/job/ddprun"))
    job.Reload()
    assert [event.value for event in job.Scalars("job/restarts")][-1] in (1, 2)
    assert job.Scalars("steps/per_second")[-1].value > 0


def read_by_server(folder, *options):
    tensorboard = pathlib.Path(sys.executable).with_name("tensorboard")
    server = subprocess.Popen([tensorboard, "--logdir", folder / "runs", "--host=127.0.0.1", "--port=0", "--reload_interval=1",
                               "--samples_per_plugin=scalars=1000000", *options], stderr=subprocess.PIPE, text=True)
    try:
        port = next(found[1] for line in server.stderr if (found := re.search(r"http://127.0.0.1:(\d+)", line)))

        def get(name, **arguments):
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/{name}?{urllib.parse.urlencode(arguments)}"
            return json.load(urllib.request.urlopen(url))

        def curve():
            if TAG not in get("tags").get("train", {}):
                return None
            steps = [step for _, step, _ in get("scalars", run="train", tag=TAG)]
            return steps if steps and steps[-1] == 600 * 101 else None

        check(until(curve, "the curve"), f"tensorboard {' '.join(options)}")
        assert set(get("tags")) == {"train", "job/ddprun"}, get("tags").keys()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    ddprun, train = (str(pathlib.Path(program).resolve()) for program in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        train_and_kill_twice(ddprun, train, folder)
        read_by_accumulator(folder)
        read_by_server(folder, "--load_fast=true")
        read_by_server(folder, "--load_fast=false")
