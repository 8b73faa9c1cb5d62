"""Commands that evaluate models: one task or a study."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from coca_lab.cli.console import ProgressBar, print_table
from coca_lab.engine import Engine
from coca_lab.evaluation import TASKS
from coca_lab.evaluation.plan import write_cells
from coca_lab.evaluation.task import Cell
from coca_lab.files import check_results, no_empty_folders
from coca_lab.report import printed_tables, read_results
from coca_lab.settings.commands import EndpointSettings
from coca_lab.settings.studies import ModelsMethod, Plan
from coca_lab.store import Store


def eval_command(
    task_name: str, path: str, settings: Any, loading: Any, at: EndpointSettings | None = None
) -> None:
    """Evaluate a model on one task, and print its results."""
    task = TASKS[task_name]
    at = at or EndpointSettings()
    name = at.model or loading.name or (path if at.endpoint else Path(path).name)
    method = ModelsMethod()
    plain = re.sub(r"[^\w.=+-]+", "-", name)
    file = f"{plain}-{task.name}.json"
    if task.scaled:
        method = ModelsMethod(loading.method, loading.factor, loading.options)
        if loading.method != "none":
            file = f"{plain}-{loading.method}-{task.name}.json"
    output = Path(loading.output or Path("runs", "eval", file))
    plan = Plan(
        [method],
        dtype=loading.dtype,
        device=loading.device,
        endpoint=at.endpoint,
        requests=at.requests,
        timeout=at.timeout,
    )
    with no_empty_folders(output):  # of a measurement that is refused
        check_results(output)
        with Store(output.with_suffix(".values.sqlite")) as store, ProgressBar() as progress:
            engine = Engine(store, progress)
            cells = write_cells(plan, {name: path}, task, settings, engine, output)
            if at.endpoint:  # which may serve another model next time
                store.forget(engine.used)
    _print_results(cells, output)


def _print_results(cells: list[Cell], path: Path) -> None:
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {path}")


def study_command(name: str, overrides: list[str], chosen: Namespace) -> None:
    """Train or load models, evaluate them alike and draw a page; resumes when run again."""
    from coca_lab import studies  # and all that trains models, a second for other commands

    study = studies.load_study(name, overrides)
    with no_empty_folders(chosen.output / studies.REPORT_FILE), ProgressBar() as advance:
        results = studies.run_study(
            study, chosen.output, progress=advance, ray=chosen.ray, workers=chosen.workers
        )
    _print_results(read_results([results])[0]["results"], results)
    page = chosen.output / studies.REPORT_FILE
    if page.is_file():
        print(f"Report:  {page}")
