#!/usr/bin/env python3
"""Runs the commands of README.md, CONTRIBUTING.md and docs/: lines with "$ " in blocks marked console.

Takes the root of the tree and the ddprun to run; prints the blocks that fail. Commands that need more than
one machine stand in blocks marked sh, which are left alone. A block runs in an empty folder with a train.py.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
SECONDS = "60"  # for one block


def commands_of(block):
    return "\n".join(line[2:] for line in block.splitlines() if line.startswith("$ "))


def run(commands, ddprun):
    """What went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "train.py").write_text('import os\nprint("rank", os.environ["RANK"])\n')
        path = f"{os.path.dirname(os.path.abspath(ddprun))}:{os.environ['PATH']}"
        done = subprocess.run(["timeout", SECONDS, "bash", "-e", "-o", "pipefail", "-c", commands],
                              cwd=folder, env={**os.environ, "PATH": path, "HOME": folder},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
    return f"exit code {done.returncode}\n{done.stdout}" if done.returncode != 0 else ""


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    blocks = [(page, commands_of(block)) for page in pages for block in BLOCK.findall(page.read_text())]
    failed = 0
    for page, commands in blocks:
        wrong = run(commands, sys.argv[2]) if commands else "no line begins with '$ '"
        if wrong:
            failed += 1
            print(f"{page.relative_to(root)}:\n{commands}\n{wrong}")
    print(f"{len(blocks)} blocks, {failed} of them failed")
    sys.exit(1 if failed or not blocks else 0)
