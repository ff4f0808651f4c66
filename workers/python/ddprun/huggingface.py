"""Trainer(..., callbacks=[ddprun.huggingface.Callback()]): reports steps and the logged numbers to ddprun; on a notice
of ddprun all ranks save a checkpoint after the same step and end the training."""
from transformers import TrainerCallback

import ddprun


class Callback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        ddprun.step(state.global_step)
        if ddprun.should_stop(state.global_step):
            control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        numbers = {tag: value for tag, value in (logs or {}).items() if isinstance(value, (int, float))}
        ddprun.step(state.global_step, **numbers)
