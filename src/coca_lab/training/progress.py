"""What a training shows: a bar in a terminal, elsewhere a line at most once a minute."""

import logging
import math
import time
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from coca_lab.training.retrieval import Retrieval

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between lines."""
SETTLED = 2.0
"""Seconds from the first step, which may compile, to the first line: the speed is known then."""


def describe(metrics: dict[str, Any], retrieval: Retrieval | None) -> str:
    """What validation has measured, in a few words."""
    parts = [f"validation perplexity {math.exp(metrics['eval_loss']):.2f}"]
    for name, asked in retrieval.questions.items() if retrieval else ():
        share = metrics[f"eval_{name}"]
        parts.append(f"{asked.what} at {asked.length:,} tokens {share:.0%}")
    return ", ".join(parts)


class LogLastStep(TrainerCallback):
    """Ends the curve of the losses at the last step, wherever ``log_every`` falls."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True


class Bar(ProgressCallback):
    """Trainer's bar, with the loss behind it, and a line for every measurement."""

    def __init__(self, retrieval: Retrieval | None) -> None:
        super().__init__()
        self.retrieval = retrieval

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        if state.is_world_process_zero:
            measured = describe(kwargs["metrics"], self.retrieval)
            log.info("step %s, %s", f"{state.global_step:,}", measured)


class Lines(TrainerCallback):
    """Lines with the step, the last loss and measurement, and the time left.

    The first one comes as soon as the speed is known, the last one at the end.
    """

    def __init__(self, retrieval: Retrieval | None) -> None:
        self.retrieval = retrieval
        self.loss = self.validation = ""
        self.first: tuple[int, float] | None = None  # a step, and when it was done
        self.due = math.inf

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, step = time.monotonic(), state.global_step
        if self.first is None:
            self.first, self.due = (step, now), now + SETTLED
        elif now >= self.due and step < state.max_steps:
            self.due = now + EVERY
            steps, seconds = step - self.first[0], now - self.first[1]
            left = round(seconds / steps * (state.max_steps - step))
            end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            self._say(state, f"{timedelta(seconds=left)} left, until {end}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.loss = f"loss {float(logs['loss']):.3f}"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.validation = describe(kwargs["metrics"], self.retrieval)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._say(state)

    def _say(self, state: Any, *more: str) -> None:
        if state.is_world_process_zero:
            where = f"step {state.global_step:,} of {state.max_steps:,}"
            log.info("%s", ", ".join(filter(None, (where, self.loss, self.validation, *more))))
