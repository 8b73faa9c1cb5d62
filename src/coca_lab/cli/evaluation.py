"""Commands that evaluate models: one task, an analysis or a study."""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from coca_attention.errors import UserError
from coca_lab.analysis.task import ANALYSIS
from coca_lab.cli import Command, choose
from coca_lab.cli.console import RAY, PlacedSettings, ProgressBar, parse, parse_file, print_table
from coca_lab.data.documents import PathText
from coca_lab.engine import Engine
from coca_lab.evaluation import TASKS, Task
from coca_lab.evaluation.plan import ModelsMethod, Plan, write_cells
from coca_lab.evaluation.task import Cell, MethodSettings
from coca_lab.files import check_results
from coca_lab.report import printed_tables, read_results
from coca_lab.store import Store

WORKERS = (
    "Processes that train a model each and share its evaluation; 0: none but this one. By default "
    "one per core, or one if there is a GPU; none if nothing is trained or converted."
)


@dataclass
class LoadingSettings(PlacedSettings):
    """How a model is loaded, and where the results go."""

    name: str | None = None
    """What the results call the model; by default the name of its folder."""
    output: PathText | None = None
    """Result file (JSON); by default in runs/eval/, named after the model and the task."""


@dataclass
class ReadingSettings(LoadingSettings, MethodSettings):
    """How a model is loaded, by what method it reads farther, and where the results go."""

    def __post_init__(self) -> None:
        if self.factor is not None and self.method == "none":
            raise UserError("factor is for a method: set --method, for example to yarn")


@dataclass
class EndpointSettings:
    """A server that answers prompts in place of the model, whose tokenizer is in the folder."""

    endpoint: str | None = None
    """Its address, with OpenAI's completions, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """What the server calls the model, and so do the results; by default as the folder."""
    requests: PositiveInt = 8
    """Requests at once."""

    def __post_init__(self) -> None:
        if self.model is not None and self.endpoint is None:
            raise UserError("model is what a server calls it: set --endpoint, or instead --name")


def task_commands() -> dict[str, Command]:
    """The commands behind ``coca eval``: every registered task."""
    return {name: task_command(task, "coca eval") for name, task in TASKS.items()}


def eval_command(words: list[str]) -> None:
    """Evaluate a model on one task; coca study does so for many."""
    commands = task_commands()
    lines = {name: (run.__doc__ or "").splitlines()[0] for name, run in commands.items()}
    name = choose("coca eval", words, {"tasks": lines})
    if name is not None:
        commands[name](words[1:])


def task_command(task: Task, prefix: str) -> Command:
    """The command that runs one task on one model; ``prefix`` is the words before its name."""
    program = f"{prefix} {task.name}"

    def run(words: list[str]) -> None:
        sections = [task.settings, ReadingSettings if task.scaled else LoadingSettings]
        sections += [EndpointSettings] if task.prompts else []
        named = ["folder" if task.prompts else "model"]  # --model is what a server calls it
        path, settings, loading, *server = parse(program, run, words, sections, named)
        at = server[0] if server else EndpointSettings()
        name = at.model or loading.name or (path if at.endpoint else Path(path).name)
        method = ModelsMethod()
        plain = re.sub(r"[^\w.=+-]+", "-", name)
        file = f"{plain}-{task.name}.json"
        if task.scaled:
            method = ModelsMethod(loading.method, loading.factor, loading.options)
            file = f"{plain}-{loading.method}-{task.name}.json"
        output = Path(loading.output or Path("runs", "eval", file))
        check_results(output)
        plan = Plan(
            [method],
            dtype=loading.dtype,
            device=loading.device,
            endpoint=at.endpoint,
            requests=at.requests,
        )
        with Store(output.with_suffix(".values.sqlite")) as store, ProgressBar() as progress:
            engine = Engine(store, progress)
            cells = write_cells(plan, {name: path}, task, settings, engine, output)
            if at.endpoint:  # which may serve another model next time
                store.forget(engine.used)
        _print_results(cells, output)

    run.__doc__ = task.summary
    return run


def _print_results(cells: list[Cell], path: Path) -> None:
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {path}")


analyze_command = task_command(ANALYSIS, "coca")


def study_command(words: list[str]) -> None:
    """Train or load models, evaluate them alike and draw a page; resumes when run again."""
    from coca_lab import studies  # and all that trains models, a second for other commands

    usage = "coca study NAME|STUDY.yaml [--workers N] [--ray [ADDRESS]] [--training.steps 100 …]"
    options = {**RAY, "--workers": {"type": int, "help": WORKERS}}
    name, overrides, chosen = parse_file(
        words, study_command, studies.study_parser, "study", usage, options=options
    )
    study = studies.load_study(name, overrides)
    with ProgressBar() as advance:
        results = studies.run_study(
            study, chosen.output, progress=advance, ray=chosen.ray, workers=chosen.workers
        )
    _print_results(read_results([results])[0]["results"], results)
    page = chosen.output / studies.REPORT_FILE
    if page.is_file():
        print(f"Report:  {page}")
