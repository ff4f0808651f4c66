"""Trainer(..., callbacks=[ddprun.lightning.Callback("last.ckpt")]): reports steps and the logged numbers to ddprun; on a
notice of ddprun all ranks save this checkpoint after the same step and end the training."""
try:
    from lightning.pytorch import callbacks
except ImportError:
    from pytorch_lightning import callbacks

import ddprun


class Callback(callbacks.Callback):
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        is_due = trainer.global_step % trainer.log_every_n_steps == 0
        ddprun.step(trainer.global_step, **(trainer.logged_metrics if is_due else {}))
        if ddprun.should_stop(trainer.global_step) and not trainer.should_stop:
            trainer.save_checkpoint(self.checkpoint)
            trainer.should_stop = True
