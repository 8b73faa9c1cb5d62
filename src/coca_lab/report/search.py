"""Searches in the report: a leaderboard for every rung, and trends over the sizes of a model."""

from collections.abc import Callable, Sequence

from coca_lab.intervals import PowerLaw, fit_power_law
from coca_lab.report.charts import Line, LineChart
from coca_lab.report.results import Cell
from coca_lab.report.section import Entry, Section, Table, mean

SIZES = {"perplexity": "window", "passkey": "length", "needles": "length"}
"""The tasks of a leaderboard, and the field with the size of a cell."""
FAR = {350_000_000: "350M", 7_000_000_000: "7B"}
"""Parameters of the paper's models, to which trends are extended."""
Runs = dict[str, list[tuple[str, float, float]]]
"""By trial, the size, the parameters and the figure of every run."""


def search_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends over sizes, a leaderboard for every rung, the last one first, and what failed."""
    rungs: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rungs.setdefault((cell["search"], -cell["rung"]), []).append(cell)
    sections = [*size_sections(cells), *(_leaderboard(rungs[key], cells) for key in sorted(rungs))]
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


def size_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends of perplexity over the sizes of a search; none if it has one size."""
    last = (cell for cell in cells if cell["rung"] == cell["rungs"])
    runs = [cell for cell in last if cell["status"] == "finished" and _windows(cell)]
    if len({cell["search"] for cell in runs}) < 2:
        return []
    windows = sorted(set.intersection(*(set(_windows(cell)) for cell in runs)))
    if not windows:
        return []
    near, far = windows[0], windows[-1]
    control = runs[0]["model"]
    base = {
        (cell["search"], cell["seed"]): _windows(cell)[near]
        for cell in runs
        if cell["model"] == control
    }

    def cost(cell: Cell) -> float | None:
        other = base.get((cell["search"], cell["seed"]))
        return _windows(cell)[near] / other if other and cell["model"] != control else None

    title = f"Perplexity at {near:,} tokens against {control}’s, by size"
    label = f"perplexity, as a multiple of {control}’s"
    found = [_trends(title, _runs(runs, cost), label, "Pairs of runs of the same seed. ")]
    if far > near:
        title = f"Perplexity at {far:,} tokens against {near:,}, by size"
        ratios = _runs(runs, lambda cell: _windows(cell)[far] / _windows(cell)[near])
        found.append(_trends(title, ratios, f"perplexity at {far:,} / at {near:,} tokens"))
    return [section for section in found if section.rows]


def _lead(records: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """The winner of a finished search."""
    winner = next((r for r in records if r.get("kept") and r["rung"] == r["rungs"]), None)
    if winner is None:
        return ""
    trials = {cell["model"] for cell in cells if cell["search"] == winner["search"]}
    return (
        f"{winner['search']}: {winner['model']} is the best of {len(trials)} trials after "
        f"{winner['steps']:,} steps."
    )


def _leaderboard(records: Sequence[Cell], cells: Sequence[Cell]) -> Section:
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
        unranked = "failed" if any(record["error"] for record in group) else "–"
        rows.append(
            [
                Entry(name, seeds, bold=is_last and bool(group[0].get("kept"))),
                unranked if value is None else f"{value:.3g}",
                *(_entry(key[0], found[name].get(key, [])) for key in columns),
                _seconds(group),
            ]
        )
    ranked = first["rank"].items()
    by = "; ".join(f"{task} at {', '.join(map(str, sizes))}" for task, sizes in ranked)
    dropped = [i for i, name in enumerate(names) if trials[name][0].get("kept") is False]
    return Section(
        f"{first['search']}: rung {first['rung']} of {first['rungs']}, {first['steps']:,} steps",
        lead=_lead(records, cells),
        header=[
            "trial",
            "mean rank",
            *(Entry(f"{size:,}", task) for task, size in columns),
            "seconds a step",
        ],
        rows=rows,
        note=f"Mean rank by {by}. 1 is the best. Below passkeys: keys at most the training length "
        "from the end of the prompt / farther away. Figures are means over seeds, and below a "
        "perplexity is its range. Grey trials are not in the next rung. The best was chosen on "
        "this text and these prompts: measure it again on others.",
        muted=[] if is_last else dropped,
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
        return "∞" if None in values else _measured(values, "{:.2f}")
    if task == "needles":
        return f"{mean(cell['recall'] for cell in cells):.2f}"
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for cell in cells:
        for sample in cell["samples"]:
            hits[sample["distance"] <= cell["training_length"]].append(sample["hit"])
    near, far = (f"{sum(h) / len(h):.2f}" if h else "–" for h in (hits[True], hits[False]))
    share = mean(cell["accuracy"] for cell in cells)
    return Entry(f"{share:.2f}", f"{near} / {far}" if hits[False] else "")


def _seconds(records: Sequence[Cell]) -> str:
    """Seconds a training step, without runs that failed or were interrupted."""
    value = mean(r["training"]["seconds_per_step"] for r in records if r["training"])
    return "–" if value is None else f"{value:.3f}"


def _windows(cell: Cell) -> dict[int, float]:
    """Perplexity by window, without scaling."""
    return {
        each["window"]: each["perplexity"]
        for each in cell["cells"]
        if each["task"] == "perplexity" and each["scaling"] == "none" and each["perplexity"]
    }


def _runs(cells: Sequence[Cell], figure: Callable[[Cell], float | None]) -> Runs:
    found: Runs = {}
    for cell in cells:
        value = figure(cell)
        if value is not None:
            run = cell["search"], cell["training"]["parameters"], value
            found.setdefault(cell["model"], []).append(run)
    return found


def _trends(title: str, runs: Runs, label: str, note: str = "") -> Section:
    """A chart of all runs with their power laws, and a table with what these say of larger ones."""
    points = {name: ([x for _, x, _ in f], [y for _, _, y in f]) for name, f in runs.items()}
    fits = {name: fit for name, each in points.items() if (fit := fit_power_law(*each))}
    lines = [Line(name, *each, joined=False) for name, each in points.items()]
    for name, fit in fits.items():
        ends = min(points[name][0]), max(points[name][0])
        lines.append(Line(name, ends, [fit.at(end)[0] for end in ends], dotted=False))
    sizes = list(dict.fromkeys(size for found in runs.values() for size, _, _ in found))
    rows = []
    for name, found in runs.items():
        measured = ([y for each, _, y in found if each == size] for size in sizes)
        rows.append([name, *(_measured(each, "{:.3f}") for each in measured)])
        rows[-1] += _extended(fits.get(name))
    return Section(
        title,
        chart=LineChart(lines, "parameters", label, log_x=True, log_y=True) if fits else None,
        header=[
            "trial",
            *sizes,
            Entry("exponent", "95 % interval"),
            *(Entry(size, "if the trend holds") for size in FAR.values()),
        ],
        rows=rows,
        note=note + "Means over seeds, and their range. Lines are power laws of the number of "
        "parameters, fitted to all runs; intervals are 95 % intervals of the law, and "
        "say nothing about whether it holds beyond the sizes measured.",
    )


def _measured(values: Sequence[float], digits: str) -> str | Entry:
    """A mean over seeds, and below it the range."""
    if not values:
        return "–"
    ends = " to ".join(map(digits.format, (min(values), max(values)))) if len(values) > 1 else ""
    return Entry(digits.format(sum(values) / len(values)), ends)


def _extended(fit: PowerLaw | None) -> list[str | Entry]:
    """The exponent, and the trend at the sizes of the paper."""
    if fit is None:
        return ["–"] * (1 + len(FAR))
    low, high = fit.exponent - fit.half, fit.exponent + fit.half
    trends = (fit.at(size) for size in FAR)
    return [
        Entry(f"{fit.exponent:+.3f}", f"{low:+.3f} to {high:+.3f}"),
        *(Entry(_plain(y, 3), f"{_plain(a, 2)} to {_plain(b, 2)}") for y, a, b in trends),
    ]


def _plain(value: float, digits: int) -> str:
    """Rounded to significant digits, and written without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"
