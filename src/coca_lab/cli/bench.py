"""The command ``coca bench``."""

from dataclasses import asdict, dataclass
from pathlib import Path

from coca_lab.cli.console import Progress, parse, print_table
from coca_lab.options import take_option


@dataclass
class OutputSettings:
    """Where the results are written."""

    output: str = "runs/bench.json"
    """Result file (JSON)."""


def run_bench(words: list[str]) -> None:
    """Time and memory compared with plain rotary attention; wrong results are not timed."""
    from coca_lab.environment import (
        check_results,
        describe_environment,
        keep_other_results,
        write_json,
    )
    from coca_lab.studies.bench.settings import TITLES, BenchSettings, check_settings

    words, kv_heads = take_option(words, "--groups")  # the former name of --kv-heads
    if kv_heads is not None:
        words = [*words, "--kv-heads", kv_heads]
    cases = "Cases: " + "; ".join(f"{name}: {title}" for name, title in TITLES.items())
    sections = [BenchSettings, OutputSettings]
    settings, output = parse("coca bench", run_bench, words, sections, epilog=cases)
    check_settings(settings)
    path = Path(output.output)
    check_results(path)
    from coca_lab.report import printed_tables
    from coca_lab.studies.bench import run_benchmarks

    with Progress() as advance:
        cells = run_benchmarks(settings, progress=advance)
    keep_other_results(path, "settings", asdict(settings))
    content = {"settings": asdict(settings), "environment": describe_environment()}
    write_json(path, {"results": cells, **content})
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {path}")
