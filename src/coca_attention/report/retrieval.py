"""Passkey and needle results as sections of a report: tables and figures of the paper's shapes."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from coca_attention.errors import UserError
from coca_attention.evaluation.generation import wilson_interval
from coca_attention.report import paper
from coca_attention.report.figures import COLOURS, DASHES, draw
from coca_attention.report.results import SCALING_NAMES

Key = tuple[str, str, float | None]


@dataclass(frozen=True)
class Section:
    """A heading, and below it what there is of text, a figure, a table, and a note."""

    title: str
    text: str = ""
    figure: dict[str, str] | None = None
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


def line_label(key: Key) -> str:
    """How a model with a scaling is called."""
    model, kind, factor = key
    if kind == "none":
        return model
    return f"{model} + {SCALING_NAMES.get(kind, kind)} ({factor:g})"


def by_line(cells: Iterable[dict[str, Any]]) -> dict[Key, dict[int, dict[str, Any]]]:
    """Cells by model and scaling, then by prompt length, in the order of their appearance.

    Raises:
        UserError: If two cells claim one place.
    """
    lines: dict[Key, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        key = (cell["model"], cell["scaling"], cell.get("factor"))
        line = lines.setdefault(key, {})
        if cell["length"] in line and line[cell["length"]] != cell:
            raise UserError(
                f"the results hold {line_label(key)} at {cell['length']} tokens twice; give result "
                "files of different models or settings"
            )
        line[cell["length"]] = cell
    models = list(dict.fromkeys(model for model, _, _ in lines))
    return dict(sorted(lines.items(), key=lambda item: models.index(item[0][0])))


def accuracy_table(
    lines: dict[Key, dict[int, dict[str, Any]]], value: str
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row a line, a column a length, each figure with its interval."""
    lengths = sorted({length for line in lines.values() for length in line})
    rows = []
    for key, line in lines.items():
        entries = [f"{line[length][value]:.2f}" if length in line else "–" for length in lengths]
        rows.append([line_label(key), *entries])
    return [f"{length:,}" for length in lengths], rows


def retrieval_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """Sections for the passkey and needle cells among results; none without such cells."""
    passkey = by_line(cell for cell in cells if cell["task"] == "passkey")
    sections = _passkey_sections(passkey) if passkey else []
    needles = [cell for cell in cells if cell["task"] == "needles"]
    for kind in dict.fromkeys(cell["kind"] for cell in needles):
        lines = by_line(cell for cell in needles if cell["kind"] == kind)
        header, rows = accuracy_table(lines, "recall")
        sections.append(
            Section(
                f"Needles: {kind}",
                figure=_accuracy_figure(f"needles-{kind}", lines, "recall", "mean recall"),
                header=["prompt length in tokens", *header],
                rows=rows,
                note="Mean share of the asked-for facts that the answer holds.",
            )
        )
    return sections


def key_table(cells: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of perplexity on key tokens: a row a model and scaling, a column a window."""
    found = {
        ((c["model"], c["scaling"], c.get("factor")), c["window"]): c["key_perplexity"]
        for c in cells
        if c["scaling"] != "attend-last"
    }
    windows = sorted({window for _, window in found})
    rows = []
    for key in dict.fromkeys(key for key, _ in found):
        values = [found.get((key, window)) for window in windows]
        rows.append([line_label(key), *("–" if v is None else f"{v:.1f}" for v in values)])
    return ["key tokens: perplexity at", *(f"{window:,}" for window in windows)], rows


def position_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """Perplexity by tokens read and on key tokens, where they were measured."""
    sections = []
    placed = [cell for cell in cells if cell.get("by_position")]
    for window in sorted({cell["window"] for cell in placed}):
        here = [cell for cell in placed if cell["window"] == window]
        ranges = here[0]["by_position"]
        rows = []
        for cell in here:
            key = (cell["model"], cell["scaling"], cell.get("factor"))
            means = [
                None if b["nats"] is None or not b["tokens"] else b["nats"] / b["tokens"]
                for b in cell["by_position"]
            ]
            rows.append(
                [line_label(key), *("–" if m is None else f"{math.exp(m):.1f}" for m in means)]
            )
        sections.append(
            Section(
                f"Perplexity by position, window {window:,}",
                header=[
                    "tokens read before",
                    *(f"{b['first']:,} to {b['last']:,}" for b in ranges),
                ],
                rows=rows,
            )
        )
    keyed = [cell for cell in cells if cell.get("key_tokens")]
    if keyed:
        header, rows = key_table(keyed)
        sections.append(
            Section(
                "Perplexity on key tokens",
                text="Tokens that an evaluator predicts from far away only, after LongPPL.",
                header=header,
                rows=rows,
                note=f"{keyed[0]['key_tokens']:,} tokens.",
            )
        )
    return sections


def _passkey_sections(lines: dict[Key, dict[int, dict[str, Any]]]) -> list[Section]:
    header, rows = accuracy_table(lines, "accuracy")
    samples = {len(cell["samples"]) for line in lines.values() for cell in line.values()}
    count = " to ".join(f"{n}" for n in sorted({min(samples), max(samples)}))
    sections = [
        Section(
            "Passkeys found, by prompt length",
            figure=_accuracy_figure("passkey", lines, "accuracy", "share of passkeys found"),
            header=["prompt length in tokens", *header],
            rows=rows,
            note=f"{count} prompts each; shaded: Wilson's 95 % interval, for the lines without "
            "scaling.",
        ),
        Section(
            "The paper’s figures (its Table 2, training from scratch)",
            header=["prompt length in tokens", *(f"{n:,}" for n in paper.TABLE_1_WINDOWS)],
            rows=[[label, *values] for label, values in paper.TABLE_2.items()],
            note="350 million parameters, training length 512, 100 prompts each.",
        ),
    ]
    trained = {cell["training_length"] for line in lines.values() for cell in line.values()}
    if len(trained) == 1 and (length := trained.pop()):
        sections += _distance_sections(lines, length)
    sections.append(_depth_section(lines))
    return sections


def _distance_sections(lines: dict[Key, dict[int, dict[str, Any]]], trained: int) -> list[Section]:
    """The shapes of the paper's Figures 4 and 5."""
    sections = []
    for name, title, keep in (
        ("near", f"Passkeys at most {trained:,} tokens from the end", lambda d: d <= trained),
        ("far", f"Passkeys more than {trained:,} tokens from the end", lambda d: d > trained),
    ):
        shares = {key: _shares(line, keep) for key, line in lines.items()}
        if not any(hits for line in shares.values() for hits in line.values()):
            continue
        lengths = sorted({n for line in shares.values() for n in line})
        sections.append(
            Section(
                title,
                text="The shape of the paper’s Figure 4: keys inside and outside the training "
                "length, counted from the end of the prompt.",
                figure=_share_figure(f"passkey-{name}", shares),
                header=["prompt length in tokens", *(f"{n:,}" for n in lengths)],
                rows=[
                    [line_label(key), *(_share_text(line.get(n)) for n in lengths)]
                    for key, line in shares.items()
                ],
            )
        )
    edges = distance_edges(lines, trained)
    ranges = list(pairwise(edges))
    header = [f"{low + 1:,} to {high:,}" for low, high in ranges]
    rows = []
    for key, line in lines.items():
        records = [record for cell in line.values() for record in cell["samples"]]
        entries = []
        for low, high in ranges:
            hits = [r["hit"] for r in records if low < r["distance"] <= high]
            entries.append(_share_text((sum(hits), len(hits)) if hits else None))
        rows.append([line_label(key), *entries])
    sections.append(
        Section(
            "Passkeys found, by distance",
            text="The shape of the paper’s Figure 5: all prompt lengths together, by the tokens "
            "between the key and the end of the prompt.",
            header=["distance in tokens", *header],
            rows=rows,
            note="Hits of trials in each range, Wilson’s 95 % interval behind.",
        )
    )
    return sections


def distance_edges(lines: dict[Key, dict[int, dict[str, Any]]], trained: int) -> list[int]:
    """Edges of four ranges: the training length, and three equal ratios beyond it."""
    longest = max(
        record["distance"]
        for line in lines.values()
        for cell in line.values()
        for record in cell["samples"]
    )
    if longest <= trained:
        return [0, longest]
    ratio = (longest / trained) ** (1 / 3)
    inner = [round(trained * ratio**i) for i in (1, 2)]
    return sorted({0, trained, *inner, longest})


def _depth_section(lines: dict[Key, dict[int, dict[str, Any]]]) -> Section:
    quarters = ["first quarter", "second", "third", "last quarter"]
    rows = []
    for key, line in lines.items():
        records = [record for cell in line.values() for record in cell["samples"]]
        entries = []
        for quarter in range(4):
            hits = [r["hit"] for r in records if min(int(4 * r["depth"]), 3) == quarter]
            entries.append(_share_text((sum(hits), len(hits)) if hits else None))
        rows.append([line_label(key), *entries])
    return Section(
        "Passkeys found, by depth",
        header=["place in the prompt", *quarters],
        rows=rows,
        note="All prompt lengths together.",
    )


def _shares(
    line: dict[int, dict[str, Any]], keep: Callable[[int], bool]
) -> dict[int, tuple[int, int]]:
    """Hits and trials of every length, of the samples whose distance is kept."""
    shares = {}
    for length, cell in sorted(line.items()):
        hits = [record["hit"] for record in cell["samples"] if keep(record["distance"])]
        if hits:
            shares[length] = (sum(hits), len(hits))
    return shares


def _share_text(share: tuple[int, int] | None) -> str:
    if share is None:
        return "–"
    hits, trials = share
    low, high = wilson_interval(hits, trials) or (math.nan, math.nan)
    return f"{hits / trials:.2f} ({hits}/{trials}; {low:.2f}–{high:.2f})"


def _accuracy_figure(
    name: str, lines: dict[Key, dict[int, dict[str, Any]]], value: str, label: str
) -> dict[str, str]:
    points = {
        key: {
            length: (cell[value], cell["wilson95"] if value == "accuracy" else None)
            for length, cell in sorted(line.items())
        }
        for key, line in lines.items()
    }
    return _figure(name, points, label)


def _share_figure(name: str, shares: dict[Key, dict[int, tuple[int, int]]]) -> dict[str, str]:
    points = {
        key: {
            length: (hits / trials, wilson_interval(hits, trials))
            for length, (hits, trials) in line.items()
        }
        for key, line in shares.items()
    }
    return _figure(name, points, "share of passkeys found")


def _figure(
    name: str, points: dict[Key, dict[int, tuple[float, Any]]], label: str
) -> dict[str, str]:
    """Shares against prompt length, with bands for the lines without scaling."""
    models = list(dict.fromkeys(model for model, _, _ in points))
    lengths = sorted({length for line in points.values() for length in line})

    def plot(axes: Axes) -> None:
        for key, line in points.items():
            colour = COLOURS[models.index(key[0]) % len(COLOURS)]
            x = list(line)
            axes.plot(
                x,
                [line[length][0] for length in x],
                label=line_label(key),
                color=colour,
                ls=DASHES[key[1]],
                marker="o",
                ms=4,
                lw=1.8,
            )
            if key[1] == "none" and all(line[length][1] for length in x):
                axes.fill_between(
                    x,
                    [line[length][1][0] for length in x],
                    [line[length][1][1] for length in x],
                    color=colour,
                    alpha=0.08,
                    lw=0,
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("prompt length in tokens")
        axes.set_ylabel(label)

    return draw(name, plot)
