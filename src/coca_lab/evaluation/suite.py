"""A suite: models × rotary scalings × tasks from one YAML file; finished items are not repeated."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from coca_attention.errors import UserError, error_prefix
from coca_lab.arguments import SettingsParser, read_settings, settings_parser
from coca_lab.engine import Engine, Progress, RayEngine, Store
from coca_lab.environment import describe_environment
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.endpoint import Endpoint
from coca_lab.evaluation.task import (
    Cell,
    Model,
    RotaryScaling,
    Task,
    finish,
    free_weights,
    open_model,
    served_model,
)
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.loading import usable_device

RESULTS_FILE, STORE_FILE = "results.json", "values.sqlite"


@dataclass
class ScalingSettings(RotaryScaling):
    """A rotary scaling that the models are evaluated with."""

    models: list[str] | None = None
    """Names of the models to apply it to; by default all."""


@dataclass
class Suite:
    """What to evaluate; a suite file also has one section per task, named after it."""

    models: dict[str, str] = field(default_factory=dict)
    """Names for the results, and the folder (or hub name) of each."""
    scalings: list[ScalingSettings] = field(default_factory=lambda: [ScalingSettings()])
    """Rotary scalings."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Settings of every task to run, by its name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator if there is one. auto spreads a model over all GPUs
    of its process, and what does not fit over the CPU's memory."""
    endpoint: str | None = None
    """Server with OpenAI's completions that answers prompts in place of the models, such as
    http://127.0.0.1:8000/v1. It calls them by their names; folders are those of tokenizers."""
    requests: PositiveInt = 8
    """Requests to the endpoint at once."""
    num_cpus: int = 1
    """With --ray: cores of a process."""
    num_gpus: float | None = None
    """With --ray: GPUs of a process; by default one if there are GPUs. A model that needs several
    has device auto."""

    def check(self) -> None:
        """Raise UserError where settings contradict each other or are out of range."""
        if not self.models:
            raise UserError("a suite needs models: a name and a folder each")
        if not self.tasks:
            raise UserError(f"a suite needs a task: one or more of {', '.join(TASKS)}")
        for scaling in self.scalings:
            unknown = sorted(set(scaling.models or []) - set(self.models))
            if unknown:
                raise UserError(
                    f"scaling {scaling.kind} names models that the suite does not have: "
                    f"{', '.join(unknown)}"
                )
        unscaled = [name for name in self.models if not self.scalings_of(name)]
        if unscaled:
            raise UserError(
                f"no scaling applies to {', '.join(unscaled)}: add {{kind: none}} to the scalings"
            )

    def scalings_of(self, model: str) -> list[ScalingSettings]:
        """The scalings that apply to a model."""
        return [s for s in self.scalings if s.models is None or model in s.models]


def task_sections() -> dict[str, tuple[type, str]]:
    """The sections of tasks in YAML files: their settings, and a line of help."""
    return {task.name: (task.settings, task.summary) for task in TASKS.values()}


def suite_parser(shown: Sequence[str] = ()) -> SettingsParser:
    """The parser of suite files and overrides; its help comes from the documented fields."""
    return settings_parser(Suite, "coca eval suite", task_sections(), shown)


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """A checked suite from a YAML file and command-line overrides."""
    options: Any = {"kind": "suite", "program": "coca eval suite", "sections": task_sections()}
    return read_settings(Suite, path, overrides, **options)


def register_task(task: Task) -> None:
    """Add a task to ``coca eval``, suites and studies; UserError if its name is taken.

    Without an entry in `coca_lab.report.REPORTS` the report leaves its cells out.
    """
    if task.name in (*TASKS, *Suite.__dataclass_fields__, "suite"):
        raise UserError(f"there is already a task or suite section named {task.name!r}")
    TASKS[task.name] = task


def run_suite(
    suite: Suite,
    output: str | Path,
    *,
    progress: Progress = lambda line, done, total: None,
    ray: str | None = None,
) -> Path:
    """Evaluate what the output folder does not have yet; returns the file of all results."""
    suite.check()
    results = Path(output) / RESULTS_FILE
    check_results(results)
    with Store(Path(output) / STORE_FILE) as store:
        engine = Engine(store, progress)
        if ray is not None:
            resources: Any = {"num_cpus": suite.num_cpus, "num_gpus": suite.num_gpus}
            engine = RayEngine(store, progress, address=ray, **resources)
        tasks = [(TASKS[name], settings) for name, settings in suite.tasks.items()]
        write_cells(suite, tasks, engine, results)
    return results


def write_cells(
    suite: Suite, tasks: Sequence[tuple[Task, Any]], engine: Engine, path: Path
) -> list[Cell]:
    """Write the result file of tasks, with their settings, for the models of a suite."""
    cells, measured = evaluate(suite, tasks, engine)
    settings = asdict(suite) | {task.name: asdict(each) for task, each in tasks}
    del settings["tasks"]
    keep_other_results(path, measured)
    facts = {"measured": measured, "environment": describe_environment()}
    write_json(path, {"results": cells, "suite": settings, **facts})
    return cells


def evaluate(
    suite: Suite, tasks: Sequence[tuple[Task, Any]], engine: Engine
) -> tuple[list[Cell], list[str]]:
    """The cells of tasks, with their settings, for the models and scalings of a suite.

    Also the fingerprints of the measurements, whose names the cells have.
    """
    measurements, measured = [], []
    for model in open_models(suite):
        for number, scaling in enumerate(suite.scalings_of(model.name)):
            for task, settings in tasks:
                if task.scaled or number == 0:
                    with error_prefix(f"model {model.name}: {task.name}: "):
                        if suite.endpoint and not (task.prompts and scaling.kind == "none"):
                            raise UserError("an endpoint answers prompts, without a scaling")
                        found = task.measurements(model, settings, scaling)
                    measurements += found
                    keys = [item.keys for each in found for item in each.items]
                    measured.append(fingerprint([model.name, keys]))
    try:
        return finish(measurements, engine), measured
    finally:
        free_weights()


def open_models(suite: Suite) -> list[Model]:
    """The models, without weights, if they can be loaded and scaled; texts are shared."""
    if suite.device not in (None, "auto"):
        usable_device(str(suite.device))
    texts: dict[str, dict[str, Any]] = {}
    models = []
    for name, path in suite.models.items():
        with error_prefix(f"model {name}: "):
            if suite.endpoint:
                model = served_model(path, Endpoint(suite.endpoint, name, suite.requests))
            else:
                model = open_model(path, name, suite.dtype, suite.device)
            tokenizer: Any = model.tokenizer
            rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else path
            rules = f"{rules} {tokenizer.bos_token_id} {tokenizer.eos_token_id}"
            for scaling in suite.scalings_of(name) if not suite.endpoint else ():
                scaling.parameters(model.module, 1)
            models.append(replace(model, texts=texts.setdefault(rules, {})))
    return models
