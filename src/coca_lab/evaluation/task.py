"""What an evaluation task is: a name, settings, and a function from a model to JSON cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coca_attention.errors import UserError
from coca_lab.evaluation.journal import Journal, fingerprint
from coca_lab.evaluation.pieces import Claims, Piece, Progress, work
from coca_lab.settings import Scaling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Cell = dict[str, Any]
"""One result: plain JSON values."""


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
        device: Where a model that has no weights yet will be loaded: as for `load_model`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = "model"
    identity: str = ""
    device: str | None = None
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
        from coca_attention.models.fields import attention_of

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
    from coca_lab.data import load_tokenizer
    from coca_lab.loading import check_vocabulary, load_model

    model = load_model(path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(path)
    check_vocabulary(model, tokenizer)
    return Subject(model, tokenizer, name or Path(path).name, identity_of(path, dtype))


def identity_of(path: str, dtype: str) -> str:
    """Identifies a model in a precision in the journal."""
    return f"{fingerprint(path)} {dtype}"


@dataclass
class Session:
    """How a task is run.

    Attributes:
        scaling: Rotary scaling. ``ntk`` computes the base from the length of each text, ``none``
            leaves the model as it was loaded.
        factor: Factor of the scaling.
        journal: Stores finished parts and returns them when the evaluation is repeated.
        progress: Receives a label, the tokens read so far and the tokens to read; a label is
            reported at least once, when its cell is finished.
        claims: Shares the work with other processes.
    """

    scaling: Scaling = "none"
    factor: float = 1.0
    journal: Journal = field(default_factory=Journal)
    progress: Progress = lambda label, done, total: None
    claims: Claims | None = None

    def finish(self, parts: list[Part]) -> list[Cell]:
        """The cells of parts, one after the other; what the journal does not have is computed."""
        cells = []
        for part in parts:
            self.complete(part.pieces)
            cells += part.cells()
        return cells

    def complete(self, pieces: list[Piece]) -> list[Any]:
        """The values of all keys of some pieces; what the journal does not have is computed."""
        work(pieces, self.journal, self.progress, self.claims)
        return [self.journal.get(key) for piece in pieces for key in piece.keys]

    def seconds(self, pieces: list[Piece]) -> float:
        """The time that some finished pieces took, by whichever processes."""
        return round(sum(self.journal.seconds(t) for piece in pieces for t in piece.texts), 3)

    @property
    def applied_factor(self) -> float | None:
        """The factor, or None without scaling."""
        return None if self.scaling == "none" else float(self.factor)


@dataclass(frozen=True)
class Part:
    """Part of a task: what has to be computed for some of its cells.

    Attributes:
        pieces: Pieces of work.
        cells: Makes the cells, once the journal has the values of all pieces. It needs no weights.
    """

    pieces: list[Piece]
    cells: Callable[[], list[Cell]]


@dataclass(frozen=True)
class Task:
    """An evaluation task.

    Attributes:
        name: Name of the command ``coca eval NAME``, of the section in a suite, and of the field
            ``task`` of its cells.
        summary: One line for ``--help``.
        settings: Documented dataclass whose fields are the options; all need defaults.
        evaluate: From the model, the settings and the session to the cells.
        parts: The same as pieces of work that processes share, before any weights are loaded: the
            model it receives has none, until a piece is computed. Without it, the task of a suite
            is one piece, and its cells are kept by model, scaling, settings and ``depends``.
        depends: From the model, which may have no weights, and the settings to what else the cells
            of a task without ``parts`` depend on, such as a hash of the text, as JSON values.
        check: Raises UserError for settings out of range, before any model is loaded.
        cost: Tokens read for each cell, in order, of a task without ``parts``.
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
    parts: Callable[[Subject, Any, Session], list[Part]] | None = None
    depends: Callable[[Subject, Any], Any] = lambda subject, settings: None

    def parts_of(self, subject: Subject, settings: Any, session: Session) -> list[Part]:
        """``parts``, or the whole task as one."""
        if self.parts is not None:
            return self.parts(subject, settings, session)
        key = {
            "task": self.name,
            "model": subject.identity,
            "scaling": [session.scaling, session.applied_factor],
            "settings": asdict(settings),
            "depends": self.depends(subject, settings),
        }
        cost = sum(max(1, tokens) for tokens in self.cost(settings))

        def compute(missing: list[int], advance: Callable[[int], Any]) -> list[Any]:
            alone = Session(session.scaling, session.factor, session.journal)
            return [self.evaluate(subject, settings, alone)]

        label = f"{subject.name} {session.scaling} {self.name}"
        return [Part([Piece(label, [key], cost, cost, compute)], lambda: session.journal.get(key))]

    def complete_cells(self, subject: Subject, cells: list[Cell]) -> list[Cell]:
        """The cells with their task and the facts of their model."""
        facts = subject.facts  # a cell that was kept may have another name
        return [{"task": self.name, **facts, **cell, **facts} for cell in cells]

    def run(self, subject: Subject, settings: Any, session: Session) -> list[Cell]:
        """Check the settings and evaluate; every cell names its task and its model.

        Raises:
            UserError: If a setting is out of range or the task cannot be done with this model.
        """
        self.check(settings)
        return self.complete_cells(subject, self.evaluate(subject, settings, session))

    def share(self, subject: Subject, settings: Any, session: Session, *, wait: bool) -> list[Cell]:
        """`run` together with the other processes of a launch, which make the same call.

        Args:
            subject: The model.
            settings: Settings of the task.
            session: With ``claims``.
            wait: Whether to wait for the others; if not, there are no cells.
        """
        self.check(settings)
        parts = self.parts_of(subject, settings, session)
        pieces = sorted((p for part in parts for p in part.pieces), key=lambda p: -p.cost)
        work(pieces, session.journal, session.progress, session.claims, wait=wait)
        cells = [cell for part in parts for cell in part.cells()] if wait else []
        return self.complete_cells(subject, cells)
