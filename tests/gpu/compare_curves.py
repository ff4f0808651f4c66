#!/usr/bin/env python3
"""Compares the loss curves of the same training with other numbers of ranks.

    compare_curves.py ONE.json OTHER.json ... [--tolerance T]

The files are those of `train --log-json`. Each loss may differ from the first file's by T of that curve's first loss.
Exit codes: 0 they agree, 1 they do not, 77 (with one line) when a file is missing: its training was not run.
"""
import argparse
import json
import os
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tolerance", type=float, default=0.005)
    options = parser.parse_args()
    for name in options.files:
        if not os.path.exists(name):
            print(f"skipped: {os.path.basename(name)} is not there")
            sys.exit(77)
    curves = []
    for name in options.files:
        with open(name) as file:
            run = json.load(file)
        curves.append((os.path.basename(name), [epoch["loss"] for epoch in run["epochs"]]))
    (_, first), others = curves[0], curves[1:]
    if not first or not others:
        print("FAILED: nothing to compare")
        sys.exit(1)
    failed = False
    for name, losses in others:
        if len(losses) != len(first):
            print(f"FAILED: {name} has {len(losses)} epochs in place of {len(first)}")
            failed = True
            continue
        worst = max(abs(a - b) for a, b in zip(first, losses)) / abs(first[0])
        print(f"{name}: {worst:.2e} of the first loss apart at most")
        failed = failed or not worst <= options.tolerance
    if not first[-1] < 0.9 * first[0]:
        print(f"FAILED: the loss went from {first[0]:.4f} to {first[-1]:.4f}: nothing was learned")
        sys.exit(1)
    print("FAILED: the curves differ" if failed else f"{len(others)} curves agree with {curves[0][0]}; loss {first[0]:.4f} to {first[-1]:.4f}")
    sys.exit(1 if failed else 0)


main()
