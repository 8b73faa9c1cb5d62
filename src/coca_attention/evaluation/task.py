"""What an evaluation task is: a name, settings, and a function from a model to JSON cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_attention.errors import UserError
from coca_attention.evaluation.journal import Journal, fingerprint
from coca_attention.settings import Scaling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Cell = dict[str, Any]
"""One result: plain JSON values."""
Progress = Callable[[str, int, int], Any]
"""Called with a label, the work done so far and the work in all."""


def check_at_least(settings: Any, smallest: int, *names: str) -> None:
    """Raise UserError unless each of the named settings is at least ``smallest`` or None."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < smallest:
            raise UserError(f"{name} must be at least {smallest}, got {value}")


@dataclass
class Subject:
    """The model under evaluation.

    Attributes:
        model: A causal language model of Transformers, in evaluation mode.
        tokenizer: Its tokenizer.
        name: What the results call the model.
        identity: Identifies the model in the journal (`fingerprint`); default: its name.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = "model"
    identity: str = ""
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.identity = self.identity or self.name

    def cached(self, key: str, make: Callable[[], Any]) -> Any:
        """``make()``, called once per key: inputs that do not depend on the rotary scaling."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def attention(self) -> str | None:
        """The name of a CoCA model's score form, ``rope``, ``alibi``, or None for any other."""
        from coca_attention.models.configuration import attention_of

        return attention_of(self.model.config.get_text_config())

    @property
    def facts(self) -> Cell:
        """What every cell says about its model."""
        from coca_attention.models import training_length

        return {
            "model": self.name,
            "attention": self.attention,
            "training_length": training_length(self.model.config.get_text_config()),
        }


def load_subject(
    path: str, name: str | None = None, *, dtype: str = "float32", device: str | None = None
) -> Subject:
    """Load a model and its tokenizer; arguments and errors as for `load_model`."""
    from coca_attention.data import load_tokenizer
    from coca_attention.models import load_model
    from coca_attention.models.loading import check_vocabulary

    model = load_model(path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(path)
    check_vocabulary(model, tokenizer)
    identity = f"{fingerprint(path)} {dtype}"
    return Subject(model, tokenizer, name or Path(path).name, identity)


@dataclass
class Session:
    """How a task is run.

    Attributes:
        scaling: Rotary scaling. ``ntk`` computes the base from the length of each text, ``none``
            leaves the model as it was loaded.
        factor: Factor of the scaling.
        journal: Stores finished parts and returns them when the evaluation is repeated.
        progress: Receives a label, the work done so far and the work in all; a label is reported
            at least once, when its cell is finished.
    """

    scaling: Scaling = "none"
    factor: float = 1.0
    journal: Journal = field(default_factory=Journal)
    progress: Progress = lambda label, done, total: None

    @property
    def applied_factor(self) -> float | None:
        """The factor, or None without scaling."""
        return None if self.scaling == "none" else float(self.factor)


@dataclass(frozen=True)
class Task:
    """An evaluation task.

    Attributes:
        name: Name of the command ``coca eval NAME``, of the section in a suite, and of the field
            ``task`` of its cells.
        summary: One line for ``--help``.
        settings: Documented dataclass whose fields are the options; all need defaults.
        evaluate: From the model, the settings and the session to the cells.
        check: Raises UserError for settings out of range, before any model is loaded.
        cost: Tokens read for each cell, in order; for the progress bar of a suite.
        prepare: Raises UserError for texts, prompts or sizes that do not fit a model, before any
            weights are loaded; what it reads it keeps with `Subject.cached`. The model it receives
            has no weights.
        scaled: Whether the rotary scaling applies. If not, a suite runs the task once per model.
    """

    name: str
    summary: str
    settings: type
    evaluate: Callable[[Subject, Any, Session], list[Cell]]
    check: Callable[[Any], Any] = lambda settings: None
    cost: Callable[[Any], list[int]] = lambda settings: [1]
    prepare: Callable[[Subject, Any], Any] = lambda subject, settings: None
    scaled: bool = True

    def run(self, subject: Subject, settings: Any, session: Session) -> list[Cell]:
        """Check the settings and evaluate; every cell names its task and its model.

        Raises:
            UserError: If a setting is out of range or the task cannot be done with this model.
        """
        self.check(settings)
        cells = self.evaluate(subject, settings, session)
        return [{"task": self.name, **subject.facts, **cell} for cell in cells]
