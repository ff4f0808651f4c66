#!/usr/bin/env python3
"""Produces each row of the first three tables of docs/troubleshooting.md with a real worker, and looks for its meaning in the report.

Takes the root of the tree and the ddprun to run; prints the rows whose meaning the report lacks.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "tests/support"))
import check_troubleshooting  # noqa: E402

# No process of root reaches a limit on processes. tests/launcher/test_report.cpp has this row.
NOT_AS_ROOT = {"Resource temporarily unavailable"}


def executable(folder, name, text):
    path = folder / name
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o755)
    return [str(path)]


def unstartable(error, folder):
    """The words of a ddprun whose program cannot be started for this reason."""
    if error == "No such file or directory":
        return executable(folder, "no_interpreter", f"#!{folder}/missing\n")
    if error == "Exec format error":
        return executable(folder, "no_format", "\x7fELF" + "\0" * 60)  # of no machine
    if error == "Permission denied":
        (folder / "interpreter").write_text("")
        return executable(folder, "no_permission", f"#!{folder}/interpreter\n")
    if error == "Argument list too long":
        config = folder / "config.json"
        config.write_text(json.dumps({"program": "true", "args": ["x" * 200_000]}))
        return [f"--config={config}"]
    raise ValueError(f"nothing here produces the error {error}")


def words_for(symptom, table, folder):
    if table == "Why a program cannot be started":
        return unstartable(symptom, folder)
    if symptom.startswith("SIG"):
        return ["sh", "-c", f"ulimit -c 0; kill -{symptom[3:]} $$"]
    if symptom.startswith("exit code "):
        return ["sh", "-c", f"exit {symptom.split()[-1]}"]
    return ["sh", "-c", f"echo {shlex.quote(symptom + ' … and more')} >&2; exit 3"]


def report_of(ddprun, words, folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON_EXEC"} | {"HOME": str(folder)}
    done = subprocess.run(["timeout", "60", ddprun, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    return done.stderr


def has_meaning(report, meaning):
    pattern = ".*".join(re.escape(part) for part in meaning.split("…"))
    return re.search(r"^  meaning +" + pattern, report, re.M) is not None


if __name__ == "__main__":
    rows = check_troubleshooting.rows(pathlib.Path(sys.argv[1]))
    rows += [("How a worker ends", "exit code 137", "a process that it had started was ended by SIGKILL")]
    failed = skipped = 0
    for table, symptom, meaning in rows:
        if symptom in NOT_AS_ROOT and os.geteuid() == 0:
            skipped += 1
            continue
        with tempfile.TemporaryDirectory() as name:
            report = report_of(os.path.abspath(sys.argv[2]), words_for(symptom, table, pathlib.Path(name)), pathlib.Path(name))
        if not has_meaning(report, meaning):
            failed += 1
            print(f"{symptom}: the report has another meaning than: {meaning}\n{report}")
    print(f"{len(rows)} rows, {failed} of them failed, {skipped} skipped")
    sys.exit(1 if failed or not rows else 0)
