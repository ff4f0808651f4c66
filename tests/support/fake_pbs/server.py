#!/usr/bin/python3 -B
"""server.py STATE: a PBS for tests: server, scheduler and the MoMs of all hosts in one process, for the commands beside it.

STATE/config.json names the hosts, each with the socket of its first process (tests/support/hosts.h). What a job sees
follows what was observed of OpenPBS 23.06; tests/system/test_pbs.cpp states it as claims.
"""

import json
import os
import signal
import socketserver
import sys
import threading
import time

import placement
from job import CANNOT_EXECUTE, Job


class Server:
    def __init__(self, state):
        self.state = state
        self.config = json.load(open(f"{state}/config.json"))
        self.name, self.hosts = self.config["name"], self.config["hosts"]
        self.jobs, self.next_number = {}, 1
        self.changed = threading.Condition()

    def submit(self, request):
        with self.changed:
            number, self.next_number = self.next_number, self.next_number + 1
            array = request.pop("array")
            ids = [f"{number}[{index}].{self.name}" for index in array] if array else [f"{number}.{self.name}"]
            for index, job_id in zip(array or [None], ids):
                one = json.loads(json.dumps(request))
                if array:
                    one["variables"].update(PBS_ARRAY_INDEX=str(index), PBS_ARRAY_ID=f"{number}[].{self.name}")
                self.jobs[job_id] = Job(self, job_id, one)
            self.changed.notify_all()
        return f"{number}[].{self.name}" if array else ids[0]

    def find(self, job_id):
        """A job, or all of an array; the server's name need not be said."""
        wanted = job_id if "." in job_id else f"{job_id}.{self.name}"
        array = wanted.split("[].")[0] + "[" if "[]." in wanted else None
        return [job for name, job in self.jobs.items() if name == wanted or (array and name.startswith(array))]

    def schedule(self):
        """For ever: starts what has room and need not wait."""
        with self.changed:
            while True:
                for job in list(self.jobs.values()):
                    if job.state in "QH" and self.may_run(job):
                        free = {host: {what: facts[what] - self.taken(host, what) for what in ("ncpus", "ngpus")}
                                for host, facts in self.hosts.items()}
                        placed = placement.place(job.chunks, free, "scatter" in job.request["resources"].get("place", ""))
                        job.comment = "" if placed else "Not Running: Insufficient amount of resource: ncpus"
                        if placed:
                            job.placed, job.state = placed, "R"
                            threading.Thread(target=self.run, args=(job,), daemon=True).start()
                self.changed.wait()

    def taken(self, host, what):
        return sum(chunk[what] for job in self.jobs.values() if job.state == "R"
                   for at, chunk in job.placed if at == host)

    def may_run(self, job):
        how, _, parent_id = job.request["depend"].partition(":")
        parents = self.find(parent_id) if parent_id else []
        if any(parent.state != "F" for parent in parents):
            job.state, job.comment = "H", "Job held by dependency"
            return False
        succeeded = all(parent.exit_status == 0 for parent in parents)
        if parents and (how == "afterok") != succeeded and how in ("afterok", "afternotok"):
            job.state, job.comment = "F", "Job deleted as result of dependency on job " + parent_id
            return False
        job.state = "Q"
        return True

    def run(self, job):
        job.run()
        with self.changed:
            self.changed.notify_all()

    def delete(self, job):
        with self.changed:
            if job.state in "QH":
                job.state, job.comment = "F", "job deleted before it ran"
                self.changed.notify_all()
            elif job.state == "F":
                return False
        job.end("delete")
        return True


class Command(socketserver.StreamRequestHandler):
    """One command of a user, or of a task."""

    def answer(self, **fields):
        self.wfile.write(json.dumps(fields).encode() + b"\n")

    def handle(self):
        request = json.loads(self.rfile.readline())
        getattr(self, "do_" + request.pop("op"))(**request)

    def do_submit(self, job):
        server = self.server.pbs
        if job["queue"] not in server.config["queues"]:
            return self.answer(error="Unknown queue", code=170)
        try:
            placement.parse_select(job["resources"].get("select", "1"))
            placement.seconds(job["resources"].get("walltime", "0"))
        except ValueError:
            return self.answer(error="Illegal attribute or resource value", code=168)
        self.answer(id=server.submit(job))

    def do_status(self, ids, history):
        server = self.server.pbs
        found, errors = {}, []
        with server.changed:
            for job_id in ids or list(server.jobs):
                jobs = server.find(job_id)
                if not jobs:
                    errors.append([f"Unknown Job Id {job_id}", 153])
                for job in jobs:
                    if job.state != "F" or history:
                        found[job.id] = job.attributes()
                    elif ids:
                        errors.append([f"{job.id} Job has finished, use -x or -H to obtain historical job information", 35])
        self.answer(jobs=found, errors=errors, timestamp=int(time.time()), server=server.name)

    def do_delete(self, id):
        jobs = self.server.pbs.find(id)
        if not jobs:
            return self.answer(error=f"Unknown Job Id {id}", code=153)
        done = [self.server.pbs.delete(job) for job in jobs]
        self.answer() if any(done) else self.answer(error=f"Job has finished {id}", code=35)

    def do_rerun(self, id):
        jobs = self.server.pbs.find(id)
        if not jobs:
            return self.answer(error=f"Unknown Job Id {id}", code=153)
        if not jobs[0].request["rerunable"]:
            return self.answer(error=f"Job not rerunnable {id}", code=159)
        jobs[0].end("rerun")
        self.answer()

    def do_spawn(self, id, cookie, lines, argv):
        """Starts the program at lines of the node file, all at once, and tells how each ended. A second line is a signal."""
        job = next(iter(self.server.pbs.find(id)), None)
        if job is None or job.state != "R" or job.cookie != cookie:
            return self.answer(error="not a task of a running job", code=255)
        nodes = {host: node for node, host in enumerate(job.hosts)}
        all_lines = placement.node_file(job.placed)
        chosen = [line for line in (range(len(all_lines)) if lines is None else lines) if 0 <= line < len(all_lines)]
        tasks = [job.spawn(nodes[all_lines[line]], argv) for line in chosen]

        def pass_on():
            try:
                for line in iter(said.readline, ""):
                    for task in tasks:
                        if task is not None and task.process.poll() is None:
                            job.on_host(job.hosts[task.node], "pkill", f"-{json.loads(line)['signal']}", "-s", task.session)
            except ConnectionResetError:
                pass  # pbsdsh was killed

        said = os.fdopen(os.dup(self.connection.fileno()))  # for as long as somebody reads there
        threading.Thread(target=pass_on, daemon=True).start()
        self.answer(tasks=[[task.id if task else f"{line:08x}", task.wait() if task else CANNOT_EXECUTE]
                           for line, task in zip(chosen, tasks)])


    def do_attach(self, id, host, session):
        job = next(iter(self.server.pbs.find(id)), None)
        if job is None or job.state != "R" or host not in job.hosts:
            return self.answer(error="tm_attach: not a host of a running job", code=255)
        job.attach(job.hosts.index(host), session)
        self.answer()


class Listener(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state = sys.argv[1]
    with Listener(f"{state}/socket", Command) as listener:
        listener.pbs = Server(state)
        threading.Thread(target=listener.pbs.schedule, daemon=True).start()
        print("serving", flush=True)
        listener.serve_forever()


main()
