"""What an evaluation task is: a name, settings, and items of work that become JSON cells."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.models.configuration import attention_of, made_for
from coca_lab.cells import cell_type
from coca_lab.data import SourceSettings, load_tokenizer
from coca_lab.data.documents import text_fingerprint
from coca_lab.engine import Engine, Item
from coca_lab.evaluation.endpoint import Endpoint
from coca_lab.fingerprints import code_fingerprint, model_fingerprint
from coca_lab.loading import guard_vocabulary, load_model, model_without_weights
from coca_lab.options import checked
from coca_lab.settings.evaluations import TaskOptions
from coca_lab.settings.studies import MethodSettings
from coca_lab.store import Store

Cell = dict[str, Any]
"""A result, or a part of one, in plain JSON values; `coca_lab.cells` declares every task's."""


@dataclass
class Model:
    """The model under evaluation.

    Attributes:
        module: A causal language model of Transformers, in evaluation mode; with ``path``, on the
            meta device, without weights.
        tokenizer: Its tokenizer.
        name: What the results call the model.
        identity: What the values of tasks depend on of the model; by default like no other.
        path: Folder or name from which processes load the weights; empty: ``module`` has them.
        dtype: Precision of the weights that are loaded.
        device: As for `load_model`.
        texts: What tasks have read for it, by name; models with the same tokenizer may share it.
        endpoint: A server that answers in its place; ``module`` then has no weights, or is
            None where only its tokenizer is here.
    """

    module: Any
    tokenizer: PreTrainedTokenizerBase
    name: str = "model"
    identity: str = field(default_factory=lambda: uuid4().hex)
    path: str = ""
    dtype: str = "float32"
    device: str | None = None
    texts: dict[str, Any] = field(default_factory=dict, repr=False)
    endpoint: Endpoint | None = None

    def __reduce__(self) -> str | tuple[object, ...]:
        if not self.path:
            return super().__reduce__()
        return open_model, (self.path, self.name, self.dtype, self.device, self.identity)

    def loaded(self) -> PreTrainedModel:
        """The module with its weights; a process keeps those of one model."""
        if not self.path:
            return self.module
        key = (self.identity, self.device)
        if key not in _weights:
            _weights.clear()  # frees them before the next ones are loaded
            model = load_model(self.path, dtype=self.dtype, device=self.device)
            guard_vocabulary(model, self.tokenizer)
            _weights[key] = model
        return _weights[key]

    def with_weights(self) -> "Model":
        """The same with its weights in ``module``."""
        return replace(self, module=self.loaded(), path="")

    @property
    def facts(self) -> Cell:
        """What every cell says about its model."""
        if self.module is None:
            return {"model": self.name, "attention": None, "training_length": None}
        config = self.module.config.get_text_config()
        return {
            "model": self.name,
            "attention": attention_of(config),
            "training_length": made_for(config)[0],
        }


_weights: dict[tuple[str, str | None], PreTrainedModel] = {}


def free_weights() -> None:
    """Free the weights that `Model.loaded` keeps."""
    _weights.clear()


def open_model(
    path: str,
    name: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    identity: str = "",
) -> Model:
    """A model whose weights are loaded when they are needed.

    Args:
        path: Folder of the model, or its name on the Hub.
        name: What the results call it; by default the name of its folder.
        dtype: As for `load_model`, and so the device.
        device: See above.
        identity: As of `Model`; by default the files of the folder by content, and the dtype.

    Raises:
        UserError: If it cannot be loaded.
    """
    module = model_without_weights(path, dtype)
    tokenizer = load_tokenizer(path)
    identity = identity or f"{model_fingerprint(path)} {dtype}"
    return Model(module, tokenizer, name or Path(path).name, identity, path, dtype, device)


def served_model(path: str, endpoint: Endpoint) -> Model:
    """A model behind a server.

    Args:
        path: Folder or name of its tokenizer; a configuration there says how it was trained.
        endpoint: The server.

    Raises:
        UserError: If the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(path)
    module = None
    if (Path(path) / "config.json").is_file():
        module = model_without_weights(path, "float32")
    identity = f"{model_fingerprint(path)} {endpoint.url} {endpoint.model}"
    return Model(module, tokenizer, endpoint.model, identity, endpoint=endpoint)


class Measurement(NamedTuple):
    """Items of work that become cells."""

    items: list[Item]
    cells: Callable[[list[Any]], list[Cell]]
    """From the values of all keys to the cells, without weights."""


Measure = Callable[[Model, Any, MethodSettings], list[Measurement]]
"""From a model, settings of a task and a method to what is to be measured."""


def in_turn(measurements: Sequence[Measurement]) -> list[Item]:
    """All items: the first of every measurement, then the second ones, and so on.

    What ends early has then asked all methods the same.
    """
    rounds = zip_longest(*(each.items for each in measurements))
    return [item for each in rounds for item in each if item is not None]


def finish(measurements: Sequence[Measurement], engine: Engine) -> list[Cell]:
    """The cells of all measurements, each once, with the seconds that their values took.

    What the engine's store lacks is computed.
    """
    engine.run(in_turn(measurements))
    return cells_of(measurements, engine.store)


def cells_of(measurements: Sequence[Measurement], store: Store) -> list[Cell]:
    """The same when the store has all values."""
    cells: list[Cell] = []
    for each in measurements:
        keys = [key for item in each.items for key in item.keys]
        values = [store.get(key) for key in keys]
        seconds = store.seconds(keys)
        made = [{**cell, "seconds": seconds} for cell in each.cells(values)]
        cells += [cell for cell in made if cell not in cells]
    return cells


@dataclass(frozen=True)
class Task(TaskOptions):
    """An evaluation task.

    Attributes:
        measure: From the model, the settings and the method to work that processes share; the
            model has no weights yet. Raises UserError for texts, prompts or sizes that do not fit
            the model. `at_once` makes it of a function that computes cells.
    """

    measure: Measure = field(kw_only=True)

    def measurements(
        self, model: Model, settings: object, method: MethodSettings
    ) -> list[Measurement]:
        """``measure``; keys and cells also say of which task and model they are."""
        about = [self.name, code_fingerprint(self.measure), model.identity]
        facts = {"task": self.name, **model.facts, **(method.facts if self.scaled else {})}

        def made(figures: Cell) -> Cell:
            """Checked by the declaration of the task's cells, by which the report reads them."""
            cell = cell_type(self.name).model_validate(facts | figures)
            return cell.model_dump(exclude_unset=True)

        def named(each: Measurement) -> Measurement:
            items = [replace(x, keys=[[about, key] for key in x.keys]) for x in each.items]
            return Measurement(items, lambda values: [made(x) for x in each.cells(values)])

        return [named(each) for each in self.measure(model, settings, method)]


def at_once(
    evaluate: Callable[[Model, Any, MethodSettings], list[Cell]],
) -> Measure:
    """Decorator for ``measure`` of a task that computes all its cells in one piece."""

    @wraps(evaluate)  # whose code is a part of the keys
    def measure(model: Model, settings: object, method: MethodSettings) -> list[Measurement]:
        def work(_: list[None]) -> list[list[Cell]]:
            return [evaluate(model.with_weights(), settings, method)]

        key = {"method": [*method.facts.values()], "settings": settings_key(settings)}
        label = " ".join((model.name, *method.words))
        return [Measurement([Item([key], work, [None], label=label)], lambda values: values[0])]

    return measure


def settings_key(settings: Any) -> dict[str, Any]:
    """What values depend on of the settings of a task: the fields, and the content of the text."""
    text = text_fingerprint(settings.source) if isinstance(settings, SourceSettings) else None
    return {**asdict(settings), "text": text}


def evaluate(
    task: Task,
    model: Model,
    settings: object,
    method: MethodSettings | None = None,
    engine: Engine | None = None,
) -> list[Cell]:
    """The cells of one task for one model.

    Args:
        task: The task.
        model: The model.
        settings: Of the class ``task.settings``.
        method: By default none.
        engine: By default one in this process, which keeps no values.

    Raises:
        UserError: If a setting is out of range, or the task cannot be done with this model.
    """
    settings = checked(task.settings, vars(settings))
    measurements = task.measurements(model, settings, method or MethodSettings())
    return finish(measurements, engine or Engine())
