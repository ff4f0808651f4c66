#!/usr/bin/env python3
"""Shows from a trace of a training's CUDA calls that no step makes the host wait for the device.

    check_trace.py TRACE [--graph] [--warm-up N] [--at-least N]

TRACE is what cuda-trace.so writes (its format: tests/support/trace_log.h), of a training whose samples lie on the device
and whose epoch has many steps. A step reaches from one launch of an optimizer's first kernel (BeginStep) to
the next; with --graph from one graph launch to the next. The first N are left out: libraries load kernels and allocate in
them. Between the others and until the last, everything counts, of every thread of the process: calls that wait for the
device, and such as may (allocations, copies from or to the host, loading code); and whether the steps' thread waits by
asking again and again. Nothing else is left out: the run must have no epoch's end in between.

Exit codes: 0 nothing waits, 1 something does, or the trace does not show enough steps.
"""
import argparse
import collections
import re
import statistics
import sys

# Names without the suffixes of their versions. What is listed as waiting also waits by what CUDA documents of it, or may:
# copies and fills without "Async", whatever allocates, frees, pins or maps memory, and whatever loads code.
WAITS = re.compile(r"""
    synchronized:.*                                             # CUPTI's own word for it
  | cu(da)?(Ctx|Device|Thread|Stream|Event)Synchronize
  | cu(da)?Mem(cpy|set)(?!.*Async).*
  | cu(da)?Memcpy(?!.*Dto[DA]).*Async                           # from or to the host, as far as the name tells
  | cu(da)?Malloc(?!.*Async|FromPool).* | cu(da)?Free(?!.*Async).*
  | cuMem(Alloc|Free|HostAlloc|HostRegister|HostUnregister|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)(?!.*Async).*
  | cudaHost(Alloc|Register|Unregister) | cu(da)?(Array|MipmappedArray)\w*(Create|Destroy)
  | cu(da)?(Module|Library)(Load|Unload).* | cuLink.* | cu(da)?GraphInstantiate.*
  | cuCtx(Create|Destroy|Reset).* | cu(da)?DevicePrimaryCtx(Release|Reset) | cudaDeviceReset
  | cu(da)?Stream(Create|Destroy).*
""", re.VERBOSE)
QUERIES = re.compile(r"cu(da)?(Event|Stream)Query")
MOST_QUERIES = 8  # of a step: NCCL may look at an event of its own, a loop that waits asks for as long as the device works
VERSION = re.compile(r"(_ptsz|_ptds|_v\d+)+$")
GRAPH_LAUNCHES = ("cuGraphLaunch", "cudaGraphLaunch")
STEP_KERNEL = "BeginStep"  # a part of its name, which is mangled


class Call:
    """One call of the program, with what the runtime did for it."""

    def __init__(self, thread, start, end, name, kernel):
        self.thread, self.start, self.end, self.name, self.kernel = thread, start, end, name, kernel
        self.inner = []

    def waiting_name(self):
        """What in it waits, or None. Of a call of the runtime the driver's calls tell more than its own name does."""
        deepest = self.inner if self.name.startswith("cudaMemcpy") and self.inner else [self.name, *self.inner]
        return next((name for name in deepest if WAITS.fullmatch(name)), None)

    def begins_step(self, in_graphs):
        if in_graphs:
            return any(name in GRAPH_LAUNCHES for name in (self.name, *self.inner))
        return STEP_KERNEL in self.kernel


def read(path):
    """The calls of each thread in their order."""
    records = collections.defaultdict(list)
    with open(path, encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != "# cuda-trace 1":
            fail(f"{path}: not a trace")
        for line in file:
            thread, depth, start, end, name, *kernel = line.split()
            records[thread].append((int(start), int(depth), int(end), VERSION.sub("", name), kernel[0] if kernel else ""))
    threads = {}
    for thread, calls in records.items():
        threads[thread] = made = []
        # At one start the outer call first.
        for start, depth, end, name, kernel in sorted(calls):
            if depth > 0 and made and start <= made[-1].end:
                made[-1].inner.append(name)
                made[-1].kernel = made[-1].kernel or kernel
            else:
                made.append(Call(thread, start, end, name, kernel))
    return threads


def fail(why):
    print(f"FAILED: {why}")
    sys.exit(1)


def print_calls(calls, steps):
    spans = collections.defaultdict(list)
    for call in calls:
        spans[f"{call.name} {call.kernel}".strip()].append(call.end - call.start)
    print(f"{'call':60} {'per step':>9} {'us each':>9}")
    for name, times in sorted(spans.items(), key=lambda item: -len(item[1])):
        print(f"{name[:60]:60} {len(times) / steps:9.2f} {statistics.mean(times) / 1000:9.2f}")


def step_times(calls, marks):
    """Of each step the seconds inside calls, and in all."""
    inside, at = [], 0
    for begin, end in zip(marks, marks[1:]):
        total = 0
        while at < len(calls) and calls[at].start < end.start:
            total += calls[at].end - calls[at].start
            at += 1
        inside.append(total)
    return inside, [end.start - begin.start for begin, end in zip(marks, marks[1:])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--graph", action="store_true", help="a step is one graph launch")
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--at-least", type=int, default=100, help="steps that must be there")
    options = parser.parse_args()
    try:
        threads = read(options.trace)
    except (OSError, ValueError) as error:
        fail(f"{options.trace}: {error}")

    marks = max(([call for call in calls if call.begins_step(options.graph)] for calls in threads.values()), key=len, default=[])
    marks = marks[options.warm_up:]
    steps = max(0, len(marks) - 1)
    if steps < max(1, options.at_least):
        fail(f"the trace shows {steps} steps after the first {options.warm_up}, not {options.at_least}")
    first, last = marks[0].start, marks[-1].start
    judged = [call for calls in threads.values() for call in calls if first <= call.start < last]
    own = [call for call in judged if call.thread == marks[0].thread]
    inside, whole = step_times(own, marks)

    print_calls(own, steps)
    print(f"{len(judged) - len(own)} calls by other threads in this time")
    print(f"a step takes {statistics.median(whole) / 1000:.1f} us, {statistics.median(inside) / 1000:.1f} us of them inside calls (medians, traced)")
    waits = collections.Counter()
    for call in judged:
        if waiting := call.waiting_name():
            waits[waiting if call.thread == marks[0].thread else f"{waiting} (another thread)"] += 1
    if waits:
        fail(f"{sum(waits.values())} calls wait for the device in {steps} steps: "
             + ", ".join(f"{count} {name}" for name, count in waits.most_common()))
    queries = sum(1 for call in own if QUERIES.fullmatch(call.name))
    if queries > MOST_QUERIES * steps:
        fail(f"a step asks the device {queries / steps:.0f} times whether it is done: that is to wait for it")
    print(f"{steps} steps of {len(own) / steps:.1f} calls, 0 of them wait for the device; "
          f"{statistics.median(inside) / 1000:.0f} us per step inside calls")


main()
