"""A job: what it runs, how it ends, what qstat tells of it."""

import os
import secrets
import select
import shutil
import subprocess
import threading
import time
import types

import placement

TASK_PATH = "/bin:/usr/bin"
CANNOT_EXECUTE = 254


class Task:
    """A program that a MoM has started: the leader of a session that the MoM knows."""

    def __init__(self, job, node, argv, environment, stdin, streams):
        self.node = node
        number = job.count_task(node)
        self.id = f"{node:x}{number:07x}" if node else f"{number:08x}"
        environment = dict(environment, PBS_TASKNUM="1" if node == 0 and number == 1 else self.id)
        pid_file = f"{job.directory}/task.{self.id}"
        host = job.hosts[node]
        self.process = subprocess.Popen(
            [os.environ["ON_HOST"], f"--pid-file={pid_file}", job.server.hosts[host]["socket"], *argv],
            env=environment, cwd=job.home, stdin=stdin, stdout=streams[0], stderr=streams[1])
        # on_host names the process before it waits for it.
        while True:
            text = open(pid_file).read() if os.path.exists(pid_file) else ""
            if text.endswith("\n") or self.process.poll() is not None:
                break
            time.sleep(0.0005)
        self.session = text.strip()

    def wait(self):
        code = self.process.wait()
        return code if code >= 0 else 256 - code


class Job:
    def __init__(self, server, job_id, request):
        self.server, self.id, self.request = server, job_id, request
        self.directory = f"{server.state}/jobs/{job_id}"
        os.makedirs(self.directory)
        self.home = request["home"]
        self.state, self.comment, self.exit_status, self.run_count = "Q", "", None, 0
        self.chunks = placement.parse_select(request["resources"].get("select", "1:ncpus=1"))
        self.placed, self.tasks, self.copiers, self.counts = [], [], [], {}
        self.ending = None  # why the job is being ended
        self.lock = threading.Lock()
        self.started = self.used = None
        if request["script"] is not None:
            with open(f"{self.directory}/SC", "w") as file:
                file.write(request["script"])
            os.chmod(f"{self.directory}/SC", 0o700)

    # -- what it runs

    @property
    def hosts(self):
        return list(dict.fromkeys(host for host, _ in self.placed))

    @property
    def walltime(self):
        text = self.request["resources"].get("walltime")
        return placement.seconds(text) if text else None

    def count_task(self, node):
        with self.lock:
            self.counts[node] = self.counts.get(node, 0) + 1
            return self.counts[node]

    def environment(self, node):
        """What every task has; the script's is more."""
        chunk = self.placed[0][1]
        threads = str(chunk.get("ompthreads", chunk["ncpus"]))
        user = os.environ.get("USER", "root")
        variables = dict(self.request["variables"])
        variables.update({
            "PATH": TASK_PATH, "HOME": self.home, "LOGNAME": user, "USER": user, "SHELL": "/bin/bash",
            "PBS_JOBID": self.id, "PBS_JOBNAME": self.request["name"], "PBS_QUEUE": self.request["queue"],
            "PBS_JOBCOOKIE": self.cookie, "PBS_NODENUM": str(node), "PBS_MOMPORT": "15003", "PBS_JOBDIR": self.home,
            "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": threads, "OMP_NUM_THREADS": threads,
            "TMPDIR": f"/tmp/pbs.{self.id}"})
        return variables

    def streams(self):
        """The job's output files, opened to append: a job that runs again goes on in them."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        out = os.open(self.output_path("o"), flags, 0o600)
        joined = self.request["join"] == "oe"
        return out, os.dup(out) if joined else os.open(self.output_path("e"), flags, 0o600)

    def output_path(self, which):
        """Where it is written while the job runs: spooled, but for -k doe."""
        kept = self.request["keep"]
        return self.final_path(which) if "d" in kept and which in kept else f"{self.directory}/{which.upper()}"

    def final_path(self, which):
        number = self.id.split(".")[0].replace("[", ".").replace("]", "")
        default = f"{self.request['name']}.{which}{number}"
        wanted = self.request["paths"].get(which) or default
        path = os.path.join(self.request["directory"], wanted.split(":")[-1])
        return os.path.join(path, f"{self.id}.{'OU' if which == 'o' else 'ER'}") if os.path.isdir(path) else path

    def spawn(self, node, argv):
        """A task of TM: none of the caller's environment, nor its standard streams."""
        environment = self.environment(node)
        if node != 0:
            environment["PBS_NODEFILE"] = self.node_file
        known = os.access(argv[0], os.X_OK) if "/" in argv[0] else shutil.which(argv[0], path=TASK_PATH)
        if not known:
            return None
        with self.lock:
            if self.state != "R" or self.ending:
                return None
        return self.start_task(node, argv, environment, subprocess.DEVNULL)

    def start_task(self, node, argv, environment, stdin):
        streams = self.streams() if node == 0 else [self.demultiplexed(file) for file in self.streams()]
        try:
            task = Task(self, node, argv, environment, stdin, streams)
        finally:
            for stream in streams:
                os.close(stream)
        with self.lock:
            self.tasks.append(task)
        return task

    def attach(self, node, session):
        """A session that somebody else has started becomes the job's."""
        with self.lock:
            self.tasks.append(types.SimpleNamespace(node=node, session=str(session), wait=lambda: 0))

    def demultiplexed(self, file):
        """A pipe to a file for a task of another host. The first host's pbs_demux reads it, and dies of the job's SIGTERM:
        from then on the pipe is broken."""
        reading, writing = os.pipe2(os.O_CLOEXEC)

        def copy():
            while not self.ending and (select.select([reading], [], [], 0.005)[0] == [] or self.copy_some(reading, file)):
                pass
            os.close(reading)
            os.close(file)

        self.copiers.append(threading.Thread(target=copy, daemon=True))
        self.copiers[-1].start()
        return writing

    @staticmethod
    def copy_some(reading, file):
        piece = os.read(reading, 65536)
        os.write(file, piece)
        return piece

    def start_script(self):
        environment = dict(self.environment(0), PBS_NODEFILE=self.node_file)
        if self.request["program"]:
            return self.start_task(0, self.request["program"], environment, subprocess.DEVNULL)
        # A login shell leads the session, and reads the script's name; the script finds the rest of that pipe: nothing.
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.write(writing, f"{self.directory}/SC\n".encode())
        os.close(writing)
        try:
            return self.start_task(0, ["/bin/sh", "-c", "trap '' QUIT; exec bash -l"], environment, reading)
        finally:
            os.close(reading)

    # -- its life

    def run(self):
        self.run_count += 1
        self.cookie = secrets.token_hex(16).upper()
        self.tasks, self.copiers, self.counts, self.used = [], [], {}, None
        self.node_file = f"{self.directory}/nodefile"
        with open(self.node_file, "w") as file:
            file.writelines(f"{host}\n" for host in placement.node_file(self.placed))
        for host in self.hosts:
            self.on_host(host, "mkdir", "-p", f"/tmp/pbs.{self.id}")
        self.started = time.time()
        leader = self.start_script()
        ended = threading.Event()
        threading.Thread(target=lambda: (leader.wait(), ended.set()), daemon=True).start()
        next_poll = time.monotonic() + self.server.config["poll"]
        while not ended.wait(0.01) and not self.ending:
            if time.monotonic() < next_poll:
                continue
            next_poll += self.server.config["poll"]
            self.used = int(time.time() - self.started)
            if self.walltime is not None and self.used > self.walltime:
                self.end("walltime")
                with open(self.output_path("o"), "a") as out:
                    out.write(f"=>> PBS: job killed: walltime {self.used} exceeded limit {self.walltime}\n")
        if self.ending:
            self.signal_hosts("TERM")
            self.await_end_of_first_host(time.monotonic() + self.server.config["kill_delay"])
        self.signal_hosts("KILL")
        self.exit_status = -29 if self.ending == "walltime" else leader.wait()
        for task in self.tasks:
            task.wait()
        for copier in self.copiers:
            copier.join(timeout=2)
        for host in self.hosts:
            self.on_host(host, "rm", "-rf", f"/tmp/pbs.{self.id}")
        if self.ending == "rerun":
            self.state, self.placed, self.ending = "Q", [], None
            return
        for which in "oe":
            if os.path.exists(self.output_path(which)) and self.output_path(which) != self.final_path(which):
                shutil.copyfile(self.output_path(which), self.final_path(which))
                os.chmod(self.final_path(which), 0o600)
        self.state = "F"

    def end(self, why):
        with self.lock:
            self.ending = self.ending or why

    def on_host(self, host, *argv):
        return subprocess.run([os.environ["ON_HOST"], self.server.hosts[host]["socket"], *argv],
                              env={"PATH": os.environ["PATH"]}, cwd="/", stdout=subprocess.DEVNULL).returncode

    def sessions(self, node):
        with self.lock:
            return ",".join(task.session for task in self.tasks if task.node == node and task.session)

    def signal_hosts(self, name):
        """Every process of every session that was started here; who has made a session of its own is not found."""
        for node, host in enumerate(self.hosts):
            if self.sessions(node):
                self.on_host(host, "pkill", f"-{name}", "-s", self.sessions(node))

    def await_end_of_first_host(self, deadline):
        while time.monotonic() < deadline and self.on_host(self.hosts[0], "pgrep", "-s", self.sessions(0)) == 0:
            time.sleep(0.05)

    # -- what qstat tells

    def attributes(self):
        request, host = self.request, self.server.name
        nodes = sorted({host for host, _ in self.placed}) or self.chunks
        told = {
            "Job_Name": request["name"], "Job_Owner": f"root@{host}", "job_state": self.state, "queue": request["queue"],
            "server": host, "Join_Path": request["join"], "Keep_Files": request["keep"],
            "Output_Path": f"{request['host']}:{self.final_path('o')}",
            "Error_Path": f"{request['host']}:{self.final_path('e')}",
            "Rerunable": "True" if request["rerunable"] else "False", "run_count": self.run_count,
            "substate": {"Q": 10, "H": 22, "R": 42, "F": 92}[self.state],
            "ctime": time.ctime(request["time"]), "qtime": time.ctime(request["time"]),
            "Resource_List": {
                "ncpus": sum(chunk["ncpus"] for chunk in self.chunks), "nodect": len(nodes),
                "ngpus": sum(chunk["ngpus"] for chunk in self.chunks),
                "mpiprocs": sum(chunk["mpiprocs"] for chunk in self.chunks), **request["resources"]},
            "Variable_List": request["variables"], "comment": self.comment}
        if self.placed:
            told.update(exec_host=placement.exec_host(self.placed), exec_vnode=placement.exec_vnode(self.placed))
        if self.started is not None:
            told["stime"] = time.ctime(self.started)
        if self.used is not None:
            told["resources_used"] = {"cput": "00:00:00", "walltime": placement.clock_text(self.used)}
        if self.state == "F" and self.exit_status is not None:
            told["Exit_status"] = self.exit_status
        return told
