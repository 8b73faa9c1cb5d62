"""A table of training runs; TensorBoard shows their curves."""

from collections.abc import Sequence

from coca_lab.report.result_files import TrainingRun
from coca_lab.report.section import Entry, Section, number


def training_sections(runs: Sequence[TrainingRun]) -> list[Section]:
    """A row for every run."""
    if not runs:
        return []
    header = ["run", "parameters", "steps", "tokens", "last loss", "perplexity", "seconds"]
    rows: list[list[str | Entry]] = []
    for run in runs:
        loss = f"{run.curve[-1].loss:.4g}" if run.curve else "–"
        validated = number(run.validation[-1].perplexity) if run.validation else "–"
        start = f"{number(run.start.perplexity)}, {run.start.name}" if run.start else ""
        seconds = f"{run.seconds:,.0f}" if run.seconds else "–"
        rows.append(
            [
                run.model,
                f"{run.parameters:,}",
                f"{run.steps:,}",
                f"{run.tokens:,}",
                loss,
                Entry(validated, start),
                seconds,
            ]
        )
    note = (
        "Perplexity: the last one of validation; small: that of the model that training started "
        "from. The loss is that of the last stage’s objective. TensorBoard shows the curves."
    )
    return [Section("Training", header=header, rows=rows, note=note)]
