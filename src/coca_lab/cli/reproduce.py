"""The command ``coca reproduce``."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from coca_lab.cli.console import Progress, duration, megabytes, parse, print_table
from coca_lab.studies.reproduce.settings import ReproduceSettings

if TYPE_CHECKING:
    from coca_lab.studies.reproduce import Cost


def run_reproduce(words: list[str]) -> None:
    """Train the paper's models at a smaller size and evaluate them as the paper does."""
    settings = parse("coca reproduce", run_reproduce, words, [ReproduceSettings])[0]
    settings.check()
    from accelerate import PartialState

    from coca_lab.studies.reproduce import costs_of, reproduce

    if settings.dry_run:
        costs = costs_of(settings)
        if settings.device or PartialState().is_main_process:
            _print_costs(settings, costs)
        return
    with Progress() as advance:
        page = reproduce(settings, progress=advance)
    if not PartialState().is_main_process:
        return
    if settings.prepare:
        print(f"Tokenised text: {settings.text_folder}")
        return
    if page is None:
        print(f"The time is over: run the same command again to go on in {settings.folder}")
        return
    from coca_lab.report import printed_tables, read_results

    results = settings.folder / "suite" / "results.json"
    for table in printed_tables(read_results([results])[0]["results"]):
        print_table(*table)
    print(f"Results: {results}\nReport:  {page}")


def _print_costs(settings: ReproduceSettings, costs: "list[Cost]") -> None:
    from coca_lab.studies.reproduce import ASSUMED_UTILIZATION

    shown: dict[str, Callable[[Cost], str]] = {
        "parameters": lambda c: f"{c.parameters:,}",
        "tokens / 1e6": lambda c: f"{c.tokens / 1e6:,.1f}",
        "steps": lambda c: f"{c.steps:,}",
        "blocks a pass": lambda c: f"{c.micro_batch_size}",
        "memory": lambda c: megabytes(round(c.memory)),
        "training": lambda c: duration(c.training),
        "evaluation": lambda c: duration(c.evaluation),
    }
    rows = [[label, *map(show, costs)] for label, show in shown.items()]
    print_table(["", *(cost.name for cost in costs)], rows)
    training, evaluation = (sum(getattr(c, n) for c in costs) for n in ("training", "evaluation"))
    where = (
        f"{settings.devices} {settings.device} at {ASSUMED_UTILIZATION:.0%} of the peak, which is "
        "assumed; memory of each"
        if settings.device
        else "this machine, from measured steps"
    )
    print(
        f"{duration(training + evaluation)} in all, {duration(training)} of them training, on "
        f"{where}. Nothing was written."
    )
