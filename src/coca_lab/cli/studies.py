"""Commands that run studies: quickstart, reproduction and search."""

from pathlib import Path

from accelerate import PartialState

from coca_lab.cli.console import Progress, parse, parse_file, print_table
from coca_lab.engine import take_ray
from coca_lab.report import printed_tables, read_results
from coca_lab.studies.quickstart import QuickstartSettings, quickstart
from coca_lab.studies.reproduce import ReproduceSettings, reproduce
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
