"""Training runs in the report: validation perplexity, losses, speed, sizes."""

from collections.abc import Callable, Sequence
from typing import Any

from coca_lab.report.charts import Line, LineChart
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
    """Curves and a table of training runs.

    Args:
        runs: Contents of ``training.json``, each with a ``name``.
    """
    if not runs:
        return []
    return [*_validation(runs), *_retrieval(runs), *_losses(runs), *_measures(runs), _table(runs)]


def _curve(
    run: Run, entries: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]
) -> Line:
    """Values by tokens, without step 0: before any training it would flatten all others."""
    trained = [entry for entry in entries if entry["step"] > 0] or entries
    x = [entry["step"] * _per_step(run) / 1e6 for entry in trained]
    return Line(run["name"], x, [value(entry) for entry in trained], dotted=len(x) < 40)


def _validation(runs: Sequence[Run]) -> list[Section]:
    measured = [run for run in runs if run.get("validation")]
    if not measured:
        return []
    starts = {
        run["start"]["name"]: run["start"]["perplexity"] for run in measured if run.get("start")
    }
    lines = [_curve(run, run["validation"], lambda entry: entry["perplexity"]) for run in measured]
    places = [x for line in lines for x in line.x]
    for name, perplexity in starts.items():
        ends = [min(places), max(places)]
        lines.append(Line(f"{name} (start)", ends, [perplexity] * 2, dash=(2, 3), dotted=False))
    last = {run["name"]: run["validation"][-1]["perplexity"] for run in measured}
    best = [name for name, value in last.items() if value == min(last.values())]
    lead = f"{best[0]} ends at a validation perplexity of {last[best[0]]:.2f}."
    if len(measured) > 1:
        names = enumeration(best)
        lead = f"Lowest validation perplexity at the end: {last[best[0]]:.2f}, of {names}."
    note = "Training tokens after which every measurement is that close to the start, or below it."
    return [
        Section(
            "Validation perplexity in training",
            lead,
            "Perplexity of held-out text, in blocks of the training length. The first value, from "
            "before the training, is in the table.",
            LineChart(lines, TOKENS, "validation perplexity (lower is better)", log_y=True),
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


def _retrieval(runs: Sequence[Run]) -> list[Section]:
    """Passkeys and needles found in validation, where a run asked for some."""
    lines, rows = [], []
    for run in runs:
        for name, of in run.get("retrieval", {}).items():
            label = f"{run['name']}: {of['what']} at {of['length']:,}"
            shares = [entry["retrieval"][name] for entry in run["validation"]]
            x = [entry["step"] * _per_step(run) / 1e6 for entry in run["validation"]]
            lines.append(Line(label, x, shares))
            start = (run.get("start") or {}).get("retrieval", {}).get(name)
            first = "–" if start is None else f"{start:.2f}"
            rows.append([label, first, f"{shares[0]:.2f}", f"{shares[-1]:.2f}"])
    if not lines:
        return []
    title = "Retrieval in training"
    text = "Share of passkeys and needles found in prompts of so many tokens."
    header = ["run", "its start", "first", "last"]
    if not any(value for line in lines for value in line.y):
        lead = "No passkey or needle was found in training."
        return [Section(title, lead, text, None, header, rows)]
    last = {line.label: line.y[-1] for line in lines}
    lead = _extreme("Largest share found at the end", last, max)
    return [
        Section(title, lead, text, LineChart(lines, TOKENS, "share found", top=1.0), header, rows)
    ]


def _tokens_until(run: Run, limit: float) -> str:
    """Tokens after which the validation perplexity remains at or below a limit."""
    reached = None
    for entry in reversed(run["validation"]):
        if entry["perplexity"] > limit:
            break
        reached = entry["step"] * _per_step(run)
    return "never" if reached is None else f"{reached:,.0f}"


def _losses(runs: Sequence[Run]) -> list[Section]:
    """One chart per objective: their losses are not comparable."""
    sections = []
    for objective, unit in UNITS.items():
        lines = [
            _curve(run, part, lambda entry: entry["loss"])
            for run in runs
            if (part := [e for e in run["curve"] if _objective(run, e) == objective])
        ]
        if lines:
            title = "Training" if objective == "next_token" else f"Training: {objective}"
            last = {line.label: line.y[-1] for line in lines}
            lead = _extreme("Lowest training loss at the end", last, min)
            sections.append(Section(title, lead, chart=LineChart(lines, TOKENS, unit, log_y=False)))
    return sections


def _measures(runs: Sequence[Run]) -> list[Section]:
    """Learning rate, gradient norm and throughput, of the runs that recorded them."""
    sections = []
    for name, (title, unit, what) in MEASURES.items():
        lines = [
            _curve(run, part, lambda entry, name=name: entry[name])
            for run in runs
            if (part := [entry for entry in run["curve"] if entry.get(name) is not None])
        ]
        if lines:
            chart = LineChart(lines, TOKENS, unit, log_y=False)
            most = {line.label: max(y for y in line.y if y is not None) for line in lines}
            sections.append(Section(f"{title} in training", _extreme(what, most, max), chart=chart))
    return sections


def _extreme(what: str, values: dict[str, Any], choose: Callable[..., float]) -> str:
    """The lowest or largest of the runs' values, and whose it is."""
    best = choose(values.values())
    return f"{what}: {best:,.4g}, of {enumeration([n for n, v in values.items() if v == best])}."


def _objective(run: Run, entry: dict[str, Any]) -> str:
    """The objective whose loss a point of the curve is: that of its stage."""
    objectives = {stage["name"]: stage["objective"] for stage in run.get("stages", [])}
    return objectives.get(entry.get("stage"), "next_token")


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
