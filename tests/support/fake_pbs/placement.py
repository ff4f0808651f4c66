"""Where a job's chunks go, and what is said of it: pure functions."""

import re


def parse_select(text):
    """"2:ncpus=4:mpiprocs=2+1:ngpus=1" as one dictionary for each chunk. ValueError tells what is wrong."""
    chunks = []
    for part in text.split("+"):
        words = part.split(":")
        count = int(words.pop(0)) if words[0].isdigit() else 1
        chunk = {"ncpus": 1, "ngpus": 0}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise ValueError(f"illegal -l value: {word}")
            chunk[name] = int(value) if value.isdigit() else value
        chunk.setdefault("mpiprocs", 1)
        chunks += [dict(chunk) for _ in range(count)]
    return chunks


def place(chunks, free, scatter):
    """[(host, chunk)] by first fit, or None while there is no room; free is {host: {ncpus, ngpus}} and stays as it is."""
    left = {host: dict(amounts) for host, amounts in free.items()}
    placed = []
    for chunk in chunks:
        taken = {host for host, _ in placed} if scatter else set()
        fits = [host for host in left if host not in taken and chunk.get("host", host) == host
                and all(left[host][what] >= chunk[what] for what in ("ncpus", "ngpus"))]
        if not fits:
            return None
        for what in ("ncpus", "ngpus"):
            left[fits[0]][what] -= chunk[what]
        placed.append((fits[0], chunk))
    return placed


def node_file(placed):
    """One line for each MPI process, in chunk order."""
    return [host for host, chunk in placed for _ in range(chunk["mpiprocs"])]


def exec_vnode(placed):
    def one(host, chunk):
        return f"({host}:ncpus={chunk['ncpus']}" + (f":ngpus={chunk['ngpus']})" if chunk["ngpus"] else ")")
    return "+".join(one(host, chunk) for host, chunk in placed)


def exec_host(placed):
    return "+".join(f"{host}/{index}*{chunk['ncpus']}" for index, (host, chunk) in enumerate(placed))


def seconds(text):
    """"01:02:03", "02:03" and "3" as seconds."""
    total = 0
    for word in text.split(":"):
        total = total * 60 + int(word)
    return total


def clock_text(total):
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


def directives(script):
    """The words of the #PBS lines, which end with the first command."""
    words = []
    for line in script.splitlines():
        if line.startswith("#PBS"):
            words += re.findall(r"(?:[^\s\"']|\"[^\"]*\"|'[^']*')+", line[4:].split(" #")[0])
        elif line.strip() and not line.startswith("#"):
            break
    return [re.sub(r"[\"']", "", word) for word in words]
