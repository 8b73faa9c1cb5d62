"""The command ``coca search``."""

from coca_lab.cli.console import Progress, parse_file, print_table


def run_search(words: list[str]) -> None:
    """Train and evaluate many variants of a recipe and keep the best; resumes when restarted."""
    from coca_lab.studies.search import load_search, search, search_parser

    usage = "coca search SEARCH.yaml [--workers 4]"
    path, overrides, folder = parse_file(words, run_search, search_parser, "search", usage)
    with Progress() as advance:
        results = search(load_search(path, overrides), folder, progress=advance)
    from coca_lab.report import printed_tables, read_results

    for table in printed_tables(read_results([results])[0]["results"]):
        print_table(*table)
    print(f"Results: {results}")
