#!/usr/bin/env python3
"""Says how the tests of some build folders went: their counts on the last line, and before it a line for each test that
did not run, with its reason. Exits with 1 when a test failed, or when none passed.

Reads what `meson test` leaves in BUILD/meson-logs: testlog.json with one line per program (its JUnit file is no XML once a
test has printed a terminal's escape sequences), and gtest/*.xml (GTEST_OUTPUT=xml:BUILD/meson-logs/gtest/) with the cases
inside."""

import json
import pathlib
import sys
import xml.etree.ElementTree as xml


def reason_of(element):
    """GoogleTest's message is "file:line", then what the test said; a script's is its last line of output."""
    text = (element.get("message") or "") if element is not None else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[1:]) if len(lines) > 1 else lines[0] if lines else "says no reason"


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "says no reason"


def programs(directory):
    """How many programs passed, which failed, and which were skipped as a whole, with the reason."""
    passed, failed, skipped = 0, [], []
    for line in (directory / "meson-logs/testlog.json").read_text().splitlines():
        test = json.loads(line)
        name = test["name"].split(" / ")[-1]
        if test["result"] == "OK":
            passed += 1
        elif test["result"] == "SKIP":
            skipped.append((name, last_line(test.get("stdout", ""))))
        else:
            failed.append(name)
    return passed, failed, skipped


def cases(directory):
    """How many cases ran in the programs, and those that were skipped inside, with the reason."""
    ran, skipped = 0, []
    for file in sorted((directory / "meson-logs/gtest").glob("*.xml")):
        for case in xml.parse(file).iter("testcase"):
            if case.get("result") == "skipped" or case.find("skipped") is not None:
                skipped.append((f"{case.get('classname')}.{case.get('name')}", reason_of(case.find("skipped"))))
            elif case.get("status") != "notrun":
                ran += 1
    return ran, skipped


def main(directories):
    passed, failed, skipped, ran = 0, [], {}, 0
    for name in directories:
        directory = pathlib.Path(name)
        passed_here, failed_here, skipped_here = programs(directory)
        ran_here, skipped_inside = cases(directory)
        passed += passed_here
        ran += ran_here
        failed += [f"{directory.name}: {test}" for test in failed_here]
        for test, reason in skipped_here + skipped_inside:
            skipped.setdefault((test, reason), []).append(directory.name)
    for (test, reason), places in sorted(skipped.items()):
        print(f"skipped: {test}: {reason} ({', '.join(places)})")
    for test in failed:
        print(f"failed: {test}")
    print(f"{passed} passed, {len(failed)} failed; {ran} cases in them, {sum(map(len, skipped.values()))} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
