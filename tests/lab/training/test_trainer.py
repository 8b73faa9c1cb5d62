"""What Trainer is changed in: as few private methods as hooks are missing; what it shows."""

import inspect
import logging
from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainerControl

from coca_lab.training import callbacks
from coca_lab.training.callbacks import Lines
from coca_lab.training.trainer import RecipeTrainer

OVERRIDDEN = sorted(
    name for name in vars(RecipeTrainer) if hasattr(Trainer, name) and not name.startswith("__")
)
CALLED = inspect.getsource(Trainer)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_trainer_still_calls_what_is_overridden_with_the_same_parameters(name):
    assert f"self.{name}(" in CALLED
    theirs, ours = (inspect.signature(getattr(o, name)) for o in (Trainer, RecipeTrainer))
    ours.bind(*theirs.parameters)


def test_no_other_private_method_is_overridden():
    assert [name for name in OVERRIDDEN if name.startswith("_")] == [
        "_issue_warnings_after_load",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_load_scaler",
        "_save_checkpoint",
    ]


def test_every_method_that_reads_a_checkpoint_names_it():
    """One that Transformers adds would fail without a word of which checkpoint is damaged."""
    reads = {name for name, _ in inspect.getmembers(Trainer, inspect.isfunction)}
    reads = {name for name in reads if name.startswith("_load_")}
    reads -= {
        "_load_best_model",
        "_load_callback_state",
    }  # its own option; the state is read before
    assert reads <= set(OVERRIDDEN)


# Lines, by a clock of the test's own


@pytest.fixture
def shown(monkeypatch, caplog):
    """A function that runs steps of some seconds each, and returns the lines."""
    caplog.set_level(logging.INFO, "coca_lab")
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])

    def run(steps, seconds, before=0):
        lines = Lines(None)
        state = SimpleNamespace(max_steps=steps, is_world_process_zero=True)
        for state.global_step in range(before + 1, steps + 1):
            now[0] += seconds
            lines.on_step_end(None, state, TrainerControl())
            lines.on_log(None, state, None, {"loss": 10.0 / state.global_step})
        lines.on_train_end(None, state, None)
        return [record.getMessage() for record in caplog.records]

    return run


def test_the_first_line_says_when_a_training_ends_and_others_follow_every_minute(shown):
    first, *_, before, last = said = shown(steps=1000, seconds=0.5)
    assert first.startswith("step 5 of 1,000, loss 2.500, 0:08:18 left, until ")
    assert len(said) == 1 + 8 + 1  # of 500 seconds
    assert before.startswith("step 965 of 1,000, loss 0.010, 0:00:18 left, until ")
    assert last == "step 1,000 of 1,000, loss 0.010"


def test_a_measurement_is_shown_with_its_step(caplog):
    """And not as if it were that of the line's own step."""
    caplog.set_level(logging.INFO, "coca_lab")
    lines, state = Lines(None), SimpleNamespace(max_steps=9, is_world_process_zero=True)
    state.global_step = 4
    lines.on_evaluate(None, state, None, metrics={"eval_loss": 1.0})
    lines.on_train_end(None, state, None)
    state.global_step = 9
    lines.on_train_end(None, state, None)
    now, later = caplog.messages
    assert now == "step 4 of 9, validation perplexity 2.72"
    assert later == "step 9 of 9, at 4 validation perplexity 2.72"


def test_a_resumed_training_counts_its_own_steps(shown):
    first, *_ = shown(steps=100, seconds=10.0, before=90)
    assert first.startswith("step 92 of 100, loss 0.110, 0:01:20 left, until ")
