"""Commands that run studies: quickstart, reproduction, search and benchmarks."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import PartialState

from coca_lab.cli.console import Progress, duration, megabytes, parse, parse_file, print_table
from coca_lab.engine import take_ray
from coca_lab.environment import describe_environment
from coca_lab.files import check_results, keep_other_results, write_json
from coca_lab.report import printed_tables, read_results
from coca_lab.studies.bench import CASES, BenchSettings, check_settings, run_benchmarks
from coca_lab.studies.quickstart import QuickstartSettings, quickstart
from coca_lab.studies.reproduce import (
    ASSUMED_UTILIZATION,
    Cost,
    ReproduceSettings,
    costs_of,
    reproduce,
)
from coca_lab.studies.search import load_search, search, search_parser


def _print_results(path: Path) -> None:
    for table in printed_tables(read_results([path])[0]["results"]):
        print_table(*table)
    print(f"Results: {path}")


def run_quickstart(words: list[str]) -> None:
    """Train five small models and compare them on long texts."""
    settings = parse("coca quickstart", run_quickstart, words, [QuickstartSettings])[0]
    with Progress() as advance:
        quickstart(settings, progress=advance)
    output = Path(settings.output)
    _print_results(output / "results.json")
    print(f"Report:  {output / 'report.html'}")


def run_search(words: list[str]) -> None:
    """Train and evaluate many variants of a recipe and keep the best; resumes when restarted."""
    usage = "coca search SEARCH.yaml [--ray [ADDRESS]]"
    words, ray = take_ray(words)
    path, overrides, folder = parse_file(words, run_search, search_parser, "search", usage)
    with Progress() as advance:
        results = search(load_search(path, overrides), folder, progress=advance, ray=ray)
    _print_results(results)


def run_reproduce(words: list[str]) -> None:
    """Train the paper's models at a smaller size and evaluate them as the paper does."""
    settings = parse("coca reproduce", run_reproduce, words, [ReproduceSettings])[0]
    settings.check()
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
    elif page is None:
        print(f"The time is over: run the same command again to go on in {settings.folder}")
    else:
        _print_results(settings.folder / "suite" / "results.json")
        print(f"Report:  {page}")


def _print_costs(settings: ReproduceSettings, costs: list[Cost]) -> None:
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


@dataclass
class OutputSettings:
    """Where the results are written."""

    output: str = "runs/bench.json"
    """Result file (JSON)."""


def run_bench(words: list[str]) -> None:
    """Time and memory compared with plain rotary attention; wrong results are not timed."""
    cases = "Cases: " + "; ".join(f"{name}: {case.title}" for name, case in CASES.items())
    sections = [BenchSettings, OutputSettings]
    settings, output = parse("coca bench", run_bench, words, sections, epilog=cases)
    check_settings(settings)
    path = Path(output.output)
    check_results(path)
    with Progress() as advance:
        cells = run_benchmarks(settings, progress=advance)
    keep_other_results(path, "settings", asdict(settings))
    content = {"settings": asdict(settings), "environment": describe_environment()}
    write_json(path, {"results": cells, **content})
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {path}")
