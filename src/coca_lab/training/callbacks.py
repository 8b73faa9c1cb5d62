"""What a training shows: callbacks of Trainer.

Parameters without a type have that of the `TrainerCallback` method.
"""

import logging
import math
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ProgressCallback

from coca_lab.training.retrieval import Retrieval

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between lines."""
FIRST_LINE = 2.0
"""Seconds from the first step, which may compile, to the first line: the speed is known then."""


def describe(metrics: dict[str, float], retrieval: Retrieval | None) -> str:
    """What validation has measured, in a few words."""
    parts = [f"validation perplexity {math.exp(metrics['eval_loss']):.2f}"]
    for name, questions in retrieval.questions.items() if retrieval else ():
        share = metrics[f"eval_{name}"]
        parts.append(f"{questions.what} at {questions.length:,} tokens {share:.0%}")
    return ", ".join(parts)


def shown(
    arguments: TrainingArguments, report_to: list[str], retrieval: Retrieval | None
) -> list[TrainerCallback]:
    """What shows a training: a bar in a terminal, elsewhere lines, and TensorBoard if asked for."""
    in_terminal = sys.stderr.isatty() and not arguments.disable_tqdm
    shows = Bar(retrieval) if in_terminal else Lines(retrieval)
    callbacks: list[TrainerCallback] = [LogLastStep(), shows]
    if "tensorboard" in report_to and arguments.process_index == 0:
        # In the run folder; Trainer's own takes its folder from the environment.
        folder = Path(str(arguments.output_dir)).parent
        callbacks.append(TensorBoardCallback(SummaryWriter(folder / "logs")))
    return callbacks


class LogLastStep(TrainerCallback):
    """Ends the curve of the losses at the last step, wherever ``log_every`` falls."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True


class Bar(ProgressCallback):
    """Trainer's bar, with the loss behind it, and a line for every measurement."""

    def __init__(self, retrieval: Retrieval | None) -> None:
        super().__init__()
        self.retrieval = retrieval

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        if state.is_world_process_zero:
            measured = describe(kwargs["metrics"], self.retrieval)
            log.info("step %s, %s", f"{state.global_step:,}", measured)


class Lines(TrainerCallback):
    """Lines with step, loss, measurement, time left: when the speed is known, then by `EVERY`."""

    def __init__(self, retrieval: Retrieval | None) -> None:
        self.retrieval = retrieval
        self.loss = ""
        self.validation: tuple[int, str] | None = None  # the step, and what was measured
        self.first: tuple[int, float] | None = None  # a step, and when it was done
        self.due = math.inf

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.monotonic()
        step = state.global_step
        if self.first is None:
            self.first = (step, now)
            self.due = now + FIRST_LINE
        elif now >= self.due and step < state.max_steps:
            self.due = now + EVERY
            steps = step - self.first[0]
            seconds = now - self.first[1]
            left = round(seconds / steps * (state.max_steps - step))
            end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            self._say(state, f"{timedelta(seconds=left)} left, until {end}")

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.loss = f"loss {float(logs['loss']):.3f}"

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.validation = state.global_step, describe(kwargs["metrics"], self.retrieval)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._say(state)

    def _say(self, state: TrainerState, *more: str) -> None:
        if state.is_world_process_zero:
            parts = [f"step {state.global_step:,} of {state.max_steps:,}", self.loss]
            if self.validation is not None:
                step, measured = self.validation
                parts.append(measured if step == state.global_step else f"at {step:,} {measured}")
            log.info("%s", ", ".join(filter(None, (*parts, *more))))
