#!/usr/bin/env python3
"""LibTorch over libddp against PyTorch's DistributedDataParallel with gloo, in turns.

    bench_torch.py BUILD DDPRUN GPT CONVNET [--passes N] [--gpt-steps N] [--convnet-steps N] [--json FILE]

GPT is examples/torch/gpt.cpp (with ZeRO-1) beside gpt.py (without), CONVNET is bench_torch.cpp beside the same network below.
All ranks have one thread and the same LibTorch: that of PYTHON_EXEC, or of /usr/bin/python3. Programs that are linked with
another are compiled again in BUILD. A run's value is the median over its steps (of GPT: over lines of 10 steps), and ratios are
medians over passes. The machine must be idle. Exit code 1 where a bar is missed, 77 where there is no PyTorch.
"""
import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 32
GPT_PY = Path(__file__).resolve().parents[2] / "examples/torch/gpt.py"
PYTHON = os.environ.get("PYTHON_EXEC", "/usr/bin/python3")
TEXT = "/usr/share/dictd/devil.dict.dz"
OTHER_TEXT = "/usr/share/common-licenses/GPL-3"


def convnet_rank(steps):
    """The network and the steps of bench_torch.cpp."""
    import torch
    from torch import nn
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo")
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((4, 4)), nn.Flatten(1),
                        nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10))
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    if torch.distributed.get_rank() == 0:
        print(statistics.median(seconds[steps // 10:]))
    torch.distributed.destroy_process_group()


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def start(options, ranks, program):
    command = [options.ddprun, "--prefix=none", f"--nproc-per-node={ranks}", *map(str, program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(job):
    out, err = job.communicate()
    if job.returncode != 0:
        sys.exit(f"{shlex.join(job.args)} failed with {job.returncode}: {err.strip()[-2000:]}")
    return out


def tokens_per_second(out):
    """The median of the lines except the first."""
    return statistics.median([float(rate) for rate in re.findall(r"([0-9]+) tokens/s", out)][1:])


def link_with(options, version, torch, program):
    """The program, linked with the LibTorch in the folder `torch`: compiled again where it has another."""
    library = os.path.realpath(Path(torch) / "lib/libtorch_cpu.so")
    if library in map(os.path.realpath, re.findall(r"=> (\S+)", output_of(["ldd", program]))) or not os.path.exists(library):
        return program
    target = os.path.relpath(os.path.realpath(program), os.path.realpath(options.build))
    linked = Path(options.build).resolve() / f"{target}-{version}"
    if linked.exists() and linked.stat().st_mtime > os.path.getmtime(program):
        return linked
    commands = output_of(["ninja", "-C", options.build, "-t", "commands", target]).split("\n")
    compile_it = next(command for command in commands if f" -o {target}.p/" in command)
    link_it = next(command for command in commands if f" -o {target} " in command)
    old_object = re.search(r" -o (\S+\.o)", compile_it)[1]
    headers = f" -isystem{torch}/include -isystem{torch}/include/torch/csrc/api/include"
    compile_it = re.sub(r" -isystem ?\S*torch/csrc/api/include", headers, re.sub(r" -MD| -M[QF] \S+", "", compile_it))
    link_it = link_it.replace(f" -o {target} ", f" -L{torch}/lib -Wl,-rpath,{torch}/lib -o {linked} ")
    for command in compile_it, link_it:
        output_of(["sh", "-c", f"cd {shlex.quote(options.build)} && {command.replace(old_object, f'{linked}.o')}"])
    return linked


class Gpt:
    """Tokens per second."""

    def __init__(self, options, program, folder):
        self.options, self.ours = options, [program]
        self.text = Path(folder) / "text"
        self.text.write_bytes(subprocess.check_output(["gzip", "-dc", TEXT]) if os.path.exists(TEXT) else Path(OTHER_TEXT).read_bytes())

    def start(self, ranks, program):
        steps = ["--steps", self.options.gpt_steps, "--log-every", 10, "--sample", 0]
        return start(self.options, ranks, [*program, self.text, *steps])

    def run(self):
        peer = [PYTHON, "-W", "ignore", GPT_PY, "--zero", 0]
        one = {f"ours {ranks}": tokens_per_second(finish(self.start(ranks, self.ours))) for ranks in (1, 2)}
        one |= {f"PyTorch {ranks}": tokens_per_second(finish(self.start(ranks, peer))) for ranks in (1, 2)}
        independent = [self.start(1, self.ours) for _ in range(2)]
        one["independent 2"] = sum(tokens_per_second(finish(job)) for job in independent)
        return one


class Convnet:
    """Samples per second."""

    def __init__(self, options, program):
        self.options, self.program = options, program

    def run(self):
        steps = self.options.convnet_steps
        peer = [PYTHON, "-W", "ignore", __file__, "--convnet-rank", steps]
        one = {}
        for ranks in 1, 2:
            one[f"ours {ranks}"] = BATCH * ranks / float(finish(start(self.options, ranks, [self.program, steps])))
            one[f"PyTorch {ranks}"] = BATCH * ranks / float(finish(start(self.options, ranks, peer)))
        return one


def report(passes, unit, comparisons):
    """Prints the table, and the median ratio of each comparison (name, numerator, denominator, bar); returns the ratios and
    whether all bars are met."""
    for name in passes[0]:
        print(f"  {name:14} {statistics.median(one[name] for one in passes):10,.0f} {unit}")
    ratios, met = {}, True
    for name, ours, peer, bar in comparisons:
        ratio = ratios[name] = statistics.median(one[ours] / one[peer] for one in passes)
        met = met and ratio >= bar
        print(f"  {name}: {ratio:.2f} (bar {bar}, {'met' if ratio >= bar else 'not met'})")
    return ratios, met


def main():
    parser = argparse.ArgumentParser()
    for name in "build", "ddprun", "gpt", "convnet":
        parser.add_argument(name)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--gpt-steps", type=int, default=80)
    parser.add_argument("--convnet-steps", type=int, default=400)
    parser.add_argument("--json")
    options = parser.parse_args()
    find = "import os, torch.distributed; print(torch.__version__, os.path.dirname(torch.__file__))"
    found = subprocess.run([PYTHON, "-W", "ignore", "-c", find], capture_output=True, text=True)
    if found.returncode != 0:
        print(f"skipped: {PYTHON} has no torch (PYTHON_EXEC names another Python)")
        sys.exit(77)
    version, torch = found.stdout.split()
    os.environ["OMP_NUM_THREADS"] = "1"
    # glibc keeps freed memory, on both sides alike.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        gpt = Gpt(options, link_with(options, version, torch, options.gpt), folder)
        convnet = Convnet(options, link_with(options, version, torch, options.convnet))
        passes = [(gpt.run(), convnet.run()) for _ in range(options.passes)]
    print(f"LibTorch {version}, {options.passes} passes in turns, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    of_gpt, of_convnet = zip(*passes)
    ratios_of_gpt, gpt_met = report(of_gpt, "tokens/s", [
        ("GPT, 2 ranks against PyTorch's", "ours 2", "PyTorch 2", 1.2),
        ("GPT, 2 ranks against 2 independent processes", "ours 2", "independent 2", 0.97)])
    ratios, convnet_met = report(of_convnet, "samples/s", [
        ("convnet, 2 ranks against PyTorch's", "ours 2", "PyTorch 2", 1.2)])
    if options.json:
        Path(options.json).write_text(json.dumps({"libtorch": version, "gpt": of_gpt, "convnet": of_convnet,
                                                  "ratios": ratios_of_gpt | ratios}, indent=2) + "\n")
    sys.exit(not (gpt_met and convnet_met))


if __name__ == "__main__":
    if sys.argv[1] == "--convnet-rank":
        convnet_rank(int(sys.argv[2]))
    else:
        main()
