"""Searches in the report: a leaderboard for every rung."""

from collections.abc import Sequence
from typing import Any

from coca_lab.report.section import Entry, Section, Table
from coca_lab.report.sizes import size_sections

Cell = dict[str, Any]
SIZES = {"perplexity": "window", "passkey": "length", "needles": "length"}
"""The tasks of a leaderboard, and the field with the size of a cell."""


def search_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends over sizes, a leaderboard for every rung, the last one first, and what failed."""
    rungs: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rungs.setdefault((cell["search"], -cell["rung"]), []).append(cell)
    sections = [*size_sections(cells), *(_leaderboard(rungs[key]) for key in sorted(rungs))]
    failed = [cell for cell in cells if cell["error"]]
    if failed:
        rows = [[c["model"], str(c["rung"]), str(c["seed"]), c["error"]] for c in failed]
        header = ["trial", "rung", "seed", "error"]
        sections.append(Section("Trials that failed", header=header, rows=rows))
    return sections


def search_tables(cells: Sequence[Cell]) -> list[Table]:
    """The same for the terminal, where a header is one line."""
    return [
        (
            [
                section.title.rpartition(": ")[2],
                *(f"{getattr(e, 'small', '')} {e}".strip() for e in section.header[1:]),
            ],
            section.rows,
        )
        for section in search_sections(cells)
    ]


def search_findings(cells: Sequence[Cell]) -> list[str]:
    """The winner of every finished search."""
    winners = {
        cell["search"]: cell for cell in cells if cell.get("kept") and cell["rung"] == cell["rungs"]
    }
    return [
        f"{search}: the winner of {len({c['model'] for c in cells if c['search'] == search})} "
        f"trials is {winner['model']}, after {winner['steps']:,} steps. It was chosen on this text "
        "and these prompts: measure it again on others."
        for search, winner in winners.items()
    ]


def _leaderboard(records: Sequence[Cell]) -> Section:
    first = records[0]
    is_last = first["rung"] == first["rungs"]
    trials: dict[str, list[Cell]] = {}
    for record in records:
        trials.setdefault(record["model"], []).append(record)
    rank = {name: group[0].get("mean_rank") for name, group in trials.items()}
    found = {name: _by_task_and_size(group) for name, group in trials.items()}
    sizes = {key for figures in found.values() for key in figures}
    columns = sorted(sizes, key=lambda key: (list(SIZES).index(key[0]), key[1]))
    names = sorted(trials, key=lambda name: (rank[name] is None, rank[name] or 0))
    rows = []
    for name in names:
        group, value = trials[name], rank[name]
        seeds = f"{len(group)} seeds" if len(group) > 1 else ""
        is_winner = is_last and bool(group[0].get("kept"))
        unranked = "failed" if any(record["error"] for record in group) else "–"
        rows.append(
            [
                Entry(name, seeds, bold=is_winner),
                unranked if value is None else f"{value:.3g}",
                *(_entry(key[0], found[name].get(key, [])) for key in columns),
                _seconds(group),
            ]
        )
    by = "; ".join(
        f"{task} at {', '.join(map(str, sizes))}" for task, sizes in first["rank"].items()
    )
    return Section(
        f"{first['search']}: rung {first['rung']} of {first['rungs']}, {first['steps']:,} steps",
        header=[
            "trial",
            "mean rank",
            *(Entry(f"{size:,}", task) for task, size in columns),
            "seconds a step",
        ],
        rows=rows,
        note=f"Mean rank by {by}. 1 is the best. Below passkeys: keys at most the "
        "training length from the end of the prompt / farther away. Figures are means over seeds, "
        "and below a perplexity is its range. Grey trials are not in the next rung.",
        muted=[
            i
            for i, name in enumerate(names)
            if not is_last and trials[name][0].get("kept") is False
        ],
    )


def _by_task_and_size(records: Sequence[Cell]) -> dict[tuple[str, int], list[Cell]]:
    """The evaluation's cells without scaling, of all seeds."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for record in records:
        for cell in record["cells"]:
            if cell["task"] in SIZES and cell["scaling"] == "none":
                key = cell["task"], cell[SIZES[cell["task"]]]
                found.setdefault(key, []).append(cell)
    return found


def _entry(task: str, cells: list[Cell]) -> str | Entry:
    """What a leaderboard says about the cells of one task and size, one or more per seed."""
    if not cells:
        return "–"
    if task == "perplexity":
        values = [cell["perplexity"] for cell in cells]
        if None in values:
            return "∞"
        extremes = f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""
        return Entry(f"{sum(values) / len(values):.2f}", extremes)
    if task == "needles":
        return f"{sum(cell['recall'] for cell in cells) / len(cells):.2f}"
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for cell in cells:
        for sample in cell["samples"]:
            hits[sample["distance"] <= cell["training_length"]].append(sample["hit"])
    near, far = (f"{sum(h) / len(h):.2f}" if h else "–" for h in (hits[True], hits[False]))
    share = sum(cell["accuracy"] for cell in cells) / len(cells)
    return Entry(f"{share:.2f}", f"{near} / {far}" if hits[False] else "")


def _seconds(records: Sequence[Cell]) -> str:
    """Seconds a training step, without runs that failed or were interrupted."""
    each = [record["training"]["seconds_per_step"] for record in records if record["training"]]
    measured = [seconds for seconds in each if seconds is not None]
    return f"{sum(measured) / len(measured):.3f}" if measured else "–"
