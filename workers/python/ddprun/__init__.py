"""What a Python worker tells ddprun, and what it hears: its steps, its scalars, and when to stop (docs/python.md).

Without ddprun all functions do nothing. They write into memory that ddprun reads (env/segment.h has the layout): no
system call, no message. For one thread at a time."""
import mmap, os, signal, struct, sys, threading, time

_MAGIC, _VERSION = 0x3147455352504444, 2
_PROGRESS, _STEP, _STOP, _ASKED, _OUTLIVES_TERM = 7, 8, 13, 14, 15  # the words of a RankLine
_WRITTEN, _TAKEN, _LOST, _TAG_COUNT, _IS_READ = range(5)  # the words of a ScalarRing
_TAGS, _TAG_BYTES, _RECORDS, _MOST_TAGS, _MOST_RECORDS = 4096, 128, 65536, 256, 16384
_ABORTED, _REASON = 12, 16  # the words of the SegmentHeader
_LONGEST_WAIT = 30  # seconds; ddprun decides within 3
_ONE_REQUEST = 5  # seconds: a scheduler sends SIGTERM, and ddprun another one


def _open():
    """The rank's line, its ring (None: nobody reads scalars) and the segment's first page."""
    path, number = os.environ.get("DDPRUN_SEGMENT"), os.environ.get("DDPRUN_SEGMENT_FD")
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        if not number:
            raise
        file = os.dup(int(number))  # a container with a /proc of its own
    try:
        head = mmap.mmap(file, 4096)
        magic, version, ranks, world, first, generation, _, _, _, _, scalars = struct.unpack_from("QIIIIQQQIIQ", head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise OSError(f"its layout has version {version}, this module knows {_VERSION}: install one release")
        if int(os.environ.get("DDPRUN_GENERATION", generation)) != generation:
            raise OSError(f"it is of generation {generation}, this process of {os.environ['DDPRUN_GENERATION']}")
        index = int(os.environ["RANK"]) - first
        if not 0 <= index < ranks or int(os.environ.get("WORLD_SIZE", world)) != world:
            return None, None, None  # a rank of another launcher, which runs inside a worker of ddprun
        lines = mmap.mmap(file, 4096 + 128 * ranks)
        line = memoryview(lines)[4096 + 128 * index:4096 + 128 * (index + 1)].cast("Q")
        return line, _open_ring(file, scalars, index), memoryview(head).cast("I")
    finally:
        os.close(file)


def _open_ring(file, scalars, index):
    size = _RECORDS + 32 * _MOST_RECORDS
    ring = mmap.mmap(file, size, offset=scalars + size * index) if scalars else b"\0" * 40
    counters = memoryview(ring)[:40].cast("Q")
    return (ring, counters) if counters[_IS_READ] else None


_line, _ring, _head, _tags, _generation = None, None, None, {}, None


def _attach():
    """Maps the memory of the generation that this process is in."""
    global _line, _ring, _head, _generation
    _generation = os.environ.get("DDPRUN_GENERATION")
    if not os.environ.get("DDPRUN_SEGMENT") or not os.environ.get("RANK"):
        return
    try:
        _line, _ring, _head = _open()
        _tags.clear()
    except (OSError, ValueError) as error:
        print(f"ddprun: steps are not reported: {os.environ['DDPRUN_SEGMENT']}: {error}", file=sys.stderr)


def _line_now():
    """The rank's line; after a recovery in place that of the generation which the environment names by then."""
    if _line is not None and _head[_ABORTED] and os.environ.get("DDPRUN_GENERATION") != _generation:
        _attach()
    return _line


_attach()


def step(n, /, **scalars):
    """Reports that step `n` is done, and numbers that belong to it: step(n, loss=loss)."""
    line = _line_now()
    if line is not None:
        line[_STEP] = n
        line[_PROGRESS] = time.monotonic_ns()
        if scalars and _ring is not None:
            now = time.time()
            for tag, value in scalars.items():
                _tell(n, now, tag, float(value.detach() if hasattr(value, "detach") else value))


def _tell(n, now, tag, value):
    ring, counters = _ring
    written, index = counters[_WRITTEN], _tags.get(tag)
    if index is None:
        index = _add_tag(ring, counters, tag)
    if index == _MOST_TAGS or written - counters[_TAKEN] >= _MOST_RECORDS:
        counters[_LOST] += 1
        return
    struct.pack_into("QddQ", ring, _RECORDS + 32 * (written % _MOST_RECORDS), n, now, value, index)
    counters[_WRITTEN] = written + 1


def _add_tag(ring, counters, tag):
    index = counters[_TAG_COUNT]
    if index < _MOST_TAGS:
        name = tag.encode()[:_TAG_BYTES - 1].decode(errors="ignore").encode()
        ring[_TAGS + _TAG_BYTES * index:_TAGS + _TAG_BYTES * index + len(name)] = name
        counters[_TAG_COUNT] = index + 1
    _tags[tag] = index
    return index


def should_stop(n):
    """Call it after each step `n`, on every rank: True from the step on after which all ranks stop, the same on all.
    Save, and end with exit code 75: "not finished, run me again"."""
    line = _line_now()
    if line is None:
        return False
    _take_term()
    line[_ASKED] = n + 1  # first: see launcher/head/stop_agreement.h
    stop = line[_STOP]
    if stop != 0 and stop // 2 <= n and stop % 2 == 0:
        stop = _decision(n)
    if stop == 0 and _first_term is not None and time.monotonic() - _first_term >= _ONE_REQUEST:
        _end_by_term()  # ddprun has not made it a stop of all ranks
    return stop % 2 == 1 and stop // 2 <= n


_first_term = None  # when SIGTERM came first


def _take_term():
    """Without a handler SIGTERM would end the process before it has saved. A handler of the program's stays."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_term)
        os.register_at_fork(after_in_child=_forget_term)
        handler = _on_term
    _line[_OUTLIVES_TERM] = handler is _on_term


def _on_term(*_):
    """ddprun makes one stop of the first SIGTERM and of its repetitions; a later one ends the process."""
    global _first_term
    _first_term = _first_term or time.monotonic()
    if time.monotonic() - _first_term >= _ONE_REQUEST:
        _end_by_term()


def _end_by_term():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _forget_term():
    """Nobody asks for a stop in a forked child, as those of a DataLoader."""
    if signal.getsignal(signal.SIGTERM) is _on_term:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _decision(n):
    """Waits while a stop at or before step `n` is only proposed."""
    end = time.monotonic() + _LONGEST_WAIT
    stop = _line[_STOP]
    while stop != 0 and stop % 2 == 0 and stop // 2 <= n and time.monotonic() < end:
        time.sleep(0.001)
        stop = _line[_STOP]
    return stop


def why():
    """The reason of the stop: "ddprun drain", "walltime in 2 min"; "" before one."""
    if _line is None or _line[_STOP] % 2 == 0:
        return ""
    return bytes(_head[_REASON:80]).split(b"\0", 1)[0].decode(errors="replace")
