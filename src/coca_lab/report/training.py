"""Training runs in the report: validation perplexity, losses, sizes."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from coca_lab.report.figures import INK, draw, turns
from coca_lab.report.lines import signed
from coca_lab.report.section import Section

UNITS = {
    "next_token": "training loss (nats per token)",
    "logits": "distance from the teacher’s prediction (nats per token)",
    "hidden_states": "distance from the teacher’s prediction (nats) and hidden states",
    "attention": "attention outputs: share of the teacher’s variance not explained",
}
# The validation figure is cut at this multiple of the start: right after a conversion it is far
# above.
TOP = 1.4
DASHES = ("-", "--", ":")
# A converted model has recovered at 1 % and 0.5 % more perplexity than its start.
NEAR = (0.01, 0.005)


def training_sections(runs: Sequence[dict[str, Any]]) -> list[Section]:
    """Curves and a table of training runs.

    Args:
        runs: Contents of ``training.json``, each with a ``name``.
    """
    if not runs:
        return []
    return [*_validation(runs), *_retrieval(runs), *_losses(runs), _table(runs)]


def _validation(runs: Sequence[dict[str, Any]]) -> list[Section]:
    measured = [run for run in runs if run.get("validation")]
    if not measured:
        return []
    styles = _styles(measured)
    starts = {
        run["start"]["name"]: run["start"]["perplexity"] for run in measured if run.get("start")
    }

    values = [entry["perplexity"] for run in measured for entry in run["validation"]]
    cut = TOP * max(starts.values()) if starts else None
    cut = cut if cut is not None and max(values) > cut else None

    def plot(axes: Axes) -> None:
        for run in measured:
            axes.plot(
                [entry["step"] * _per_step(run) / 1e6 for entry in run["validation"]],
                [entry["perplexity"] for entry in run["validation"]],
                label=run["name"],
                marker=".",
                lw=1.4,
                **styles[run["name"]],
            )
        for name, perplexity in starts.items():
            axes.axhline(perplexity, color=INK, lw=1, ls=(0, (1, 2)), label=f"{name} (start)")
        if cut:
            axes.set_ylim(0.97 * min(values + list(starts.values())), cut)
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens trained on (millions)")
        axes.set_ylabel("validation perplexity (lower is better)")

    return [
        Section(
            "Validation perplexity in training",
            text="Perplexity of held-out text, in blocks of the training length."
            + (
                f" The figure is cut at {cut:.0f}; the table has the first value of each run."
                if cut
                else ""
            ),
            figure=draw("validation", plot),
            header=[
                "run",
                "its start",
                "first",
                "last",
                "last against start",
                *(f"within {share:.1%} from" for share in NEAR),
            ],
            rows=[_validation_row(run) for run in measured],
            note="Training tokens after which every measurement is that close to the start, or "
            "below it."
            if starts
            else "",
        )
    ]


def _validation_row(run: dict[str, Any]) -> list[str]:
    values = [entry["perplexity"] for entry in run["validation"]]
    start = run["start"]["perplexity"] if run.get("start") else None
    row = [run["name"], "–" if start is None else f"{start:.2f}"]
    row += [f"{values[0]:.2f}", f"{values[-1]:.2f}"]
    if start is None:
        return [*row, *("–" for _ in range(1 + len(NEAR)))]
    row.append(signed(values[-1] / start - 1, ".2%"))
    return row + [_tokens_until(run, start * (1 + share)) for share in NEAR]


def _retrieval(runs: Sequence[dict[str, Any]]) -> list[Section]:
    """Passkeys and needles found in validation, where a run asked for some."""
    asked = [
        (run, name, f"{run['name']}: {of['what']} at {of['length']:,}")
        for run in runs
        for name, of in run.get("retrieval", {}).items()
    ]
    if not asked:
        return []
    styles = _styles([{"name": label} for _, _, label in asked])

    def plot(axes: Axes) -> None:
        for run, name, label in asked:
            axes.plot(
                [entry["step"] * _per_step(run) / 1e6 for entry in run["validation"]],
                [entry["retrieval"][name] for entry in run["validation"]],
                label=label,
                marker=".",
                lw=1.4,
                **styles[label],
            )
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("tokens trained on (millions)")
        axes.set_ylabel("share found")

    def row(run: dict[str, Any], name: str, label: str) -> list[str]:
        shares = [entry["retrieval"][name] for entry in run["validation"]]
        start = (run.get("start") or {}).get("retrieval", {}).get(name)
        return [label, "–" if start is None else f"{start:.2f}"] + [
            f"{share:.2f}" for share in (shares[0], shares[-1])
        ]

    return [
        Section(
            "Retrieval in training",
            text="Share of passkeys and needles found in prompts of so many tokens.",
            figure=draw("retrieval-in-training", plot),
            header=["run", "its start", "first", "last"],
            rows=[row(*each) for each in asked],
        )
    ]


def _tokens_until(run: dict[str, Any], limit: float) -> str:
    """Tokens after which the validation perplexity remains at or below a limit."""
    reached = None
    for entry in reversed(run["validation"]):
        if entry["perplexity"] > limit:
            break
        reached = entry["step"] * _per_step(run)
    return "never" if reached is None else f"{reached:,.0f}"


def _losses(runs: Sequence[dict[str, Any]]) -> list[Section]:
    """One figure per objective: their losses are not comparable."""
    styles = _styles(runs)
    sections = []
    for objective, unit in UNITS.items():
        curves = [
            (run, part)
            for run in runs
            if (part := [e for e in run["curve"] if _objective(run, e) == objective])
        ]
        if curves:
            sections.append(
                Section(
                    "Training" if objective == "next_token" else f"Training: {objective}",
                    figure=draw(f"training-{objective}", _loss_plot(curves, unit, styles)),
                )
            )
    return sections


def _loss_plot(
    curves: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]],
    unit: str,
    styles: dict[str, dict[str, Any]],
) -> Callable[[Axes], None]:
    def plot(axes: Axes) -> None:
        for run, entries in curves:
            axes.plot(
                [entry["step"] * _per_step(run) / 1e6 for entry in entries],
                [entry["loss"] for entry in entries],
                label=run["name"],
                lw=1.4,
                **styles[run["name"]],
            )
        axes.set_xlabel("tokens trained on (millions)")
        axes.set_ylabel(unit)

    return plot


def _styles(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A colour for every run, and other dashes where the colours repeat."""
    return {
        name: {"color": colour, "ls": DASHES[turn % len(DASHES)]}
        for name, (colour, turn) in turns(run["name"] for run in runs).items()
    }


def _objective(run: dict[str, Any], entry: dict[str, Any]) -> str:
    """The objective whose loss a point of the curve is: that of its stage."""
    objectives = {stage["name"]: stage["objective"] for stage in run.get("stages", [])}
    return objectives.get(entry.get("stage"), "next_token")


def _per_step(run: dict[str, Any]) -> float:
    return run["tokens"] / run["steps"]


def _table(runs: Sequence[dict[str, Any]]) -> Section:
    return Section(
        "Runs",
        header=["run", "parameters", "steps", "tokens", "passes over the text", "seconds"],
        rows=[
            [
                run["name"],
                f"{run['parameters']:,}",
                f"{run['steps']:,}",
                f"{run['tokens']:,}",
                f"{run['epochs']:.2f}",
                f"{run['seconds']:,.0f}" if run["seconds"] else "–",
            ]
            for run in runs
        ],
    )
