"""Where the attention of a passkey's answer goes, from ``coca analyze --passkeys``."""

from collections.abc import Sequence
from typing import Any

from coca_attention.errors import UserError
from coca_lab.report.charts import HeatMap, Line, LineChart
from coca_lab.report.results import Cell, differ
from coca_lab.report.section import Entry, Section, Table

Cells = dict[int, Cell]
"""The cells of one model by prompt length."""
RETRIEVES = 0.25
"""Share on the line with the key from which a head is named in the table."""
LARGEST_TABLE = 6
"""Heads named per model."""
DASHES = ((), (6, 3), (9, 3, 2, 3), (2, 3))


def attention_sections(cells: Sequence[Cell]) -> list[Section]:
    """Heat maps of the share on the key, entropy against length, and the heads that retrieve."""
    models = _by_model(cells)
    sections = [
        Section(
            f"Attention of the answer to the line with the key: {model}",
            lead=_lead(model, found),
            text=_share_text(model, found),
            chart=share_map(found),
        )
        for model, found in models.items()
    ]
    text = (
        "Means over the heads of one kind. A head whose attention spreads evenly over all n keys "
        "follows ln n, the grey line."
    )
    title = "Entropy of the answer’s attention"
    sections.append(Section(title, text=text, chart=entropy_chart(models)))
    header, rows = retrieval_table(models)
    note = (
        "Attention of the positions that predict the key’s digits, with the right answer given up "
        f"to there. Named are the heads (at most {LARGEST_TABLE} a model) with at least "
        f"{RETRIEVES:.0%} on the line with the key at some length, or else the one that has most. "
        "On digit: on the two mentions of the digit to predict; before digit: on the tokens before "
        "these. Elsewhere: the largest weight outside of that line and its median distance in "
        "tokens. Small: 95 % intervals over prompts (Student’s t)."
    )
    return [*sections, Section("Heads that retrieve", header=header, rows=rows, note=note)]


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
                        *(_entry(values[n]) for n in ("fact", "digit", "before_digit", "near")),
                        _entry(values["trained"]) if "trained" in values else "–",
                        f"{values['entropy']['mean']:.2f} of {layer['log_keys']:.2f}",
                        f"{values['peak']['mean']:.2f} at {values['peak_distance']:,.0f}",
                    ]
                )
    return header, rows


def share_map(found: Cells) -> HeatMap:
    """Share on the line with the key: a row per head, a column per prompt length."""
    layers = next(iter(found.values()))["layers"]
    columns = [[h["fact"]["mean"] for x in c["layers"] for h in x["heads"]] for c in found.values()]
    heads = [_head_name(layer, head) for layer in layers for head in range(len(layer["heads"]))]
    return HeatMap(
        ("prompt length in tokens", [f"{length:,}" for length in found]),
        ("head", heads),
        [list(row) for row in zip(*columns, strict=True)],
        "share of attention on the line with the key",
        top=1.0,
    )


def entropy_chart(models: dict[str, Cells]) -> LineChart:
    """Entropy against the prompt length: a line per model and kind of layer, and ln n."""
    widest: dict[int, float] = {}
    drawn = []
    for model, found in models.items():
        lines: dict[str, dict[int, list[float]]] = {}
        for length, cell in found.items():
            for layer in cell["layers"]:
                widest[length] = max(widest.get(length, 0.0), layer["log_keys"])
                line = lines.setdefault(_role(layer), {}).setdefault(length, [])
                line += [head["entropy"]["mean"] for head in layer["heads"]]
        for index, (role, line) in enumerate(lines.items()):
            means = [sum(values) / len(values) for values in line.values()]
            dash = DASHES[index % len(DASHES)]
            drawn.append(Line(f"{model}, {role}", list(line), means, colour=model, dash=dash))
    lengths = sorted(widest)
    drawn.append(Line("ln n", lengths, [widest[n] for n in lengths], dotted=False))
    return LineChart(drawn, "prompt length in tokens", "entropy (nats)", ticks=lengths)


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


def _lead(model: str, found: Cells) -> str:
    place, head = _retrieving(found)[0]
    length, cell = list(found.items())[-1]
    layer = cell["layers"][place]
    share = layer["heads"][head]["fact"]["mean"]
    return (
        f"{model}: layer {layer['layer']}, head {head} puts {share:.0%} of the answer’s attention "
        f"on the line with the key at {length:,} tokens."
    )


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
