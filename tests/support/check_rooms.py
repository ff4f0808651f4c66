#!/usr/bin/env python3
"""Reads the #include lines: no two rooms know each other, no room is too large, and what must not be known is not.
Reads the calls of the standard library: none throws where errors are values.
Looks into the root: nothing lies there that is not on the list.

Takes the root of the tree; prints one line for each thing that is wrong.
"""

import collections
import fnmatch
import pathlib
import re
import sys

MOST_UNITS = 20  # in one folder; a header and its source are one
MOST_PUBLIC = 30  # in the folder whose headers users of libddp include by name

# Every folder below these is a room.
TREES = ["env", "launcher", "pbs", "rendezvous", "workers/ddp", "workers/train"]

# The page with the table of folders.
MAP = "docs/architecture.md"

# Files are included by their path from the root, or from here.
INCLUDED_FROM = ["", "workers/"]

# What begins with one of the first may include nothing that begins with one of the second, directly or through a header.
LOOP = ["env/os/event_loop"]
PURE = [
    "launcher/machine/gpu/gpu_health", "launcher/hang/hang_detector", "launcher/spec/job_spec",
    "launcher/output/lines", "launcher/plan/", "launcher/node/pmix/exchange", "launcher/node/pmix/job_facts", "launcher/node/pmix/wish",
    "launcher/ends/explain", "launcher/ends/report", "launcher/start/start_state",
    "launcher/node/agent_state",
    "launcher/head/job_", "launcher/head/generation.",
    "launcher/head/recovery", "launcher/head/world_change", "launcher/head/restart_policy",
    "launcher/head/stop_agreement", "launcher/head/succession",
    "launcher/tools/ask", "launcher/tools/clean", "launcher/tools/doctor/judge", "launcher/tools/trace/",
    "rendezvous/client/link_state", "rendezvous/client/relay_state", "rendezvous/serve/admission", "rendezvous/serve/membership",
    "rendezvous/serve/store.",
    "rendezvous/serve/torch_store", "rendezvous/wire/frame", "rendezvous/wire/handshake", "rendezvous/wire/session",
    "rendezvous/wire/store_message", "rendezvous/wire/tls",
]
# The rooms that other rooms of the launcher stand on, and those that stand on them.
ON_THE_GROUND = [f"launcher/{room}/" for room in ("ends", "guard", "hang", "machine", "output", "plan", "spec", "start", "talk")]
JOB_RUNNING = [f"launcher/{room}/" for room in ("head", "job", "node", "questions")]
DDP = {room: f"workers/ddp/{room}/" for room in ("checkpoint", "cuda", "data", "group", "mpi", "nccl", "net", "program", "reduce", "shm", "worker")}


def ddp_but(*known):
    return [folder for room, folder in DDP.items() if room not in known]


NOT_KNOWN = [
    (PURE, LOOP),
    (ON_THE_GROUND, JOB_RUNNING + ["launcher/cli/", "launcher/tools/", "launcher/launch"]),
    (["launcher/tools/"], JOB_RUNNING + ["launcher/cli/", "launcher/hang/", "launcher/launch", "launcher/start/"]),
    (JOB_RUNNING, ["launcher/cli/", "launcher/tools/"]),
    (["env/", "pbs/", "rendezvous/"], ["launcher/", "workers/"]),
    (["launcher/"], ["workers/"]),
    ([DDP["worker"], "workers/ddp/trace/"], ddp_but("worker")),
    ([DDP["shm"]], ddp_but("shm", "worker")),  # builds without a header of CUDA, and meets nccl in group only
    ([DDP["net"]], ddp_but("net", "shm", "worker")),
    ([DDP["cuda"]], ddp_but("cuda", "worker")),
    ([DDP["nccl"]], ddp_but("nccl", "cuda", "worker")),
    ([DDP["mpi"]], ddp_but("mpi", "cuda", "worker")),
    ([DDP["group"]], ddp_but("group", "mpi", "nccl", "net", "shm", "cuda", "worker")),
    ([DDP["reduce"]], ddp_but("reduce", "cuda", "worker")),
    ([DDP["data"]], ddp_but("data", "cuda", "worker")),
    ([DDP["checkpoint"]], ddp_but("checkpoint", "cuda", "worker")),
    ([DDP["program"]], ddp_but("program")),  # stands on the public headers
]

# What may lie in the root, besides what .gitignore names.
IN_ROOT = {
    ".ci", ".clang-format", ".clang-tidy", ".git", ".gitignore", "CONTRIBUTING.md", "LICENSE", "README.md", "docs",
    "env", "examples", "launcher", "meson.build", "meson_options.txt", "packaging", "pbs",
    "pyproject.toml", "quickstart", "rendezvous", "tests", "workers",
}

# Trees in which no call of the standard library may throw, and the file that wraps one.
ERRORS_ARE_VALUES = ["env", "launcher", "pbs", "rendezvous"]
MAY_THROW = {"env/io/background_call.cpp"}  # start_thread

SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
# What to use in place of a call that throws.
THROWING = [
    (re.compile(r"std::(?:async|promise|packaged_task|jthread)\b|std::thread\s*[({]|std::thread\s+\w+\s*[({]"),
     "use start_thread() or BackgroundCall (env/io/background_call.h)"),
    (re.compile(r"std::sto(?:i|l|ul|ll|ull|f|d|ld)\s*\("), "use parse_int() and the like (env/text.h)"),
    (re.compile(r"std::(?:random_device|regex|locale)\b"), "it throws"),
    (re.compile(r"std::filesystem::(?:recursive_)?directory_iterator\b"), "its increment throws: use names_in() (env/io/file.h)"),
]
ON_FILES = re.compile(
    r"std::filesystem::(absolute|canonical|weakly_canonical|relative|proximate|copy|copy_file|copy_symlink|create_directory"
    r"|create_directories|create_hard_link|create_symlink|create_directory_symlink|current_path|equivalent|exists|file_size"
    r"|hard_link_count|is_block_file|is_character_file|is_directory|is_empty|is_fifo|is_other|is_regular_file|is_socket"
    r"|is_symlink|last_write_time|permissions|read_symlink|remove|remove_all|rename|resize_file|space|status|symlink_status"
    r"|temp_directory_path)\s*\(")
ERROR_CODE = re.compile(r"std::error_code\s*&?\s*(\w+)")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def read_includes(root, trees):
    """{file: [files of the trees that it includes]}, as paths from the root."""
    files = [path for tree in trees for path in sorted((root / tree).rglob("*")) if path.suffix in SUFFIXES]
    known = {path.relative_to(root).as_posix() for path in files}

    def included(text):
        names = (folder + name for name in INCLUDE.findall(text) for folder in INCLUDED_FROM)
        return [name for name in names if name in known]

    return {path.relative_to(root).as_posix(): included(path.read_text()) for path in files}


def folder_of(file):
    return file.rsplit("/", 1)[0]


def find_cycle(graph):
    """[a, b, ..., a], or nothing."""
    done, path = set(), []

    def visit(room):
        if room in path:
            return path[path.index(room):] + [room]
        if room in done:
            return None
        path.append(room)
        for other in sorted(graph[room]):
            if found := visit(other):
                return found
        done.add(path.pop())
        return None

    for room in sorted(graph):
        if found := visit(room):
            return found
    return None


def cycles(includes):
    graph, example = collections.defaultdict(set), {}
    for file, others in includes.items():
        for other in others:
            pair = folder_of(file), folder_of(other)
            if pair[0] != pair[1]:
                graph[pair[0]].add(pair[1])
                example.setdefault(pair, f"{file} includes {other}")
    graph = {room: graph[room] for room in {folder_of(file) for file in includes}}
    if cycle := find_cycle(graph):
        steps = "; ".join(example[pair] for pair in zip(cycle, cycle[1:]))
        yield f"rooms that know each other: {' -> '.join(cycle)} ({steps})"


def whole_tree_of(file, tree):
    """The folder directly under `tree` that the file lies in, however deep; "." for files of `tree` itself."""
    inside = file[len(tree) + 1:].split("/")
    return inside[0] if len(inside) > 1 else "."


def arrows_up(includes, trees):
    """No folder of a tree includes, over any way, a folder that includes it: whole folders are compared."""
    for tree in trees:
        graph, example = collections.defaultdict(set), {}
        for file, others in includes.items():
            for other in others:
                if not (file.startswith(tree + "/") and other.startswith(tree + "/")):
                    continue
                pair = whole_tree_of(file, tree), whole_tree_of(other, tree)
                if pair[0] != pair[1]:
                    graph[pair[0]].add(pair[1])
                    example.setdefault(pair, f"{file} includes {other}")
        for room in [other for others in graph.values() for other in others]:
            graph.setdefault(room, set())
        if cycle := find_cycle(graph):
            steps = "; ".join(example[pair] for pair in zip(cycle, cycle[1:]))
            yield f"folders of {tree}/ that know each other: {' -> '.join(cycle)} ({steps})"


def out_of_order(includes, map_page):
    """No folder includes one that stands below it in the page's table of folders."""
    rows = re.findall(r"^\| `([\w/]+)/` \|", map_page.read_text(), re.M)
    row = {folder: number for number, folder in enumerate(rows)}
    for file, others in includes.items():
        for other in others:
            if row.get(folder_of(other), -1) > row.get(folder_of(file), len(rows)):
                yield f"{file} includes {other}, whose folder stands below its own in {map_page.name}"


def large_rooms(includes):
    units = collections.defaultdict(set)
    for file in includes:
        folder, name = file.rsplit("/", 1)
        units[folder].add(name.rsplit(".", 1)[0])
    for folder in sorted(units):
        most = MOST_PUBLIC if folder == "workers/ddp" else MOST_UNITS
        if len(units[folder]) > most:
            yield f"{folder}: {len(units[folder])} units, at most {most} may lie in one folder"


def way_to(includes, start, targets):
    """The files from `start` to the first that begins with a target, or nothing."""
    waiting, before = collections.deque([start]), {start: None}
    while waiting:
        file = waiting.popleft()
        for other in includes[file]:
            if other in before:
                continue
            before[other] = file
            if other.startswith(tuple(targets)):
                way = [other]
                while before[way[-1]]:
                    way.append(before[way[-1]])
                return way[::-1]
            waiting.append(other)
    return None


def forbidden(includes, not_known):
    for starts, targets in not_known:
        for start in starts:
            files = [file for file in includes if file.startswith(start)]
            if not files:
                yield f"{start}: there is no such file"
            ways = [way for file in files if (way := way_to(includes, file, targets))]
            if ways:
                yield f"{start} may not know {ways[0][-1]}: {' -> '.join(ways[0])}"


def last_argument(text, begin):
    """Of the call whose arguments begin there, behind the parenthesis."""
    depth, at = 1, begin
    last = begin
    while depth > 0 and at < len(text):
        if text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        elif text[at] == "," and depth == 1:
            last = at + 1
        at += 1
    return text[last:at - 1].strip()


def throwing_calls(root, trees):
    for file in sorted(path for tree in trees for path in (root / tree).rglob("*") if path.suffix in SUFFIXES):
        name = file.relative_to(root).as_posix()
        if name in MAY_THROW:
            continue
        text = re.sub(r"//.*", "", file.read_text())
        codes = set(ERROR_CODE.findall(text))
        found = [(match, remedy) for pattern, remedy in THROWING for match in pattern.finditer(text)]
        found += [(match, "give it a std::error_code") for match in ON_FILES.finditer(text)
                  if last_argument(text, match.end()) not in codes]
        for match, remedy in found:
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group().rstrip('( {')} throws: {remedy}"


def strays(root, allowed):
    ignore = root / ".gitignore"
    patterns = [line.strip("/") for line in ignore.read_text().splitlines()] if ignore.exists() else []
    for name in sorted(path.name for path in root.iterdir()):
        if name not in allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            yield f"{name} lies in the root: remove it, or add it to IN_ROOT of tests/support/check_rooms.py"


def complaints(root, trees, not_known):
    includes = read_includes(root, trees)
    yield from list(cycles(includes)) or arrows_up(includes, trees)
    yield from out_of_order(includes, root / MAP)
    yield from large_rooms(includes)
    yield from forbidden(includes, not_known)


if __name__ == "__main__":
    tree = pathlib.Path(sys.argv[1])
    wrong = [*complaints(tree, TREES, NOT_KNOWN), *throwing_calls(tree, ERRORS_ARE_VALUES), *strays(tree, IN_ROOT)]
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)
