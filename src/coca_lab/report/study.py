"""Studies of several seeds or sizes: means and ranges by length, and trends over the sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coca_lab.intervals import PowerLaw, fit_power_law
from coca_lab.report.charts import Line, LineChart
from coca_lab.report.lines import DASHES, Key, line_key, line_label
from coca_lab.report.results import Cell
from coca_lab.report.section import Entry, Section, Table


@dataclass(frozen=True)
class Figure:
    """What is shown of a task: the field with a cell's length, its figure, axes, digits."""

    length: str
    value: str
    axes: tuple[str, str]
    digits: str
    top: float | None = None


READ = "tokens read at once"
FIGURES = {
    "perplexity": Figure("window", "perplexity", (READ, "perplexity (lower is better)"), ".1f"),
    "passkey": Figure("length", "accuracy", (READ, "share of passkeys found"), ".2f", 1),
    "needles": Figure("length", "recall", (READ, "share of needles found"), ".2f", 1),
}
MOST = 8
"""Lines in a chart; the table below it has all."""
FAR = {350_000_000: "350M", 7_000_000_000: "7B"}
"""Parameters of the paper's models, to which trends are extended."""
Lines = dict[Key, dict[int, list[float]]]
"""By line and length, the figures of all seeds."""


def gather_seeds(cells: Sequence[Cell]) -> None:
    """Give cells of several seeds or sizes the task ``study``, and their own as ``of``."""
    runs: dict[Any, set[Any]] = {}
    for cell in cells:
        if "training_seed" in cell:
            runs.setdefault(cell["file"], set()).add((cell["training_seed"], cell["size"]))
    for cell in cells:
        if cell["task"] in FIGURES and len(runs.get(cell["file"], ())) > 1:
            cell["of"], cell["task"] = cell["task"], "study"


def study_sections(cells: Sequence[Cell]) -> list[Section]:
    """Trends over the sizes, then every figure by length."""
    sections = _trends(cells) if len({cell["size"] for cell in cells}) > 1 else []
    groups: dict[tuple[str, str, str | None], list[Cell]] = {}
    for cell in cells:
        if cell[FIGURES[cell["of"]].value] is not None:
            groups.setdefault((cell["size"], cell["of"], cell.get("kind")), []).append(cell)
    for (size, task, kind), group in groups.items():
        figure = FIGURES[task]
        about = filter(None, (figure.axes[1].partition(" (")[0].capitalize(), kind, size))
        sections.append(_by_length(", ".join(about), figure, group))
    return sections


def study_tables(cells: Sequence[Cell]) -> list[Table]:
    """The same for the terminal, where the first column has the title."""
    return [([s.title, *s.header[1:]], s.rows) for s in study_sections(cells)]


def _by_length(title: str, figure: Figure, cells: Sequence[Cell]) -> Section:
    """Means over seeds with their ranges, against the length."""
    plain: Lines = {}
    last: Lines = {}
    for cell in cells:
        model, scaling, factor = line_key(cell)
        if scaling == "attend-last":
            line = last.setdefault((model, "none", None), {})
        else:
            line = plain.setdefault((model, scaling, factor), {})
        line.setdefault(cell[figure.length], []).append(cell[figure.value])
    lengths, ends = (
        sorted({length for line in lines.values() for length in line}) for lines in (plain, last)
    )
    rows = [
        [line_label(key)]
        + [_entry(line.get(length, ()), figure.digits) for length in lengths]
        + [_entry(last.get(key, {}).get(length, ()), figure.digits) for length in ends]
        for key, line in plain.items()
    ]
    seeds = len({cell["training_seed"] for cell in cells})
    return Section(
        title,
        lead=_lead(title, figure, lengths[-1], plain),
        chart=_chart(figure, plain, {cell["training_length"] for cell in cells}),
        header=["model", *(f"{n:,}" for n in lengths), *(f"last {n:,} tokens only" for n in ends)],
        rows=rows,
        note=f"Means of {seeds} seed{'s' * (seeds > 1)}, and their ranges."
        + (f" The chart shows the first {MOST} models." if len(plain) > MOST else ""),
    )


def _chart(figure: Figure, lines: Lines, trained: set[int | None]) -> LineChart:
    drawn = [
        Line(
            line_label(key),
            list(line),
            [_mean(values) for values in line.values()],
            [(min(values), max(values)) for values in line.values()],
            key[0],
            DASHES.get(key[1], (6, 3)),
        )
        for key, line in list(lines.items())[:MOST]
    ]
    length = trained.pop() if len(trained) == 1 else None
    return LineChart(
        drawn,
        *figure.axes,
        ticks=sorted({length for line in lines.values() for length in line}),
        log_y=None if figure.top else True,
        top=figure.top,
        mark=(length, "training length") if length else None,
    )


def _lead(title: str, figure: Figure, length: int, lines: Lines) -> str:
    """Who is best at a length, and what the others have."""
    far = {key: _mean(line[length]) for key, line in lines.items() if length in line}
    best = (max if figure.top else min)(far, key=far.__getitem__)
    others = [value for key, value in far.items() if key != best]
    lead = f"{title}: at {length:,} tokens {line_label(best)} has {far[best]:{figure.digits}}"
    if others:
        ends = dict.fromkeys(f"{end(others):{figure.digits}}" for end in (min, max))
        lead += f", the others {' to '.join(ends)}"
    return f"{lead}."


def _trends(cells: Sequence[Cell]) -> list[Section]:
    """Perplexity over the sizes: against the first model's, and far against near."""
    runs: dict[tuple[str, str, int], dict[int, Cell]] = {}
    for cell in cells:
        if cell["of"] == "perplexity" and cell["scaling"] == "none" and cell["perplexity"]:
            run = cell["model"], cell["size"], cell["training_seed"]
            runs.setdefault(run, {})[cell["window"]] = cell
    windows = set.intersection(*map(set, runs.values())) if runs else set()
    if not windows:
        return []
    near, far = min(windows), max(windows)
    control = next(iter(runs))[0]

    def cost(run: tuple[str, str, int]) -> float | None:
        base = runs.get((control, *run[1:]))
        if base is None or run[0] == control:
            return None
        return runs[run][near]["perplexity"] / base[near]["perplexity"]

    def loss(run: tuple[str, str, int]) -> float:
        return runs[run][far]["perplexity"] / runs[run][near]["perplexity"]

    label = f"perplexity, as a multiple of {control}’s"
    title = f"Perplexity at {near:,} tokens against {control}’s, by size"
    sections = [_trend(title, label, runs, cost)]
    if far > near:
        title = f"Perplexity at {far:,} tokens against {near:,}, by size"
        sections.append(_trend(title, f"perplexity at {far:,} / {near:,} tokens", runs, loss))
    return [section for section in sections if section.rows]


def _trend(
    title: str, label: str, runs: dict[tuple[str, str, int], dict[int, Cell]], figure: Callable
) -> Section:
    """A chart of all runs with their power laws, and what these say of larger models."""
    points: dict[str, list[tuple[str, float, float]]] = {}
    for run, by_window in runs.items():
        if (value := figure(run)) is not None:
            (parameters,) = {cell["parameters"] for cell in by_window.values()}
            points.setdefault(run[0], []).append((run[1], parameters, value))
    sizes = list(dict.fromkeys(size for _, size, _ in runs))
    lines, rows = [], []
    for name, found in points.items():
        x, y = [x for _, x, _ in found], [y for _, _, y in found]
        law = fit_power_law(x, y)
        lines.append(Line(name, x, y, joined=False))
        if law:
            ends = min(x), max(x)
            lines.append(Line(name, ends, [law.at(end)[0] for end in ends], dotted=False))
        by_size = ([y for each, _, y in found if each == size] for size in sizes)
        rows.append([name, *(_entry(values, ".3f") for values in by_size), *_extended(law)])
    return Section(
        title,
        chart=LineChart(lines, "parameters", label, log_x=True, log_y=True) if lines else None,
        header=[
            "model",
            *sizes,
            Entry("exponent", "95 % interval"),
            *(Entry(size, "if the trend holds") for size in FAR.values()),
        ],
        rows=rows,
        note="Pairs of runs of the same seed; means over seeds and their ranges. Lines are power "
        "laws of the number of parameters; their 95 % intervals say nothing about whether they "
        "hold beyond the sizes measured.",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _entry(values: Sequence[float], digits: str) -> str | Entry:
    """A mean over seeds, and below it the range."""
    if not values:
        return "–"
    ends = f"{min(values):{digits}} to {max(values):{digits}}" if len(values) > 1 else ""
    return Entry(f"{_mean(values):{digits}}", ends)


def _extended(law: PowerLaw | None) -> list[str | Entry]:
    """The exponent, and the trend at the sizes of the paper."""
    if law is None:
        return ["–"] * (1 + len(FAR))
    low, high = law.exponent - law.half, law.exponent + law.half
    trends = (law.at(size) for size in FAR)
    return [
        Entry(f"{law.exponent:+.3f}", f"{low:+.3f} to {high:+.3f}"),
        *(Entry(_plain(y, 3), f"{_plain(a, 2)} to {_plain(b, 2)}") for y, a, b in trends),
    ]


def _plain(value: float, digits: int) -> str:
    """Rounded to significant digits, and written without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"
