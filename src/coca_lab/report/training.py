"""Training runs in the report: validation perplexity, losses, speed, sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.section import Section, enumeration, signed

UNITS = {
    "next_token": "training loss (nats per token)",
    "logits": "distance from the teacher’s prediction (nats per token)",
    "hidden_states": "distance from the teacher’s prediction (nats) and hidden states",
    "attention": "attention outputs: share of the teacher’s variance not explained",
}
MEASURES = {
    "learning_rate": ("Learning rate", "learning rate", "Largest learning rate"),
    "grad_norm": ("Gradient norm", "gradient norm before clipping", "Largest gradient norm"),
    "tokens_per_second": ("Throughput", "tokens per second", "Most tokens per second"),
}
"""Fields of a curve besides the loss: title, axis, and what the lead says."""
TOKENS = "tokens trained on (millions)"
# A converted model has recovered at 1 % and 0.5 % more perplexity than its start.
NEAR = (0.01, 0.005)
Run = dict[str, Any]


def training_sections(runs: Sequence[Run]) -> list[Section]:
    """Curves and a table of training runs, contents of ``training.json`` with a ``name``."""
    if not runs:
        return []
    sections = [*_validation(runs), *_retrieval(runs)]
    for objective, unit in UNITS.items():  # losses of different objectives are not comparable
        title = "Training" if objective == "next_token" else f"Training: {objective}"
        chosen = {run["name"]: _of_objective(run, objective) for run in runs}
        sections += _curves(runs, chosen, "loss", title, unit, "Lowest training loss at the end")
    for field, (title, unit, what) in MEASURES.items():
        chosen = {
            run["name"]: [e for e in run["curve"] if e.get(field) is not None] for run in runs
        }
        sections += _curves(runs, chosen, field, f"{title} in training", unit, what)
    return [*sections, _table(runs)]


def _points(run: Run, entries: Sequence[dict[str, Any]], field: str) -> Frame:
    """Values by tokens, without step 0: before any training it would flatten all others."""
    trained = [entry for entry in entries if entry["step"] > 0] or entries
    x = [entry["step"] * _per_step(run) / 1e6 for entry in trained]
    y = [entry[field] for entry in trained]
    mark = "both" if len(x) < 40 else "line"
    return pd.DataFrame({"line": run["name"], "x": x, "y": y, "mark": mark})


def _curves(
    runs: Sequence[Run],
    chosen: dict[str, list[dict[str, Any]]],
    field: str,
    title: str,
    unit: str,
    what: str,
) -> list[Section]:
    """A chart of a field of the curves, unless no run has it."""
    drawn = [_points(run, chosen[run["name"]], field) for run in runs if chosen[run["name"]]]
    if not drawn:
        return []
    points: Frame = pd.concat(drawn)
    by_run = points.groupby("line", sort=False)["y"]
    lead = _extreme(what, by_run.last(), min) if field == "loss" else _extreme(what, by_run.max())
    return [Section(title, lead, chart=LineChart(points, TOKENS, unit, log_y=False))]


def _validation(runs: Sequence[Run]) -> list[Section]:
    measured = [run for run in runs if run.get("validation")]
    if not measured:
        return []
    points: Frame = pd.concat([_points(run, run["validation"], "perplexity") for run in measured])
    last = points.groupby("line", sort=False)["y"].last()
    lead = f"{last.index[0]} ends at a validation perplexity of {last.iloc[0]:.2f}."
    if len(measured) > 1:
        names = enumeration(last.index[last == last.min()])
        lead = f"Lowest validation perplexity at the end: {last.min():.2f}, of {names}."
    ends = [points["x"].min(), points["x"].max()]
    starts = {
        run["start"]["name"]: run["start"]["perplexity"] for run in measured if run.get("start")
    }
    levels = [
        pd.DataFrame({"line": f"{name} (start)", "x": ends, "y": y, "dash": "2 3", "mark": "line"})
        for name, y in starts.items()
    ]
    points = pd.concat([points, *levels])
    note = "Training tokens after which every measurement is that close to the start, or below it."
    return [
        Section(
            "Validation perplexity in training",
            lead,
            "Perplexity of held-out text, in blocks of the training length. The first value, from "
            "before the training, is in the table.",
            LineChart(points, TOKENS, "validation perplexity (lower is better)", log_y=True),
            header=[
                "run",
                "its start",
                "first",
                "last",
                "last against start",
                *(f"within {share:.1%} from" for share in NEAR),
            ],
            rows=[_validation_row(run) for run in measured],
            note=note if starts else "",
        )
    ]


def _validation_row(run: Run) -> list[str]:
    values = [entry["perplexity"] for entry in run["validation"]]
    start = run["start"]["perplexity"] if run.get("start") else None
    row = [run["name"], "–" if start is None else f"{start:.2f}"]
    row += [f"{values[0]:.2f}", f"{values[-1]:.2f}"]
    if start is None:
        return [*row, *("–" for _ in range(1 + len(NEAR)))]
    row.append(signed(values[-1] / start - 1, ".2%"))
    return row + [_tokens_until(run, start * (1 + share)) for share in NEAR]


def _tokens_until(run: Run, limit: float) -> str:
    """Tokens after which the validation perplexity remains at or below a limit."""
    reached = None
    for entry in reversed(run["validation"]):
        if entry["perplexity"] > limit:
            break
        reached = entry["step"] * _per_step(run)
    return "never" if reached is None else f"{reached:,.0f}"


def _retrieval(runs: Sequence[Run]) -> list[Section]:
    """Passkeys and needles found in validation, where a run asked for some."""
    drawn, rows = [], []
    for run in runs:
        for name, of in run.get("retrieval", {}).items():
            label = f"{run['name']}: {of['what']} at {of['length']:,}"
            shares = [entry["retrieval"][name] for entry in run["validation"]]
            x = [entry["step"] * _per_step(run) / 1e6 for entry in run["validation"]]
            drawn.append(pd.DataFrame({"line": label, "x": x, "y": shares}))
            start = (run.get("start") or {}).get("retrieval", {}).get(name)
            first = "–" if start is None else f"{start:.2f}"
            rows.append([label, first, f"{shares[0]:.2f}", f"{shares[-1]:.2f}"])
    if not drawn:
        return []
    points: Frame = pd.concat(drawn)
    lead, chart = "No passkey or needle was found in training.", None
    if points["y"].any():
        last = points.groupby("line", sort=False)["y"].last()
        lead = _extreme("Largest share found at the end", last)
        chart = LineChart(points, TOKENS, "share found", top=1.0)
    text = "Share of passkeys and needles found in prompts of so many tokens."
    header = ["run", "its start", "first", "last"]
    return [Section("Retrieval in training", lead, text, chart, header, rows)]


def _extreme(what: str, values: Any, choose: Callable[..., float] = max) -> str:
    """The lowest or largest of the runs' values, and whose it is."""
    best = choose(values)
    names = values.index[values == best].tolist()
    whose = "all runs" if 1 < len(names) == len(values) else enumeration(names)
    return f"{what}: {best:,.4g}, of {whose}."


def _of_objective(run: Run, objective: str) -> list[dict[str, Any]]:
    """The points of the curve whose loss is that of an objective: the one of their stage."""
    stages = {stage["name"]: stage["objective"] for stage in run.get("stages", [])}
    return [e for e in run["curve"] if stages.get(e.get("stage"), "next_token") == objective]


def _per_step(run: Run) -> float:
    return run["tokens"] / run["steps"]


def _table(runs: Sequence[Run]) -> Section:
    header = ["run", "parameters", "steps", "tokens", "passes over the text", "seconds", "tokens/s"]
    rows = [
        [
            run["name"],
            f"{run['parameters']:,}",
            f"{run['steps']:,}",
            f"{run['tokens']:,}",
            f"{run['epochs']:.2f}",
            f"{run['seconds']:,.0f}" if run["seconds"] else "–",
            f"{run['tokens'] / run['seconds']:,.0f}" if run["seconds"] else "–",
        ]
        for run in runs
    ]
    return Section("Runs", header=header, rows=rows)
