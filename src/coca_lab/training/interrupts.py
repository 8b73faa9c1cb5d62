"""Ctrl-C and SIGTERM: training ends after the current step, with a checkpoint."""

import os
import signal
import threading
import time
from typing import Any

from transformers import TrainerCallback

from coca_attention.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 1.0
"""Seconds within which further signals count as the first: torchrun passes Ctrl-C on to processes
that the terminal has already sent it to."""


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends training after the step in which a signal came.

    In its ``with`` block, which has to be in the main thread to have an effect, a second signal
    raises `Interrupted` at once. All processes of a launch stop after the same step, whichever of
    them received the signal.

    Transformers' ``enable_jit_checkpoint`` reacts to SIGTERM alone, after three seconds, and may
    save before the optimizer's step, when the random state is already that of the next.

    Args:
        accelerator: The Trainer's, through which processes agree.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.signal: int | None = None
        self.stopped = False

    def __enter__(self) -> "StopOnSignal":
        main = threading.current_thread() is threading.main_thread()
        self.before = {n: signal.signal(n, self._receive) for n in SIGNALS if main}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.since = number, now
            if self.accelerator.is_main_process:
                # Not by print, which the signal may have interrupted.
                text = "\ncoca: training ends after this step; once more ends it at once\n"
                os.write(2, text.encode())
        elif now - self.since >= ONE_SIGNAL:
            raise Interrupted(
                "training ended within a step; the same command goes on from the last checkpoint, "
                "if there is one",
                number,
            )

    def requested(self) -> bool:
        """Whether any process has received a signal; all processes have to ask."""
        if not self.stopped:
            if self.signal is not None:
                self.accelerator.set_trigger()
            self.stopped = self.accelerator.check_trigger()
        return self.stopped

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.requested():
            control.should_save = control.should_training_stop = True

    on_evaluate = on_step_end  # before the step's checkpoint would be saved
