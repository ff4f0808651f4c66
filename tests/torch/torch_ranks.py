"""One rank of the training of torch_ranks.cpp in PyTorch: torch_ranks.py DIRECTORY

Compares every loss with that of torch_ranks, which has trained with as many ranks in DIRECTORY, and on rank 0 parameters,
buffers and momenta with its last checkpoint, if there is one. Prints the largest differences.
"""

import json
import os
import pathlib
import struct
import sys

import torch
import torch.distributed

STEPS = 200


class Tied(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.dropout = torch.nn.Dropout(0.25)
        self.decoder = Tied(self.encoder.weight)
        with torch.no_grad():
            for one in (self.encoder.weight, self.encoder.bias):
                one.copy_((torch.arange(one.numel(), dtype=torch.float) * 1.7).sin().reshape(one.shape) * 0.3)

    def forward(self, x):
        return self.decoder(self.dropout(torch.relu(self.norm(self.encoder(x)))))


def load_file(path):
    """safetensors.torch.load_file, or what it does where it is not installed."""
    try:
        from safetensors.torch import load_file as load
        return load(path)
    except ImportError:
        pass
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    types = {"F32": torch.float32, "I64": torch.int64}
    tensors = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(content[begin:end]), dtype=types[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def largest_difference(own, loaded):
    return max((own[name].double() - loaded[name].double()).abs().max().item() for name in loaded)


def compare_checkpoint(directory, net, optimizer):
    checkpoint = directory / "checkpoints" / (directory / "checkpoints/latest").read_text().strip()
    loaded = load_file(checkpoint / "model.safetensors")
    missing, unexpected = net.load_state_dict(dict(net.state_dict(), **loaded)), set(net.state_dict()) - set(loaded)
    assert unexpected == {"decoder.weight"}, unexpected  # the second name of a tied weight
    state = load_file(checkpoint / "optimizer.safetensors")
    assert int(state.pop("steps")) == STEPS
    momenta = {f"momentum_buffer.{name}": optimizer.state[one]["momentum_buffer"] for name, one in net.named_parameters()}
    assert set(state) == set(momenta), set(state) ^ set(momenta)
    return largest_difference(momenta, state)


def main():
    torch.set_num_threads(1)
    directory = pathlib.Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    net = Net()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    # A step that was done again has two lines, and the last one counts.
    theirs = dict(line.split() for line in (directory / f"losses.{rank}").read_text().splitlines())
    assert len(theirs) == STEPS, len(theirs)
    most = 0
    for step in range(STEPS):
        torch.manual_seed(64 * step + rank)
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        most = max(most, abs(loss.item() - float(theirs[str(step)])))
    print(f"losses differ by {most:.1e}, the last is {loss.item():.6f}")
    if rank == 0 and (directory / "checkpoints/latest").exists():
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        momenta = compare_checkpoint(directory, net, optimizer)
        most = max(most, momenta, largest_difference(before, net.state_dict()))
        print(f"checkpoint: differs by {most:.1e}")
    torch.distributed.destroy_process_group()
    return 0 if most < 1e-6 else 1


sys.exit(main())
