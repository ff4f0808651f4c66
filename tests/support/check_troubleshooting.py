#!/usr/bin/env python3
"""Compares docs/troubleshooting.md with launcher/ends/explain.cpp: each has every row of the other.

Takes the root of the tree; prints one line for each row that only one of them has.
"""

import errno
import os
import pathlib
import re
import sys

TEXT = r'"((?:[^"\\]|\\.)*)"'
CODE = r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)"


def explained(root):
    """{(symptom, meaning)} of the program."""
    source = (root / "launcher/ends/explain.cpp").read_text()
    source = re.sub(r'"\s*\n\s*"', "", source)  # literals that are broken over lines
    codes = dict(re.findall(r"(\w+) = (?:EX_\w+,\s+///< )?(\d+)", (root / "launcher/spec/exit_codes.h").read_text()))

    def find_rows(beginning, row):
        """What `row` finds from `beginning` to the end of that table or function."""
        part = source[source.index(beginning):]
        return re.findall(row, part[:re.search(r"^\}", part, re.M).start()])

    found = find_rows("kKnownMessages[]", r"\{" + TEXT + r",\s*" + TEXT + r"\}")
    for name, meaning in find_rows("explain_exec_failure(", r"case (E\w+):\s*return " + TEXT):
        found.append((os.strerror(getattr(errno, name)), meaning))
    for cases, meaning in find_rows("explain_signal(", r"((?:case SIG\w+:\s*)+)return " + TEXT):
        found += [(signal, meaning) for signal in re.findall(r"SIG\w+", cases)]
    for code, meaning in find_rows("explain_code(", r"ExitCode::(\w+)\)\)[\s{]*return " + TEXT):
        found.append((f"exit code {codes[code]}", meaning))
    return {(symptom.strip(), meaning.replace("{}", "…")) for symptom, meaning in found}


def rows(root):
    """[(table, symptom, meaning)] of the page, without its last section, which has what only people know."""
    page = (root / "docs/troubleshooting.md").read_text()
    found, table = [], ""
    for line in page[:page.rindex("\n## ")].splitlines():
        if line.startswith("## "):
            table = line[3:]
        if line.startswith("| `"):
            symptoms, meaning, _ = line.strip("| ").split(" | ")
            found += [(table, symptom.strip(), meaning) for _, symptom in re.findall(CODE, symptoms)]
    return found


def documented(root):
    return {(symptom, meaning) for _, symptom, meaning in rows(root)}


if __name__ == "__main__":
    tree = pathlib.Path(sys.argv[1])
    program, page = explained(tree), documented(tree)
    for symptom, meaning in sorted(program - page):
        print(f"docs/troubleshooting.md lacks: {symptom} | {meaning}")
    for symptom, meaning in sorted(page - program):
        print(f"launcher/ends/explain.cpp does not say: {symptom} | {meaning}")
    sys.exit(0 if program == page and program else 1)
