"""Figures against the length read: frame → finding, chart, table, conditions.

A frame has a row for every line and length, with the columns of a chart's points: ``line`` (the
name), ``x`` (tokens), ``y`` (the figure), ``low``, ``high`` and how it is drawn; and ``model``,
``scaling``, ``kind``, ``size``, ``seeds`` and ``cell``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from coca_attention.errors import UserError
from coca_lab.intervals import FEW_DOCUMENTS, paired_ratio_interval, wilson_interval
from coca_lab.report.cells import Figure, Perplexity, Prompts
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.section import Entry, Section, Table, enumeration, number, span, times

SCALING_NAMES = {
    "linear": "PI",
    "ntk": "NTK",
    "ntk_text": "NTK",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
}
STYLES = {
    "none": "",
    "ntk": "6 3",
    "ntk_text": "6 3",
    "dynamic": "6 3",
    "linear": "9 3 2 3",
    "yarn": "9 3 2 3",
}
SHORT = "attend-last"
"""The scaling of cells without any text before the last tokens; they have one window alone."""
SHARE = 0.85
"""The share of its score that a model keeps up to a length."""


@dataclass(frozen=True)
class Charted:
    """What the figures of a task are.

    Attributes:
        title: Heading of its section.
        name: Of the figure, as in a sentence.
        form: A figure as text; shares are in percent, as on their axes.
        top: The largest figure, which is the best one; without, the lowest is best.
        x: What the length is.
        level: A figure to compare with.
    """

    title: str
    name: str
    form: Callable[[float], str] = "{:.0%}".format
    top: float | None = None
    x: str = "prompt length in tokens"
    level: float | None = None


PERPLEXITY = Charted(
    "Perplexity against the length read at once", "perplexity", number, None, "tokens read at once"
)
PASSKEYS = Charted("Passkeys found, by prompt length", "share of passkeys found", top=1)
RULER = Charted("RULER", "RULER score", top=1, x="tokens of prompt and answer")
RECALL = Charted("Associative recall", "share of questions answered", top=1, x="tokens of the text")


def line_label(cell: Figure) -> str:
    """The name of the line that a cell belongs to."""
    if cell.scaling == "none":
        return cell.model
    if cell.scaling == SHORT:
        return f"{cell.model}, last {cell.length} tokens only"
    factor = f" ({cell.factor:g})" if cell.factor else ""
    return f"{cell.model} + {SCALING_NAMES.get(cell.scaling, cell.scaling)}{factor}"


def frame_of(cells: Sequence[Figure]) -> Frame:
    """A frame, in the order of the page: the last tokens alone at every length, means of seeds."""
    rows = []
    plain = sorted({cell.length for cell in cells if cell.scaling != SHORT})
    for cell in cells:
        last = cell.scaling == SHORT
        low, high = cell.interval or (math.nan, math.nan)
        row = {
            "line": line_label(cell),
            "model": cell.model,
            "scaling": cell.scaling,
            "kind": f"{cell.kind} pairs" if isinstance(cell.kind, int) else cell.kind,
            "size": cell.size,
            "seed": cell.training_seed,
            "y": math.inf if cell.value is None else cell.value,
            "low": low,
            "high": high,
            "colour": cell.model,
            "dash": "2 3" if last else STYLES.get(cell.scaling, "6 3"),
            "mark": "line" if last else "both",
            "first": cell.scaling == "none",
            "cell": cell,
        }
        rows += [row | {"x": x} for x in (plain if last and plain else [cell.length])]
    frame: Frame = pd.DataFrame(rows)
    kinds = [*STYLES, *(kind for kind in frame["scaling"].unique() if kind != SHORT), SHORT]
    place = frame["scaling"].map(kinds.index)
    model, line = (frame[name].factorize()[0] for name in ("model", "line"))
    return _one_a_place(frame.iloc[np.lexsort((frame["x"], line, place, model))])


def _one_a_place(frame: Frame) -> Frame:
    """A row for every line and length: the mean of its seeds, with their range as interval."""
    place = ["size", "kind", "line", "x"]
    first = frame.drop_duplicates(place)
    seeds = frame.groupby(place)["seed"].nunique().rename("seeds")
    first = first.join(seeds, on=place)
    once = frame.merge(first.loc[first["seeds"] < 2, [*place, "y", "cell"]], on=place)
    # Two evaluations of a model can share a cell, such as that of the last tokens.
    for row in once[once["y_x"] != once["y_y"]].itertuples():
        files = " and ".join(dict.fromkeys([row.cell_y.file, row.cell_x.file])) or "the results"
        raise UserError(
            f"{files}: {row.model} ({row.scaling}) at {row.x} tokens twice with different "
            "figures; give one of them, or evaluate with --name"
        )
    several = frame.join(seeds, on=place).query("seeds > 1").groupby(place)["y"]
    first = first.set_index(place)
    first.update(several.agg(y="mean", low="min", high="max"))
    return first.reset_index()


def length_section(
    frame: Frame, measure: Charted, *, text: str = "", title: str = "", bars: bool = True
) -> Section:
    """The section of a frame whose lines have one figure a length."""
    best = frame.groupby("x")["y"].agg("max" if measure.top else "min").map(measure.form)
    several, entries = frame["line"].nunique() > 1, []
    for row in frame.itertuples():
        shown = measure.form(row.y)
        ends = "" if math.isnan(row.low) else f"{measure.form(row.low)} to {measure.form(row.high)}"
        entries.append(Entry(shown, ends, several and shown == best[row.x]))
    trained = trained_length(frame)
    chart = LineChart(
        frame,
        measure.x,
        measure.name + ("" if measure.top else " (lower is better)"),
        ticks=lengths_of(frame),
        log_y=not measure.top,
        top=measure.top,
        level=measure.level,
        mark=(trained, "training context") if trained else None,
        bars=bars,
    )
    table = length_table(frame, f"{measure.name} at", entries)
    kinds = frame.drop_duplicates("line")["scaling"]
    muted = [place for place, kind in enumerate(kinds) if kind == SHORT]
    heading = title or measure.title
    return Section(
        heading, finding(frame, measure), text, chart, *table, conditions(frame), muted=muted
    )


def finding(frame: Frame, measure: Charted) -> str:
    """Who is best at the longest length where any model has a figure, and what the others have."""
    plain = without_short(frame)
    plain = plain[np.isfinite(plain["y"])]
    if plain.empty:
        return f"No model has a finite {measure.name}."
    found = plain[plain["y"] > 0] if measure.top else plain
    length = int((plain if found.empty else found)["x"].max())
    far = plain[plain["x"] == length]
    far = far.assign(shown=far["y"].map(measure.form))
    best = best_lines(far, measure)
    others = far[~far["shown"].isin(best["shown"])]["y"]
    # At its training length, scaling does not make a model better.
    best = best.drop_duplicates(["model", "shown"])
    names, shown = best["line"].tolist(), best["shown"].unique().tolist()
    where, figure = at_tokens(frame, length), shown[0]
    if others.empty and len(shown) == 1:
        who = f"{names[0]} has" if len(far) == 1 else "all have"
        return f"{where} {who} a {measure.name} of {figure}."
    who = enumeration(names) if len(names) < 4 else f"{len(names)} of {len(far)} models"
    which = f"{'has' if len(names) == 1 else 'have'} the {'highest' if measure.top else 'lowest'}"
    said = f"{where} {who} {which} {measure.name}, {figure}"
    if len(shown) > 1:
        figures = enumeration(shown) if len(names) < 4 else f"{shown[0]} to {shown[-1]}"
        said = f"{where} {who} are level, {measure.name} {figures}"
    if others.empty:
        return f"{said}."
    return f"{said}; the other{'s' if len(others) > 1 else ''} {span(others, measure.form)}."


def best_lines(far: Frame, measure: Charted) -> Frame:
    """The lines of a length with the best figure as shown; with documents, those level with it.

    They are level if the 95 % interval of the ratio of perplexities on the same documents has 1.
    """
    best = measure.form(far["y"].max() if measure.top else far["y"].min())
    # Stable, so that equal figures stay in the order of the page.
    far = far.sort_values("y", ascending=not measure.top, kind="stable")
    scores = [[each.score for each in getattr(cell, "documents", ())] for cell in far["cell"]]
    if (far["seeds"] > 1).any() or not all(len(each) > 1 for each in scores):
        return far[far["shown"] == best]
    lows = [(paired_ratio_interval(each, scores[0]) or (1, 1))[0] for each in scores]
    return far[[low <= 1 for low in lows]]


def conditions(frame: Frame) -> str:
    """What was scored or asked, and what the intervals are of."""
    plain = without_short(frame)
    cells = (frame if plain.empty else plain)["cell"].tolist()
    if cells[0].conditions:
        return f"{cells[0].conditions}."
    if (frame["seeds"] > 1).any():
        return f"Small: ranges of the {span(frame['seeds'])} seeds of each mean."
    if samples := [len(cell.samples) for cell in cells if isinstance(cell, Prompts)]:
        chat = ", in the chat template" if getattr(cells[0], "chat", False) else ""
        if (thinking := getattr(cells[0], "thinking", "default")) != "default":
            chat += f", thinking {thinking}"
        count = f"; {span(samples)} prompts each{chat}" if min(samples) else ""
        return f"Small: Wilson’s 95 % intervals{count}."
    scored = [cell for cell in cells if isinstance(cell, Perplexity) and cell.documents]
    if not scored:
        return ""
    count = min(len(cell.documents) for cell in scored)
    few = f", fewer than {FEW_DOCUMENTS}: intervals are rough" if count < FEW_DOCUMENTS else ""
    known = {
        "targets": enumeration(sorted({cell.targets for cell in scored if cell.targets})),
        "stride": span(cell.stride for cell in scored if cell.stride),
        "tokens scored at every length": span(cell.tokens for cell in scored if cell.tokens),
    }
    facts = "; ".join(f"{name}: {said}" for name, said in known.items() if said)
    return f"Small: 95 % intervals over documents ({count}{few}). {facts.capitalize()}."


def length_table(frame: Frame, what: str, entries: Sequence[str | Entry]) -> Table:
    """A row for every line, a column for every length, of the entries of a frame's rows."""
    lengths, lines = lengths_of(frame), frame["line"].unique().tolist()
    table: Frame = frame.assign(entry=entries).pivot(index="line", columns="x", values="entry")
    rows = table.reindex(lines, columns=lengths).fillna("–").itertuples()
    trained = trained_length(frame)
    names = [Entry(f"{n:,}", f"{times(n / trained)} ×" if trained else "") for n in lengths]
    return [what, *names], [[*row] for row in rows]


def without_short(frame: Frame) -> Frame:
    """The rows of all texts read, and not of the last tokens alone."""
    return frame[frame["scaling"] != SHORT]


def lengths_of(frame: Frame) -> list[int]:
    """The lengths of a frame, the shortest first."""
    return sorted(frame["x"].unique().tolist())


def trained_length(frame: Frame) -> int | None:
    """The training length, if all models share one."""
    lengths = {cell.training_length for cell in frame["cell"]}
    return lengths.pop() if len(lengths) == 1 else None


def at_tokens(frame: Frame, size: int) -> str:
    """``At 512 tokens (4 × the training context)``, if all models share one."""
    trained = trained_length(frame)
    if not trained:
        return f"At {size:,} tokens"
    factor = "" if size == trained else f"{times(size / trained)} × "
    return f"At {size:,} tokens ({factor}the training context)"


def by_kind(frame: Frame, measure: Charted, *, bars: bool = True) -> list[Section]:
    """A section for every size and kind of figures."""
    sections = []
    for names, part in frame.groupby(["kind", "size"], sort=False):
        title = ", ".join(filter(None, (measure.title, *names)))
        sections.append(length_section(part, measure, title=title, bars=bars))
    return sections


def pooled(frame: Frame) -> Frame:
    """A frame of the means over all prompts of several kinds, or lengths, of a line."""
    prompts = [len(cell.samples) or 1 for cell in frame["cell"]]
    sums = frame.assign(prompts=prompts, hits=frame["y"] * prompts)
    sums = sums.groupby(["line", "x"])[["hits", "prompts"]].sum()
    first = frame.drop_duplicates(["line", "x"]).join(sums, on=["line", "x"])
    ends = [wilson_interval(h, n) for h, n in zip(first["hits"], first["prompts"], strict=True)]
    low, high = zip(*ends, strict=True)
    return first.assign(y=first["hits"] / first["prompts"], low=low, high=high)


def by_distance(frame: Frame) -> Frame:
    """A frame of the share of hits by the tokens to the end of the prompt, in octaves."""
    rows = []
    for row in frame.to_dict("records"):
        for sample in row["cell"].samples:
            if sample.distance:
                cell = row["cell"].model_copy(update={"samples": [sample]})
                octave = 1 << (sample.distance - 1).bit_length()
                rows.append(row | {"cell": cell, "x": octave, "y": float(sample.hit)})
    return pooled(pd.DataFrame(rows)) if rows else frame.head(0)


def passkey_sections(cells: Sequence[Figure]) -> list[Section]:
    """By prompt length; and by distance, as in the paper's Figure 5."""
    frame = frame_of(cells)
    sections = by_kind(frame, PASSKEYS)
    away = by_distance(frame) if len(sections) == 1 else frame.head(0)
    if not away["y"].any():
        return sections
    measure = replace(PASSKEYS, title="Passkeys found, by distance", x="distance in tokens, up to")
    section = length_section(away, measure)
    note = "Small: Wilson’s 95 % intervals of all prompts."
    return [*sections, replace(section, lead="", chart=None, note=note, printed=False)]


def ruler_sections(cells: Sequence[Figure]) -> list[Section]:
    """The mean score over the tasks that all have, against the length; and every task's."""
    frame = frame_of(cells)
    one, *others = frame["kind"].unique()
    sections = by_kind(frame, RULER if others else replace(RULER, name=f"RULER score of {one}"))
    shared = set.intersection(*frame.groupby(["line", "x"])["kind"].agg(set))
    if len(sections) > 1 and shared and frame["size"].nunique() == 1:
        mean = replace(RULER, name=f"mean RULER score of {len(shared)} tasks")
        frame = pooled(frame[frame["kind"].isin(shared)])
        sections = [length_section(frame, mean), *sections]
    return [_with_kept(sections[0]), *sections[1:]]


def _with_kept(section: Section) -> Section:
    """The section with a column of the longest length up to which a line keeps `SHARE`."""
    if section.chart is None:
        return section
    lines = section.chart.points.groupby("line", sort=False)
    rows = [[*row, _kept(lines.get_group(row[0]))] for row in section.rows]
    note = (
        f"{SHARE:.0%} of the score at the training context, or if it was not measured at the "
        "longest length below it, else at the shortest."
    )
    header = [*section.header, f"keeps {SHARE:.0%} up to"]
    return replace(section, header=header, rows=rows, note=f"{section.note} {note}")


def _kept(line: Frame) -> str:
    """The longest length up to which a model keeps `SHARE` of its score at its training length."""
    scores, trained = line.set_index("x")["y"].sort_index(), trained_length(line) or 0
    first = max([n for n in scores.index if n <= trained], default=scores.index[0])
    if not scores[first]:
        return "–"
    kept = (scores.loc[first:] >= SHARE * scores[first]).cummin()
    last = kept[kept].index[-1]
    return f"≥ {last:,}" if last == scores.index[-1] else f"{last:,}"


def recall_sections(cells: Sequence[Figure]) -> list[Section]:
    """Right answers, for every number of pairs."""
    return by_kind(frame_of(cells), RECALL)
