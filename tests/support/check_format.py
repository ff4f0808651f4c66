#!/usr/bin/env python3
"""Compares every source with what clang-format makes of it.

Takes the root of the tree, and --fix to rewrite the files; prints the names of those that differ. Ends with 77 where
clang-format is another version than the one below, because each version has its own opinion of some lines.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

VERSION = "14"  # of Debian 12
FOLDERS = ["env", "examples", "launcher", "pbs", "rendezvous", "tests", "workers"]
SUFFIXES = {".cpp", ".h", ".cu", ".cuh"}


def clang_format():
    """The program of that version; None where there is none."""
    for name in (f"clang-format-{VERSION}", "clang-format"):
        if found := shutil.which(name):
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            if re.search(rf"version {VERSION}\.", said):
                return found
    return None


def main(root, fix):
    program = clang_format()
    if not program:
        print(f"there is no clang-format {VERSION} here")
        return 77
    sources = sorted(str(file) for folder in FOLDERS for file in (root / folder).rglob("*") if file.suffix in SUFFIXES)
    mode = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=1"]
    parts = [sources[i:i + 40] for i in range(0, len(sources), 40)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(lambda part: subprocess.run([program, *mode, *part], capture_output=True, text=True), parts))
    differ = sorted(set(re.findall(r"^(\S+?):\d+", "".join(run.stderr for run in runs), re.M)))
    for name in differ:
        print(f"{name}: its layout is not clang-format's: run tests/support/check_format.py . --fix")
    return 1 if differ or any(run.returncode for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), "--fix" in sys.argv))
