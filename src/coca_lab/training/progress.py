"""What training shows as it runs: a bar on a terminal, and otherwise a line now and then."""

import logging
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from coca_lab.training.model import parameter_counts
from coca_lab.training.throughput import in_words

log = logging.getLogger(__name__)


class QuietProgress(ProgressCallback):
    """A progress bar with the run's name and loss, instead of a line for every log entry."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            trained, total = parameter_counts(kwargs["model"])
            part = "" if trained == total else f" ({trained / total:.1%} of the parameters)"
            name = Path(args.output_dir).parent.name
            self.training_bar.set_description(f"training {name}{part}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            speed = f", {words}" if (words := in_words(logs)) else ""
            self.training_bar.set_postfix_str(f"loss={float(logs['loss']):.3f}{speed}", False)

    def close(self) -> None:
        """End the bars, so that what is printed next has a line of its own."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()


class ProgressLines(TrainerCallback):
    """In place of the bar where the output is not a terminal: a line now and then."""

    seconds = 10.0

    def __init__(self) -> None:
        self.said = -math.inf

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        now = time.monotonic()
        late = now - self.said >= self.seconds or state.global_step >= state.max_steps
        if state.is_world_process_zero and logs and "loss" in logs and late:
            self.said = now
            step, steps = f"{state.global_step:,}", f"{state.max_steps:,}"
            speed = f", {words}" if (words := in_words(logs)) else ""
            log.info("step %s of %s, loss %.3f%s", step, steps, float(logs["loss"]), speed)

    def close(self) -> None:
        """Nothing to end."""
