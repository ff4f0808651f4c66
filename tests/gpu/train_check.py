#!/usr/bin/env python3
"""Compares the train program's loss and gradients on a GPU with PyTorch's on the same GPU.

    train_check.py TRAIN_GRADIENTS [--json FILE]

TRAIN_GRADIENTS writes one batch with weights, loss and gradients for each precision; PyTorch computes the same in
float64, and in the precision itself. Ours may be as far from float64 as PyTorch's own result is, times three, or
within a small part of the largest gradient. Exit codes: 0 they agree, 1 they do not, 77 (with one line) there is no GPU
or no PyTorch.
"""
import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
# Of the largest gradient of a parameter, whatever PyTorch's own error is. tf32: some kernels cut inputs to their 10 bits
# where others round them, 4e-3 apart in the last layer; which ones run is each library's choice.
FLOOR = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 1.5e-2, "fp16": 2e-3}
TIMES_PYTORCH = 3.0


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    import torch
except ImportError:
    skip("no PyTorch in this Python")

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}


def read_safetensors(path):
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = bytearray(raw[8 + length + begin:8 + length + end])
        tensors[name] = torch.frombuffer(data, dtype=TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def pytorch_pass(tensors, dtype):
    """Loss and gradients of the perceptron in `dtype` on the GPU."""
    values = tensors["values"].cuda().to(tensors["fc1.weight"].dtype).to(dtype)
    labels = tensors["labels"].cuda().long()
    layers = sum(1 for name in tensors if name.startswith("fc") and name.endswith(".weight"))
    parameters = {}
    for layer in range(1, layers + 1):
        for kind in ("weight", "bias"):
            name = f"fc{layer}.{kind}"
            parameters[name] = tensors[name].cuda().to(dtype).requires_grad_()
    x = values
    for layer in range(1, layers + 1):
        x = torch.nn.functional.linear(x, parameters[f"fc{layer}.weight"], parameters[f"fc{layer}.bias"])
        if layer < layers:
            x = torch.relu(x)
    loss = torch.nn.functional.cross_entropy(x if dtype == torch.float64 else x.float(), labels)
    loss.backward()
    return loss.item(), {name: p.grad.double().cpu() for name, p in parameters.items()}


def check(program, precision):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pass.safetensors"
        done = subprocess.run([program, path, precision], capture_output=True, text=True)
        if done.returncode == SKIPPED:
            skip(done.stdout.strip().removeprefix("skipped: "))
        if done.returncode != 0:
            print(f"{precision}: {done.stderr.strip()}")
            return [{"precision": precision, "agrees": False, "why": done.stderr.strip()}]
        tensors = read_safetensors(path)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    exact_loss, exact = pytorch_pass(tensors, torch.float64)
    _, theirs = pytorch_pass(tensors, tensors["fc1.weight"].dtype)
    rows = []
    loss = tensors["loss"].item()
    loss_error = abs(loss - exact_loss) / abs(exact_loss)
    rows.append({"what": "loss", "error": loss_error, "pytorch_error": 0.0, "agrees": loss_error <= 2 * FLOOR[precision]})
    for name, reference in exact.items():
        largest = reference.abs().max().item()
        ours = (tensors[f"gradient.{name}"].double() - reference).abs().max().item() / largest
        pytorch = (theirs[name] - reference).abs().max().item() / largest
        rows.append({"what": name, "error": ours, "pytorch_error": pytorch,
                     "agrees": ours <= max(FLOOR[precision], TIMES_PYTORCH * pytorch)})
    for row in rows:
        row.update(precision=precision)
        verdict = "agrees" if row["agrees"] else "DIFFERS"
        print(f"{precision:5}{row['what']:12} "
              f"off by {row['error']:.2e} of the largest (PyTorch {row['pytorch_error']:.2e}): {verdict}")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        skip("PyTorch sees no GPU")
    rows = []
    for precision in FLOOR:
        rows += check(arguments.program, precision)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")
    wrong = [row for row in rows if not row["agrees"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} comparisons agree")
    sys.exit(1 if wrong else 0)


main()
