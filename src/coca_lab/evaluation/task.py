"""What an evaluation task is: a name, settings, and items of work that become JSON cells."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_attention.models.fields import attention_of
from coca_attention.models.hub import check_name
from coca_lab.data import load_tokenizer
from coca_lab.engine import Engine, Item
from coca_lab.loading import check_vocabulary, load_model, model_without_weights
from coca_lab.settings import Scaling

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
        model: A causal language model of Transformers, in evaluation mode; with ``path``, on the
            meta device, without weights.
        tokenizer: Its tokenizer.
        name: What the results call the model.
        identity: Identifies the model in keys of values (`fingerprint`); default: its name.
        path: Folder or name from which processes load the weights; empty: ``model`` has them.
        dtype: Precision of the weights that are loaded.
        device: As for `load_model`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = "model"
    identity: str = ""
    path: str = ""
    dtype: str = "float32"
    device: str | None = None
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.identity = self.identity or self.name

    def __reduce__(self) -> Any:
        if not self.path:
            return super().__reduce__()
        return open_subject, (self.path, self.name, self.dtype, self.device)

    def loaded(self) -> PreTrainedModel:
        """The model with its weights; a process keeps those of one model."""
        if not self.path:
            return self.model
        key = (self.identity, self.device)
        if key not in _weights:
            _weights.clear()  # frees them before the next ones are loaded
            _weights[key] = load_model(self.path, dtype=self.dtype, device=self.device)
        return _weights[key]

    def with_weights(self) -> "Subject":
        """The same with its weights in ``model``."""
        return replace(self, model=self.loaded(), path="")

    def cached(self, key: str, make: Callable[[], Any]) -> Any:
        """``make()``, called once per key: inputs that do not depend on the rotary scaling."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def facts(self) -> Cell:
        """What every cell says about its model."""
        config = self.model.config.get_text_config()
        return {
            "model": self.name,
            "attention": attention_of(config),
            "training_length": training_length(config),
        }


_weights: dict[Any, PreTrainedModel] = {}


def free_weights() -> None:
    """Free the weights that `Subject.loaded` keeps."""
    _weights.clear()


def open_subject(
    path: str, name: str | None = None, dtype: str = "float32", device: str | None = None
) -> Subject:
    """A model whose weights are loaded when they are needed.

    Args:
        path: Folder of the model, or its name on the Hub.
        name: What the results call it; by default the name of its folder.
        dtype: As for `load_model`, and so the device.
        device: See above.

    Raises:
        UserError: If it cannot be loaded.
    """
    model, tokenizer = model_without_weights(path, dtype), load_tokenizer(path)
    check_vocabulary(model, tokenizer)
    name, identity = name or Path(path).name, f"{fingerprint(path)} {dtype}"
    return Subject(model, tokenizer, name, identity, path, dtype, device)


def fingerprint(path: str | Path) -> str:
    """Identifies a model, so that results of one that was replaced or updated are not reused.

    Args:
        path: A folder: a hash of the names, sizes and times of the model's files and of its
            configuration. Or a name on the Hub: with the commit that is loaded, which the Hub is
            asked for if it answers.

    Raises:
        UserError: If the name leads nowhere.
    """
    folder = Path(path)
    if not folder.is_dir():
        check_name(str(path))
        with suppress(OSError):
            config = cached_file(str(path), "config.json")
            return f"{path} {Path(str(config)).parent.name}"
        return str(path)
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json") and file.is_file():
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


@dataclass
class Session:
    """How a task is run.

    Attributes:
        scaling: Rotary scaling. ``ntk`` computes the base from the length of each text, ``none``
            leaves the model as it was loaded.
        factor: Factor of the scaling.
        engine: Computes items and keeps their values.
    """

    scaling: Scaling = "none"
    factor: float = 1.0
    engine: Engine = field(default_factory=Engine)

    def __reduce__(self) -> Any:
        return Session, (self.scaling, self.factor)  # what a process on Ray needs

    def finish(self, parts: "list[Part]") -> list[Cell]:
        """The cells of parts, one after the other; what is missing is computed."""
        self.engine.run([item for part in parts for item in part.items])
        return [cell for part in parts for cell in part.finished(self.engine)]

    @property
    def applied_factor(self) -> float | None:
        """The factor, or None without scaling."""
        return None if self.scaling == "none" else float(self.factor)


@dataclass(frozen=True)
class Part:
    """Part of a task: what has to be computed for some of its cells.

    Attributes:
        items: Items of work.
        cells: Makes the cells from the values of all keys, in order, and the seconds they took.
            It needs no weights.
    """

    items: list[Item]
    cells: Callable[[list[Any], float], list[Cell]]

    def finished(self, engine: Engine) -> list[Cell]:
        """The cells, from values in the engine's store."""
        values = [engine.store.get(key) for item in self.items for key in item.keys]
        return self.cells(values, engine.seconds(self.items))


@dataclass(frozen=True)
class Task:
    """An evaluation task; it has ``evaluate`` or ``parts``.

    Attributes:
        name: Name of the command ``coca eval NAME``, of the section in a suite, and of the field
            ``task`` of its cells.
        summary: One line for ``--help``.
        settings: Documented dataclass whose fields are the options; all need defaults.
        evaluate: From the model, the settings and the session to the cells, which are kept by
            model, scaling and settings.
        check: Raises UserError for settings out of range, before any model is loaded.
        parts: From the same to items of work, which processes share; the model has no weights
            yet. Raises UserError for texts, prompts or sizes that do not fit the model.
        scaled: Whether the rotary scaling applies. If not, a suite runs the task once per model.
    """

    name: str
    summary: str
    settings: type
    evaluate: Callable[[Subject, Any, Session], list[Cell]] | None = None
    check: Callable[[Any], Any] = lambda settings: None
    parts: Callable[[Subject, Any, Session], list[Part]] | None = None
    scaled: bool = True

    def parts_of(self, subject: Subject, settings: Any, session: Session) -> list[Part]:
        """``parts``, or the whole task as one."""
        if self.parts is not None:
            return self.parts(subject, settings, session)
        evaluate = self.evaluate
        assert evaluate is not None, f"task {self.name} has neither evaluate nor parts"
        key = {
            "task": self.name,
            "model": subject.identity,
            "scaling": [session.scaling, session.applied_factor],
            "settings": asdict(settings),
        }

        def work(_: list[Any]) -> list[list[Cell]]:
            return [evaluate(subject.with_weights(), settings, session)]

        label = f"{subject.name} {session.scaling} {self.name}"
        item = Item([key], work, [None], label=label, group=subject.name)
        return [Part([item], lambda values, seconds: values[0])]

    def complete_cells(self, subject: Subject, cells: list[Cell]) -> list[Cell]:
        """The cells with their task and the facts of their model."""
        facts = subject.facts  # a cell that was kept may have another name
        return [{"task": self.name, **facts, **cell, **facts} for cell in cells]
