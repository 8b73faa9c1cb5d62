"""The command that times."""

from dataclasses import dataclass
from pathlib import Path

from coca_attention.cli.console import Progress, parse, print_table


@dataclass
class OutputSettings:
    """Where the results go."""

    output: str = "runs/bench.json"
    """Result file (JSON)."""


def run_bench(words: list[str]) -> None:
    """Time and memory beside plain rotary attention; what is not correct is not timed."""
    from coca_attention.benchmarks import BenchSettings, check_settings, run_benchmarks
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.report import printed_tables

    settings, output = parse("coca bench", run_bench, words, [BenchSettings, OutputSettings])
    check_settings(settings)
    path = Path(output.output)
    check_writable(path)
    with Progress() as advance:
        cells = run_benchmarks(settings, progress=advance)
    write_json(path, {"results": cells, "environment": describe_environment()})
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {path}")
