"""Where the attention of a passkey's answer goes, from ``coca analyze --passkeys``."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from coca_attention.errors import UserError
from coca_lab.report.figures import FAINT, colours, draw
from coca_lab.report.groups import differ
from coca_lab.report.section import Entry, Section, Table

Cell = dict[str, Any]
Cells = dict[int, Cell]
"""The cells of one model by prompt length."""
RETRIEVES = 0.25
"""Share on the line with the key from which a head is named in the table."""
LARGEST_TABLE = 6
"""Heads named per model."""
DASHES = ("-", "--", "-.", ":")


def attention_sections(cells: Sequence[Cell]) -> list[Section]:
    """Heat maps of the share on the key, entropy against length, and the heads that retrieve."""
    models = _by_model(cells)
    sections = [
        Section(
            f"Attention of the answer to the line with the key: {model}",
            _share_text(model, found),
            share_map(found, f"attention-{index}"),
        )
        for index, (model, found) in enumerate(models.items())
    ]
    sections.append(
        Section(
            "Entropy of the answer’s attention",
            "Means over the heads of one kind. A head whose attention spreads evenly over all n "
            "keys follows ln n, the grey line.",
            entropy_figure(models),
        )
    )
    header, rows = retrieval_table(models)
    sections.append(
        Section(
            "Heads that retrieve",
            header=header,
            rows=rows,
            note="Attention of the positions that predict the key’s digits, with the right answer "
            f"given up to there. Named are the heads (at most {LARGEST_TABLE} a model) with at "
            f"least {RETRIEVES:.0%} on the line with the key at some length, or else the one that "
            "has most. On digit: on the two mentions of the digit to predict; before digit: on the "
            "tokens before these. Elsewhere: the largest weight outside of that line and its "
            "median distance in tokens. Small: 95 % intervals over prompts (Student’s t).",
        )
    )
    return sections


def attention_tables(cells: Sequence[Cell]) -> list[Table]:
    """For the terminal: the share on the line with the key by head and prompt length."""
    tables: list[Table] = []
    for model, found in _by_model(cells).items():
        rows = [["digits right", *(f"{c['digits_right']['mean']:.2f}" for c in found.values())]]
        for place, head in _retrieving(found):
            layers = [cell["layers"][place] for cell in found.values()]
            shares = [f"{layer['heads'][head]['fact']['mean']:.2f}" for layer in layers]
            rows.append([_head_name(layers[0], head), *shares])
        header = [f"{model}: attention to the key’s line at", *(f"{n:,}" for n in found)]
        tables.append((header, rows))
    return tables


def retrieval_table(models: dict[str, Cells]) -> tuple[list[str], list[list[str | Entry]]]:
    """Header and rows: one row per retrieving head and prompt length."""
    near = {cell["near"] for found in models.values() for cell in found.values()}
    trained = {cell["training_length"] for found in models.values() for cell in found.values()}
    header = ["head", "prompt", "digits right", "on the key’s line", "on digit", "before digit"]
    header += [
        f"nearest {_one(near, 'tokens')}",
        f"last {_one(trained, 'training length')}",
        "entropy of ln n",
        "elsewhere",
    ]
    rows: list[list[str | Entry]] = []
    for model, found in models.items():
        for place, head in _retrieving(found):
            for length, cell in found.items():
                layer = cell["layers"][place]
                values = layer["heads"][head]
                rows.append(
                    [
                        Entry(f"{model}, layer {layer['layer']}, head {head}", _role(layer)),
                        f"{length:,}",
                        f"{cell['digits_right']['mean']:.2f}",
                        _entry(values["fact"]),
                        _entry(values["digit"]),
                        _entry(values["before_digit"]),
                        _entry(values["near"]),
                        _entry(values["trained"]) if "trained" in values else "–",
                        f"{values['entropy']['mean']:.2f} of {layer['log_keys']:.2f}",
                        f"{values['peak']['mean']:.2f} at {values['peak_distance']:,.0f}",
                    ]
                )
    return header, rows


def share_map(found: Cells, name: str) -> dict[str, str]:
    """Share on the line with the key: a row per head, a column per prompt length."""
    lengths, layers = list(found), next(iter(found.values()))["layers"]
    columns = [[h["fact"]["mean"] for x in c["layers"] for h in x["heads"]] for c in found.values()]
    shares = [list(row) for row in zip(*columns, strict=True)]
    counts = [len(layer["heads"]) for layer in layers]
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]

    def plot(axes: Axes) -> None:
        mesh = axes.pcolormesh(
            shares, cmap=colormaps["cividis"], vmin=0.0, vmax=1.0, edgecolor="face", lw=0.3
        )
        axes.grid(False)
        axes.invert_yaxis()
        for end in ends[:-1]:
            axes.axhline(end, color="white", lw=1)
        names = [f"{n:,}" for n in lengths]
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], names, rotation=30)
        middles = [end - count / 2 for end, count in zip(ends, counts, strict=True)]
        axes.set_yticks(middles, [f"layer {x['layer']}\n{_role(x)}" for x in layers])
        axes.set_xlabel("prompt length in tokens")
        axes.set_ylabel("heads by layer")
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(mesh, ax=axes, label="share of attention on the line with the key")

    return draw(name, plot)


def entropy_figure(models: dict[str, Cells]) -> dict[str, str]:
    """Entropy against the prompt length: a line per model and kind of layer, and ln n."""
    colour = colours(models)
    widest: dict[int, float] = {}

    def plot(axes: Axes) -> None:
        for model, found in models.items():
            lines: dict[str, dict[int, list[float]]] = {}
            for length, cell in found.items():
                for layer in cell["layers"]:
                    widest[length] = max(widest.get(length, 0.0), layer["log_keys"])
                    line = lines.setdefault(_role(layer), {}).setdefault(length, [])
                    line += [head["entropy"]["mean"] for head in layer["heads"]]
            for index, (role, line) in enumerate(lines.items()):
                axes.plot(
                    list(line),
                    [sum(values) / len(values) for values in line.values()],
                    label=f"{model}, {role}",
                    color=colour[model],
                    ls=DASHES[index % len(DASHES)],
                    marker="o",
                    ms=4,
                    lw=1.6,
                )
        lengths = sorted(widest)
        axes.plot(lengths, [widest[n] for n in lengths], label="ln n", color=FAINT, lw=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prompt length in tokens")
        axes.set_ylabel("entropy (nats)")

    return draw("entropy", plot)


def _by_model(cells: Sequence[Cell]) -> dict[str, Cells]:
    models: dict[str, Cells] = {}
    for cell in cells:
        other = models.setdefault(cell["model"], {}).setdefault(cell["length"], cell)
        if differ(cell, other):
            raise UserError(f"the results hold {cell['model']} at {cell['length']} tokens twice")
    return {model: dict(sorted(found.items())) for model, found in models.items()}


def _retrieving(found: Cells) -> list[tuple[int, int]]:
    """Heads to name, each as its layer's place and its number, the largest share first."""
    largest: dict[tuple[int, int], float] = {}
    for cell in found.values():
        for place, layer in enumerate(cell["layers"]):
            for head, values in enumerate(layer["heads"]):
                share = values["fact"]["mean"]
                largest[place, head] = max(share, largest.get((place, head), 0.0))
    order = sorted(largest, key=lambda where: -largest[where])
    named = [where for where in order[:LARGEST_TABLE] if largest[where] >= RETRIEVES]
    return named or order[:1]


def _share_text(model: str, found: Cells) -> str:
    cells = list(found.values())
    right = ", ".join(f"{c['digits_right']['mean']:.2f} at {c['length']:,}" for c in cells)
    heads = []
    for place, head in _retrieving(found):
        shares = [c["layers"][place]["heads"][head]["fact"]["mean"] for c in cells]
        name = _head_name(cells[0]["layers"][place], head)
        heads.append(f"{name}: {', '.join(f'{share:.2f}' for share in shares)}")
    return (
        f"{model}, {cells[0]['prompts']} prompts per length. Share of the key’s digits that it "
        f"predicts: {right}. Largest shares on the line with the key: {'; '.join(heads)}."
    )


def _head_name(layer: dict[str, Any], head: int) -> str:
    return f"layer {layer['layer']}, head {head} ({_role(layer)})"


def _role(layer: dict[str, Any]) -> str:
    where = "global" if layer["window"] is None else f"local {layer['window']}"
    return f"{where}, {layer['attention']}"


def _entry(value: dict[str, Any]) -> Entry:
    interval = value["interval95"]
    small = "" if interval is None else "{:.2f} to {:.2f}".format(*interval)
    return Entry(f"{value['mean']:.2f}", small)


def _one(values: set[int | None], otherwise: str) -> str:
    """The number that all cells share."""
    return f"{values.pop():,}" if len(values) == 1 and None not in values else otherwise
