"""Training runs in the report: validation perplexity, losses, retrieval, speed, sizes."""

from collections.abc import Sequence

import pandas as pd

from coca_lab.report.cells import TrainingRun
from coca_lab.report.charts import Frame, LineChart
from coca_lab.report.section import Section, enumeration, signed

UNITS = {
    "next_token": "training loss (nats per token)",
    "logits": "distance from the teacher’s prediction (nats per token)",
    "hidden_states": "distance from the teacher’s prediction (nats) and hidden states",
    "attention": "attention outputs: share of the teacher’s variance not explained",
}
TRAINED_ON = "tokens trained on (millions)"
# A converted model has recovered at 1 % and 0.5 % more perplexity than its start.
NEAR = (0.01, 0.005)
DRAWN = 1_000
"""Points of a line at most: a picture shows no more."""
AVERAGED = 100
"""Points of a line of losses at most, each of which is a batch's, and so noise."""


def training_sections(runs: Sequence[TrainingRun]) -> list[Section]:
    """Curves and a table of training runs."""
    if not runs:
        return []
    sections, curves = [*_validation(runs), *_retrieval(runs)], _entries(runs, "curve")
    for objective, unit in UNITS.items():  # losses of different objectives are not comparable
        losses = _trained(curves[curves["objective"] == objective], "loss")
        if len(losses):
            losses = _averaged(losses)
            title = "Training" if objective == "next_token" else f"Training: {objective}"
            lead = _best("Lowest training loss at the end", losses, "min")
            text = f"Of long runs a point is the mean over 1/{AVERAGED} of the run."
            sections.append(Section(title, lead, text, LineChart(losses, TRAINED_ON, unit)))
    return [*sections, _table(runs)]


def _entries(runs: Sequence[TrainingRun], field: str) -> Frame:
    """The entries of a field of runs, with their run, objective, and millions of tokens as x."""
    rows = []
    for run in runs:
        objectives = {stage.name: stage.objective for stage in run.stages}
        for entry in getattr(run, field):
            x = entry.step * _per_step(run) / 1e6
            objective = objectives.get(entry.stage, "next_token")
            rows.append({**vars(entry), "line": run.model, "x": x, "objective": objective})
    return pd.DataFrame(rows, columns=None if rows else ["objective"])


def _trained(entries: Frame, field: str) -> Frame:
    """Points of a field by tokens, without step 0: before training it would flatten all others."""
    if entries.empty:
        return entries
    known = entries.dropna(subset=field)
    lines = known.groupby("line")["step"]
    points = known[(known["step"] > 0) | (lines.transform("max") == 0)]
    counts = points.groupby("line")["x"].transform("size")
    marks = (counts < 40).map({True: "both", False: "line"})
    # At equal distances, and always the last.
    left = points.groupby("line").cumcount(ascending=False)
    return points.assign(y=points[field], mark=marks)[left % -(-counts // DRAWN) == 0]


def _averaged(points: Frame) -> Frame:
    """At most `AVERAGED` points of every line, means of as many values, at the last of them."""
    lines = points.groupby("line")["x"]
    part = lines.cumcount(ascending=False) // -(-lines.transform("size") // AVERAGED)
    parts = points.assign(part=part).groupby(["line", "part"], sort=False, as_index=False)
    return parts.agg({"x": "last", "y": "mean", "mark": "first"})


def _validation(runs: Sequence[TrainingRun]) -> list[Section]:
    """Perplexity in training, and when a model has recovered that of its start."""
    measured = [run for run in runs if run.validation]
    if not measured:
        return []
    points = _trained(_entries(measured, "validation"), "perplexity")
    starts = {run.start.name: run.start.perplexity for run in measured if run.start}
    look = {"x": [points["x"].min(), points["x"].max()], "dash": "2 3", "mark": "line"}
    levels = [
        pd.DataFrame({"line": f"{name} (start)", "y": start, **look})
        for name, start in starts.items()
    ]
    unit = "validation perplexity (lower is better)"
    within = [f"within {share:.1%} from" for share in NEAR]
    note = "Training tokens after which every measurement is that close to the start, or below it."
    return [
        Section(
            "Validation perplexity in training",
            _best("Lowest validation perplexity at the end", points, "min"),
            "Perplexity of held-out text, in blocks of the training length. The first value, from "
            "before the training, is in the table.",
            LineChart(pd.concat([points, *levels]), TRAINED_ON, unit, log_y=True),
            header=["run", "its start", "first", "last", "last against start", *within],
            rows=[_validation_row(run) for run in measured],
            note=note if starts else "",
        )
    ]


def _validation_row(run: TrainingRun) -> list[str]:
    values = [entry.perplexity for entry in run.validation]
    measured = [f"{values[0]:.2f}", f"{values[-1]:.2f}"]
    if run.start is None:
        return [run.model, "–", *measured, *["–"] * (1 + len(NEAR))]
    start = run.start.perplexity
    change = signed(values[-1] / start - 1, ".2%")
    until = (_tokens_until(run, start * (1 + share)) for share in NEAR)
    return [run.model, f"{start:.2f}", *measured, change, *until]


def _tokens_until(run: TrainingRun, limit: float) -> str:
    """Tokens after which the validation perplexity remains at or below a limit."""
    reached = "never"
    for entry in reversed(run.validation):
        if entry.perplexity > limit:
            break
        reached = f"{entry.step * _per_step(run):,.0f}"
    return reached


def _retrieval(runs: Sequence[TrainingRun]) -> list[Section]:
    """Passkeys and needles found in validation, where a run asked for some."""
    drawn, rows = [], []
    for run in runs:
        for name, of in run.retrieval.items():
            shares = [entry.retrieval.get(name) for entry in run.validation]
            known = [share for share in shares if share is not None]
            if known:
                label = f"{run.model}: {of.what} at {of.length:,}"
                start = run.start.retrieval.get(name) if run.start else None
                shown = (start, known[0], known[-1])
                rows.append([label, *("–" if share is None else f"{share:.0%}" for share in shown)])
                points = _entries([run], "validation").assign(line=label, share=shares)
                drawn.append(_trained(points, "share"))
    if not drawn:
        return []
    points: Frame = pd.concat(drawn)
    lead, chart = "No passkey or needle was found in training.", None
    if points["y"].any():
        lead = _best("Largest share found at the end", points, "max", "{:.0%}")
        chart = LineChart(points, TRAINED_ON, "share found", top=1.0)
    text = "Share of passkeys and needles found in prompts of so many tokens."
    header = ["run", "its start", "first", "last"]
    return [Section("Retrieval in training", lead, text, chart, header, rows)]


def _best(what: str, points: Frame, choose: str, form: str = "{:,.4g}") -> str:
    """The lowest or largest of the runs' last values, and whose it is."""
    values = points.groupby("line", sort=False)["y"].last()
    best = values.agg(choose)
    names = values.index[values == best].tolist()
    whose = "all runs" if 1 < len(names) == len(values) else enumeration(names)
    return f"{what}: {form.format(best)}, of {whose}."


def _per_step(run: TrainingRun) -> float:
    return run.tokens / run.steps


def _table(runs: Sequence[TrainingRun]) -> Section:
    header = ["run", "parameters", "steps", "tokens", "passes over the text", "seconds", "tokens/s"]
    rows = []
    for run in runs:
        times = ["–", "–"]
        if run.seconds:
            times = [f"{run.seconds:,.0f}", f"{run.tokens / run.seconds:,.0f}"]
        counts = (f"{count:,}" for count in (run.parameters, run.steps, run.tokens))
        rows.append([run.model, *counts, f"{run.epochs:.2f}", *times])
    return Section("Runs", header=header, rows=rows)
