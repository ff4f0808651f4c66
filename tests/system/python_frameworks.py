#!/usr/bin/env python3
"""Drains a real Hugging Face Trainer and a real Lightning Trainer on two ranks: the job exits with 75, a checkpoint of one
step is there, and a second run goes on from it to the end.

Takes the ddprun program; the Python that runs this file has torch, transformers, accelerate and lightning.
"""
import os
import re
import subprocess
import sys
import tempfile

HUGGING_FACE = '''
import sys, time, torch, transformers
from ddprun.huggingface import Callback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

class Slow(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.01)
        if state.global_step == int(sys.argv[2]): print("at the mark", flush=True)

data = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(64)]
args = transformers.TrainingArguments(output_dir=sys.argv[1], max_steps=int(sys.argv[3]), report_to=[], save_strategy="no",
                                      per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, logging_steps=5)
trainer = transformers.Trainer(Model(), args, train_dataset=data, callbacks=[Callback(), Slow()])
last = transformers.trainer_utils.get_last_checkpoint(sys.argv[1])
print("begins at", last, flush=True)
trainer.train(resume_from_checkpoint=last)
print("ended at step", trainer.state.global_step, flush=True)
'''

LIGHTNING = '''
import os, sys, time, torch, lightning
from ddprun.lightning import Callback

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        time.sleep(0.01)
        if self.global_step == int(sys.argv[2]): print("at the mark", flush=True)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

path = sys.argv[1] + "/last.ckpt"
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=4)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=int(sys.argv[3]), max_epochs=-1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, callbacks=[Callback(path)])
found = path if os.path.exists(path) else None
print("begins at", found, flush=True)
trainer.fit(Model(), data, ckpt_path=found)
print("ended at step", trainer.global_step, flush=True)
'''


def job(ddprun, name, script, directory, mark, steps):
    return subprocess.Popen([ddprun, "--nproc-per-node=2", "--rdzv-id=" + name, "--no-python", sys.executable, script,
                             directory, str(mark), str(steps)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    return "".join(lines)


def check(ddprun, name, program, last_of):
    with tempfile.TemporaryDirectory() as directory:
        script = os.path.join(directory, "worker.py")
        with open(script, "w") as file:
            file.write(program)
        first = job(ddprun, name, script, directory, 20, 100000)
        out = read_until(first, "at the mark")
        subprocess.run([ddprun, "drain", "--job", name], check=True)
        out += first.stdout.read()
        assert first.wait() == 75, (first.returncode, out)
        agreed = re.search(r"all workers stop after step (\d+)", out)
        assert agreed, out
        step = int(agreed[1])
        ended = re.findall(r"ended at step (\d+)", out)
        assert ended == [str(step)] * 2, (step, out)
        assert last_of(directory, step), (step, os.listdir(directory), out)
        second = job(ddprun, name + "-again", script, directory, -1, step + 10)
        out = second.stdout.read()
        assert second.wait() == 0, (second.returncode, out)
        assert "begins at " + directory in out and f"ended at step {step + 10}" in out, out
        print(f"{name}: stopped after step {step}, went on to {step + 10}")


def main():
    ddprun = sys.argv[1]
    check(ddprun, "huggingface", HUGGING_FACE, lambda where, step: os.path.isdir(f"{where}/checkpoint-{step}"))
    check(ddprun, "lightning", LIGHTNING, lambda where, step: os.path.isfile(f"{where}/last.ckpt"))


main()
