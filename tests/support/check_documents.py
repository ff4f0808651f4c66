#!/usr/bin/env python3
"""Checks the documents: paths that they name exist, links lead to a page and a heading, and the code map has every folder.

Takes the root of the tree; prints one line for each thing that is wrong.
"""

import pathlib
import re
import sys

import check_rooms

MAP = "docs/architecture.md"  # here a path may leave out its first folders
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
WORD = re.compile(r"`([\w./-]+)`")
LIST = re.compile(r"`([\w.-]+/[\w./-]+)`((?:, `\w+`)+)")  # `launcher/ends/report`, `explain`
LINK = re.compile(r"\]\(([^)\s:]*?)(?:#([^)\s]*))?\)")
SOURCES = ("docs", "env", "examples", "launcher", "pbs", "rendezvous", "tests", "workers")


def tree_of(root):
    """Every path of the sources, with and without its suffix, and every folder with a slash behind it."""
    paths = set()
    for top in SOURCES:
        for path in [root / top, *(root / top).rglob("*")]:
            name = path.relative_to(root).as_posix()
            paths |= {f"{name}/"} if path.is_dir() else {name, name.rsplit(".", 1)[0]}
    return paths


def is_there(name, paths, from_root):
    names = {name, f"{name}/"}
    return bool(names & paths) or (not from_root and any(path.endswith(tuple(f"/{name}" for name in names)) for path in paths))


def lost_paths(text, paths, is_map):
    """The paths of a page that the tree does not have."""
    for name in WORD.findall(text):
        if "/" in name.strip("/") and not name.startswith("/") and (is_map or name.split("/")[0] in SOURCES):
            if not is_there(name, paths, not is_map):
                yield name
    for first, others in LIST.findall(text) if is_map else ():
        folder = first.rsplit("/", 1)[0]
        yield from (f"{folder}/{name}" for name in re.findall(r"`(\w+)`", others)
                    if not is_there(f"{folder}/{name}", paths, False))


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost_links(root, page, text):
    for target, anchor in LINK.findall(text):
        other = page if not target else (page.parent / target).resolve()
        if not other.exists():
            yield f"{target}: there is no such page"
        elif anchor and anchor not in anchors(other.read_text()):
            yield f"{target}#{anchor}: the page has no such heading"


def missing_folders(root, text):
    """The folders with sources that the map has no row for."""
    folders = {pathlib.PurePath(file).parent.as_posix() for file in check_rooms.read_includes(root, check_rooms.TREES)}
    rows = set(re.findall(r"^\| `([\w/]+)/` \|", text, re.M))
    yield from sorted(folders - rows)


def complaints(root):
    paths = tree_of(root)
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "rendezvous/PROTOCOL.md", *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        name, text = page.relative_to(root).as_posix(), page.read_text()
        prose = CODE.sub("", text)
        yield from (f"{name}: {lost}: there is no such file" for lost in lost_paths(prose, paths, name == MAP))
        yield from (f"{name}: link {lost}" for lost in lost_links(root, page, prose))
        if name == MAP:
            yield from (f"{name}: the map has no row for {folder}/" for folder in missing_folders(root, text))


if __name__ == "__main__":
    wrong = list(complaints(pathlib.Path(sys.argv[1]).resolve()))
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)
