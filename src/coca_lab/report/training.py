"""Training runs in the report: validation perplexity, losses, retrieval, speed, sizes."""

from collections.abc import Sequence

import pandas as pd

from coca_lab.report.cells import Run
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.section import Section, enumeration, signed

UNITS = {
    "next_token": "training loss (nats per token)",
    "logits": "distance from the teacher’s prediction (nats per token)",
    "hidden_states": "distance from the teacher’s prediction (nats) and hidden states",
    "attention": "attention outputs: share of the teacher’s variance not explained",
}
TOKENS = "tokens trained on (millions)"
# A converted model has recovered at 1 % and 0.5 % more perplexity than its start.
NEAR = (0.01, 0.005)
DRAWN = 1_000
"""Points of a line at most: a picture shows no more."""


def training_sections(runs: Sequence[Run]) -> list[Section]:
    """Curves and a table of training runs."""
    if not runs:
        return []
    sections, curves = [*_validation(runs), *_retrieval(runs)], _entries(runs, "curve")
    for objective, unit in UNITS.items():  # losses of different objectives are not comparable
        title = "Training" if objective == "next_token" else f"Training: {objective}"
        chosen = curves[curves["objective"] == objective]
        sections += _losses(chosen, title, unit)
    return [*sections, _table(runs)]


def _entries(runs: Sequence[Run], field: str) -> Frame:
    """The entries of a field of runs, with their run, objective, and millions of tokens as x."""
    rows = []
    for run in runs:
        objectives = {stage.name: stage.objective for stage in run.stages}
        for entry in getattr(run, field):
            x = entry.step * _per_step(run) / 1e6
            objective = objectives.get(entry.stage, "next_token")
            rows.append({**vars(entry), "line": run.name, "x": x, "objective": objective})
    return pd.DataFrame(rows, columns=None if rows else ["objective"])


def _drawn(entries: Frame, field: str) -> Frame:
    """Values by tokens, without step 0: before any training it would flatten all others."""
    known = entries.dropna(subset=field)
    trained = known[(known["step"] > 0) | (known.groupby("line")["step"].transform("max") == 0)]
    few = trained.groupby("line")["x"].transform("size") < 40
    return trained.assign(y=trained[field], mark=few.map({True: "both", False: "line"}))


def _losses(entries: Frame, title: str, unit: str) -> list[Section]:
    """A chart of the losses, unless no run has any."""
    if entries.empty:
        return []
    points = _drawn(entries, "loss")
    lead = _best("Lowest training loss at the end", points, "min")
    chart = LineChart(_thinned(points), TOKENS, unit, log_y=False)
    return [Section(title, lead, chart=chart)]


def _thinned(points: Frame) -> Frame:
    """At most `DRAWN` points of every line, at equal distances, and always the last."""
    lines = points.groupby("line")["x"]
    left = lines.cumcount(ascending=False)
    return points[left % -(-lines.transform("size") // DRAWN) == 0]


def _validation(runs: Sequence[Run]) -> list[Section]:
    measured = [run for run in runs if run.validation]
    if not measured:
        return []
    points = _drawn(_entries(measured, "validation"), "perplexity")
    starts = {run.start.name: run.start.perplexity for run in measured if run.start}
    look = {"x": [points["x"].min(), points["x"].max()], "dash": "2 3", "mark": "line"}
    levels = [
        pd.DataFrame({"line": f"{name} (start)", "y": start, **look})
        for name, start in starts.items()
    ]
    within = [f"within {share:.1%} from" for share in NEAR]
    note = "Training tokens after which every measurement is that close to the start, or below it."
    return [
        Section(
            "Validation perplexity in training",
            _best("Lowest validation perplexity at the end", points, "min"),
            "Perplexity of held-out text, in blocks of the training length. The first value, from "
            "before the training, is in the table.",
            LineChart(
                pd.concat([_thinned(points), *levels]),
                TOKENS,
                "validation perplexity (lower is better)",
                log_y=True,
            ),
            header=["run", "its start", "first", "last", "last against start", *within],
            rows=[_validation_row(run) for run in measured],
            note=note if starts else "",
        )
    ]


def _validation_row(run: Run) -> list[str]:
    values = [entry.perplexity for entry in run.validation]
    measured = [f"{values[0]:.2f}", f"{values[-1]:.2f}"]
    if run.start is None:
        return [run.name, "–", *measured, *["–"] * (1 + len(NEAR))]
    start = run.start.perplexity
    change = signed(values[-1] / start - 1, ".2%")
    until = (_tokens_until(run, start * (1 + share)) for share in NEAR)
    return [run.name, f"{start:.2f}", *measured, change, *until]


def _tokens_until(run: Run, limit: float) -> str:
    """Tokens after which the validation perplexity remains at or below a limit."""
    reached = "never"
    for entry in reversed(run.validation):
        if entry.perplexity > limit:
            break
        reached = f"{entry.step * _per_step(run):,.0f}"
    return reached


def _retrieval(runs: Sequence[Run]) -> list[Section]:
    """Passkeys and needles found in validation, where a run asked for some."""
    drawn, rows = [], []
    for run in runs:
        for name, of in run.retrieval.items():
            points = _entries([run], "validation")
            label = f"{run.name}: {of.what} at {of.length:,}"
            points = points.assign(line=label, y=[e.retrieval.get(name) for e in run.validation])
            points = points.dropna(subset="y")
            if points.empty:
                continue
            start = run.start.retrieval.get(name) if run.start else None
            shares = (start, *points["y"].iloc[[0, -1]])
            rows.append([label, *("–" if share is None else f"{share:.2f}" for share in shares)])
            drawn.append(points)
    if not drawn:
        return []
    points: Frame = pd.concat(drawn)
    lead, chart = "No passkey or needle was found in training.", None
    if points["y"].any():
        lead = _best("Largest share found at the end", points, "max")
        chart = LineChart(_thinned(points), TOKENS, "share found", top=1.0)
    text = "Share of passkeys and needles found in prompts of so many tokens."
    header = ["run", "its start", "first", "last"]
    return [Section("Retrieval in training", lead, text, chart, header, rows)]


def _best(what: str, points: Frame, choose: str) -> str:
    """The lowest or largest of the runs' last values, and whose it is."""
    values = points.groupby("line", sort=False)["y"].last()
    best = values.agg(choose)
    names = values.index[values == best].tolist()
    whose = "all runs" if 1 < len(names) == len(values) else enumeration(names)
    return f"{what}: {best:,.4g}, of {whose}."


def _per_step(run: Run) -> float:
    return run.tokens / run.steps


def _table(runs: Sequence[Run]) -> Section:
    header = ["run", "parameters", "steps", "tokens", "passes over the text", "seconds", "tokens/s"]
    rows = []
    for run in runs:
        times = ["–", "–"]
        if run.seconds:
            times = [f"{run.seconds:,.0f}", f"{run.tokens / run.seconds:,.0f}"]
        counts = (f"{count:,}" for count in (run.parameters, run.steps, run.tokens))
        rows.append([run.name, *counts, f"{run.epochs:.2f}", *times])
    return Section("Runs", header=header, rows=rows)
