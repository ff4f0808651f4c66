#!/usr/bin/python3 -B
"""qsub, qstat, qdel, qrerun, pbsdsh, pbs_tmrsh and pbs_attach, by the name it is called by, of the server in $FAKE_PBS.

Without that variable the server's state is where the called name is: in STATE/bin.
"""

import getopt
import json
import os
import signal
import socket
import sys
import time

import placement

NAME = os.path.basename(sys.argv[0])
STATE = os.environ.get("FAKE_PBS") or os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))


def fail(text, code):
    sys.exit((print(f"{NAME}: {text}", file=sys.stderr), code)[1])


class Connection:
    def __init__(self, **request):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(f"{STATE}/socket")
        except OSError:
            fail("cannot connect to server (errno=15010)", 15010 % 256)
        self.say(**request)

    def say(self, **request):
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def answer(self):
        answer = json.loads(self.socket.makefile().readline() or '{"error": "End of File", "code": 255}')
        if "error" in answer:
            fail(answer["error"], answer["code"])
        return answer


def ask(**request):
    return Connection(**request).answer()


def options_of(words, letters):
    try:
        return getopt.getopt(words, letters)
    except getopt.GetoptError as error:
        fail(str(error), 2)


def resources(options):
    """-l select=2:ncpus=4,walltime=10 and repeated ones."""
    pairs = [pair.split("=", 1) for name, value in options if name == "-l" for pair in value.split(",")]
    return {name: value for name, value in pairs}


def job_variables(options):
    variables = {}
    if ("-V", "") in options:
        variables.update(os.environ)
    for word in (word for name, value in options if name == "-v" for word in value.split(",")):
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            fail("cannot send environment with the job", 1)
        variables[name] = value if equals else os.environ[name]
    for name in ("HOME", "PATH", "SHELL", "LOGNAME", "LANG"):
        if name in os.environ:
            variables["PBS_O_" + name] = os.environ[name]
    return variables


def array_of(text):
    """"0-9:2" as a list."""
    bounds, _, step = text.partition(":")
    first, _, last = bounds.partition("-")
    return list(range(int(first), int(last) + 1, int(step or 1)))


QSUB = "A:a:e:hj:J:k:l:mM:N:o:p:q:r:S:v:VW:z"


def qsub():
    words = sys.argv[1:]
    options, rest = options_of(words, QSUB)
    program = rest if "--" in words and rest else None
    script = None if program else (open(rest[0]).read() if rest else sys.stdin.read())
    from_script, _ = options_of(placement.directives(script or ""), QSUB)
    options = from_script + options  # the command line wins
    last = dict(options)
    attributes = dict(pair.split("=", 1) for name, value in options if name == "-W" for pair in value.split(","))
    variables = job_variables(options)
    queue = last.get("-q", "workq")
    host = socket.gethostname()
    variables.update(PBS_O_WORKDIR=os.getcwd(), PBS_O_HOST=host, PBS_O_QUEUE=queue, PBS_O_SYSTEM="Linux")
    default_name = os.path.basename(program[0] if program else rest[0]) if program or rest else "STDIN"
    print(ask(op="submit", job={
        "name": last.get("-N", default_name)[:236], "queue": queue, "script": script, "program": program,
        "variables": variables, "resources": resources(options), "join": last.get("-j", "n"), "keep": last.get("-k", "n"),
        "paths": {"o": last.get("-o"), "e": last.get("-e")}, "rerunable": last.get("-r", "y") == "y",
        "depend": attributes.get("depend", ""), "array": array_of(last["-J"]) if "-J" in last else None,
        "directory": os.getcwd(), "home": os.environ["HOME"], "host": host, "time": time.time()})["id"], flush=True)


def qstat():
    options, ids = options_of(sys.argv[1:], "fF:xHw")
    names = dict(options)
    told = ask(op="status", ids=ids, history="-x" in names or "-H" in names)
    if names.get("-F") == "json":
        print(json.dumps({"timestamp": told["timestamp"], "pbs_version": "23.06.06", "pbs_server": told["server"],
                          **({"Jobs": told["jobs"]} if told["jobs"] else {})}, indent=4))
    elif "-f" in names:
        for job_id, attributes in told["jobs"].items():
            print(f"Job Id: {job_id}")
            for name, value in attributes.items():
                for inner, text in (value.items() if isinstance(value, dict) and name != "Variable_List" else [("", value)]):
                    text = ",".join(f"{a}={b}" for a, b in text.items()) if isinstance(text, dict) else text
                    print(f"    {name}{'.' if inner else ''}{inner} = {text}")
            print()
    elif told["jobs"]:
        print("Job id            Name             User              Time Use S Queue")
        print("----------------  ---------------- ----------------  -------- - -----")
        for job_id, job in told["jobs"].items():
            used = job.get("resources_used", {}).get("walltime", "0")
            print(f"{job_id:<17.17} {job['Job_Name']:<16.16} {'root':<16}  {used:>8} {job['job_state']} {job['queue']}")
    for text, _ in told["errors"]:
        print(f"qstat: {text}", file=sys.stderr)
    sys.exit(told["errors"][-1][1] if told["errors"] else 0)


def qdel():
    _, ids = options_of(sys.argv[1:], "W:x")
    for job_id in ids:
        ask(op="delete", id=job_id)


def qrerun():
    _, ids = options_of(sys.argv[1:], "W:")
    for job_id in ids:
        ask(op="rerun", id=job_id)


def spawn(lines, argv):
    for name in ("PBS_JOBID", "PBS_JOBCOOKIE"):
        if name not in os.environ:
            fail("not executing under PBS", 1)
    return Connection(op="spawn", id=os.environ["PBS_JOBID"], cookie=os.environ["PBS_JOBCOOKIE"], lines=lines, argv=argv)


def pbsdsh():
    options, argv = options_of(sys.argv[1:], "c:n:sovh:")
    chosen = dict(options)
    lines = None
    if "-n" in chosen:
        lines = [int(chosen["-n"])]
    elif "-c" in chosen:
        lines = list(range(int(chosen["-c"])))
    elif "-h" in chosen:
        node_file = open(os.environ["PBS_NODEFILE"]).read().split()
        lines = [node_file.index(chosen["-h"])] if chosen["-h"] in node_file else []
    if not argv:
        fail("usage: pbsdsh [-c copies][-s][-v][-o] -- program [program args]", 2)
    tasks = spawn(lines, argv)
    signal.signal(signal.SIGTERM, lambda *_: tasks.say(signal=15))
    for task, code in tasks.answer()["tasks"]:
        if code != 0:
            print(f"pbsdsh: task 0x{task} exit status {code}", file=sys.stderr)


def pbs_tmrsh():
    argv = sys.argv[1:]
    if len(argv) < 2:
        fail("usage: pbs_tmrsh host [-n][-l username] [command]", 255)
    if "PBS_NODEFILE" not in os.environ:
        fail("PBS_NODEFILE is not set", 255)
    node_file = open(os.environ["PBS_NODEFILE"]).read().split()
    if argv[0] not in node_file:
        fail(f"host \"{argv[0]}\" is not a node in job <{os.environ.get('PBS_JOBID')}>", 255)
    code = spawn([node_file.index(argv[0])], argv[1:]).answer()["tasks"][0][1]
    sys.exit(code - 256 if code > 256 else code)


def pbs_attach():
    """Makes the session it is called in the job's, and becomes the program."""
    options, argv = options_of(sys.argv[1:], "j:m:p:")
    chosen = dict(options)
    if "-j" not in chosen or not argv:
        fail("usage: pbs_attach [-j jobid] [-m port] [-p pid] | cmd arg1 ...", 2)
    ask(op="attach", id=chosen["-j"], host=socket.gethostname(), session=os.getsid(0))
    os.execvp(argv[0], argv)


{"qsub": qsub, "qstat": qstat, "qdel": qdel, "qrerun": qrerun, "pbsdsh": pbsdsh, "pbs_tmrsh": pbs_tmrsh,
 "pbs_attach": pbs_attach}[NAME]()
