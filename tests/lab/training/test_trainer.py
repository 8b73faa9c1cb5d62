"""What `RecipeTrainer` overrides: as few private methods of Trainer as there are hooks missing."""

import inspect

import pytest
from transformers import Trainer

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
