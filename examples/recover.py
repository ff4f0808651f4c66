"""A PyTorch program whose killed ranks cost no step: ddprun starts them again, and the others go on.

    ddprun --nproc-per-node=4 recover.py        # then, from another terminal: kill -9 one of the workers

The survivors keep their process, model and optimizer. They leave the failed process group, hear of the next generation
on ddprun's lifeline (docs/events.md, "Letters of recovery in place"), meet in a new group, and all ranks take the state
of the one that has done most steps. Prints the same digest however often a rank is killed. Needs torch with gloo."""

import hashlib
import os
import socket
import sys

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "2000"))


class Lifeline:
    """The worker's side of recovery in place. Without ddprun, or with --recover=restart, nothing is recovered."""

    def __init__(self):
        recovers = "DDPRUN_KEPT_FD" in os.environ
        self.socket = socket.socket(fileno=int(os.environ["DDPRUN_LIFELINE_FD"])) if recovers else None
        self.say("Rin-place 0")

    def say(self, packet):
        if self.socket:
            self.socket.send(packet.encode())

    def has_come(self):
        """Tells that this process waits for the others: then it is not late, however long they take to start."""
        self.say(f"C{os.environ['DDPRUN_GENERATION']}")

    def joined(self, step):
        self.say(f"Rin-place {os.environ['DDPRUN_GENERATION']} {step}")

    def next_generation_follows_failure(self, step, error):
        """Tells that this process has left its group. False: no generation follows."""
        self.say(f"L{os.environ['DDPRUN_GENERATION']} {step} {str(error).splitlines()[0]}")
        return self.socket is not None and self.wait() == "G"

    def next_generation_follows_end(self):
        """Waits until all ranks have done their work. True: one was lost meanwhile, and waits for the others."""
        self.say(f"F{os.environ['DDPRUN_GENERATION']}")
        return self.socket is not None and self.wait() == "G"

    def wait(self):
        """"G": a generation begins, and the environment is that of it; "E": all have finished; "": neither."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self.socket, 16384, 1)
            for descriptor in descriptors:  # the shared memory of the generation, for `import ddprun`
                os.dup2(descriptor, int(os.environ["DDPRUN_SEGMENT_FD"]))
                os.close(descriptor)
            if not packet:
                sys.exit("ddprun has ended")
            letter, text = packet[:1].decode(), packet[1:].decode()
            if letter == "G":
                os.environ.update(line.split("=", 1) for line in text.splitlines())
                return "G" if text else ""
            if letter == "E":
                return "E"


class Training:
    """What outlives the process groups."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = 0

    def take_newest(self):
        """Gives all ranks the state of the one that has done most steps."""
        steps = [None] * dist.get_world_size()
        dist.all_gather_object(steps, self.step)
        state = [(self.model.state_dict(), self.optimizer.state_dict())]
        dist.broadcast_object_list(state, steps.index(max(steps)))
        if self.step < max(steps):
            self.model.load_state_dict(state[0][0])
            self.optimizer.load_state_dict(state[0][1])
            self.step = max(steps)

    def train(self):
        replica = torch.nn.parallel.DistributedDataParallel(self.model)
        while self.step < STEPS:
            # The samples are a function of step and rank, so that a step that is repeated has the same ones.
            generator = torch.Generator().manual_seed(self.step * dist.get_world_size() + dist.get_rank())
            x = torch.rand(64, 1, generator=generator)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(x), 3 * x - 1).backward()  # fails when a rank is lost
            self.optimizer.step()
            self.step += 1


def run_generation(training, lifeline):
    """Trains in one process group. False: the next generation follows."""
    try:
        lifeline.has_come()
        dist.init_process_group("gloo")
        training.take_newest()
        lifeline.joined(training.step)
        print(f"rank {dist.get_rank()} (pid {os.getpid()}) goes on from step {training.step}", flush=True)
        training.train()
        error = None
    except RuntimeError as caught:  # gloo: a peer's connection is closed
        # Its traceback would keep the frames of train(), the replica in them, and so the connections open for which
        # the neighbours wait.
        error = caught.with_traceback(None)
    if dist.is_initialized():
        dist.destroy_process_group()  # closes the connections, so that the other peers notice too
    if error is None:
        return not lifeline.next_generation_follows_end()
    if not lifeline.next_generation_follows_failure(training.step, error):
        raise error
    return False


def main():
    torch.set_num_threads(1)
    training, lifeline = Training(), Lifeline()
    while not run_generation(training, lifeline):
        pass
    weights = [training.model.weight.item(), training.model.bias.item()]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:8]
    if os.environ.get("RANK", "0") == "0":
        print(f"{training.step} steps: y = {weights[0]:.4f} x + {weights[1]:.4f}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
