"""Train, evaluate and report what is missing, until the time is over."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from coca_attention.errors import error_prefix
from coca_lab.engine import Progress
from coca_lab.evaluation.suite import RESULTS_FILE, run_suite
from coca_lab.files import write_json
from coca_lab.report import write_report
from coca_lab.studies.reproduce.plan import PLAN_FILE, Plan, blocks_each, halve, load_plan, suite_of
from coca_lab.studies.reproduce.settings import ReproduceSettings
from coca_lab.studies.reproduce.text import prepare_text
from coca_lab.training import is_finished, train
from coca_lab.training.fit import TrainingStopped

# Of the recipe of an unfinished model; the text is compared in any case.
MAY_CHANGE = ("data.source", "data.tokenizer", "training.micro_batch_size")


class TimeUp(Exception):
    """The minutes of this command are over."""


@dataclass(frozen=True)
class Deadline:
    """When this command has to stop.

    Attributes:
        end: Of `time.monotonic`, or None for never.
    """

    end: float | None

    def passed(self) -> bool:
        """Whether the time is over, by the clock of the first process."""
        if self.end is None:
            return False
        late = time.monotonic() > self.end
        return broadcast_object_list([late])[0] if PartialState().num_processes > 1 else late

    def check(self) -> None:
        """Raise TimeUp when the time is over."""
        if self.passed():
            raise TimeUp


def reproduce(settings: ReproduceSettings, *, progress: Progress | None = None) -> Path | None:
    """Train the models that are not finished, evaluate what is missing, and draw the page.

    Args:
        settings: What to do. The same settings, but for those of `CHANGES`, continue what is in the
            folder.
        progress: Called with a label, and the tokens evaluated so far and in all.

    Returns:
        ``report.html``, or None if the minutes were over before.

    Raises:
        UserError: If the text is missing or too short, the folder has another run, or a model does
            not fit into memory.
    """
    started = time.monotonic()
    settings.check()
    minutes = settings.minutes or 60 * (settings.hours or 0)
    deadline = Deadline(started + 60 * minutes if minutes else None)
    folder = settings.folder
    state = PartialState(cpu=not torch.accelerator.is_available())
    with state.main_process_first():
        if state.is_main_process:
            prepare_text(settings)
    if settings.prepare:
        return None
    plan = load_plan(settings)
    try:
        for name in settings.models:
            _train(settings, plan, name, deadline)
        results = _evaluate(settings, plan, deadline, progress)
    except TimeUp:
        return None
    page = folder / "report.html"
    if state.is_main_process:
        runs = [folder / name / "training.json" for name in settings.models]
        lengths = settings.lengths
        title = f"{settings.size}: trained on {lengths[0]:,} tokens, read up to {lengths[-1]:,}"
        write_report([results, *runs], page, title=title)
    return page


def _train(settings: ReproduceSettings, plan: Plan, name: str, deadline: Deadline) -> None:
    """Train a model unless it is finished; raise TimeUp if the time is over before."""
    folder = settings.folder / name
    if is_finished(folder):
        return
    deadline.check()
    # There may be more processes than when the run was started.
    plan.micro_batch_size = min(plan.micro_batch_size, blocks_each(plan.global_batch_size))

    class Stop(TrainerCallback):
        """Ends with a checkpoint, at an entry of the curve, which is then that of a whole run."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            left = state.max_steps - state.global_step
            if left and state.global_step % args.logging_steps == 0 and deadline.passed():
                control.should_save = control.should_training_stop = True

    while True:
        recipe = plan.recipe(settings, name)
        try:
            with error_prefix(f"{name}: "):
                train(recipe, folder, callbacks=[Stop()], may_change=MAY_CHANGE)
            return
        except TrainingStopped as stopped:
            raise TimeUp from stopped
        except torch.OutOfMemoryError:
            if plan.micro_batch_size == 1:
                raise
        # Goes on from its checkpoint, by the same steps in smaller parts.
        halve(plan)
        if PartialState().is_main_process:
            write_json(settings.folder / PLAN_FILE, asdict(plan))


def _evaluate(
    settings: ReproduceSettings, plan: Plan, deadline: Deadline, progress: Progress | None
) -> Path:
    deadline.check()

    def report(label: str, done: int, total: int) -> None:
        if deadline.end is not None and time.monotonic() > deadline.end:
            raise TimeUp
        if progress is not None:
            progress(label, done, total)

    folder = settings.folder / "suite"
    if PartialState().is_main_process:
        run_suite(suite_of(settings, plan), folder, progress=report)
    return folder / RESULTS_FILE
