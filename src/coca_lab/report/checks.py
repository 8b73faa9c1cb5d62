"""What ``coca extend --check`` compared, as the first section of a page."""

import pandas as pd

from coca_lab.cells import CheckRecord, Probability
from coca_lab.report.charts import DotChart
from coca_lab.report.section import TOO_FEW, Entry, Section

GUESS = 0.1
"""The probability of a digit that is guessed."""
WITHIN = {
    "no loss shown": "no loss shown",
    "loses": "loses within L",
    "cannot tell": "cannot tell within L",
}
"""Below the name of a method, what is said of texts of up to L tokens."""


def check_section(check: CheckRecord) -> Section:
    """The methods side by side, in a chart and a table."""
    length = f"{check.training_length:,}"
    header = ["method", "within L", f"a digit up to {length} tokens back", "farther back"]
    rows = list[list[str | Entry]]()
    best_first = sorted(check.readings, key=lambda each: -each.far.value if each.far else 0.0)
    for each in best_first:
        name = f"{each.method} (taken)" if each.taken else each.method
        method = Entry(name, f"runs in {each.runs_in}", bold=each.taken)
        rows.append([method, each.verdict, _entry(each.back), _entry(each.far)])
    note = (
        f"L is {length} tokens, the training length; losses within L are against the model as it "
        "is. A digit's probability is a geometric mean over the numbers hidden in texts of more "
        "than L tokens; a guess has 10%. Small, and lines of the chart: 95% intervals over "
        "documents, and how many numbers are found whole."
    )
    note = " ".join([note, *(f"{line}." for line in check.left_out)])
    return Section(
        f"Methods compared, L = {length} tokens",
        chart=check_chart(check),
        header=header,
        rows=rows,
        note=note,
        has_words=True,
    )


def check_chart(check: CheckRecord) -> DotChart | None:
    """Two dots for every method; None where no number was hidden farther back than L."""
    length = f"{check.training_length:,}"
    far = f"farther back than {length} tokens"
    near = f"up to {length} tokens back"
    points = []
    notes = {}
    for each in check.readings:
        for place, found in ((far, each.far), (near, each.back)):
            if found is None:
                return None
            low, high = found.ci95 or (found.value, found.value)
            points.append(
                {"line": each.method, "place": place, "y": found.value, "low": low, "high": high}
            )
        note = WITHIN.get(each.word, "")
        if each.taken:
            note = f"taken, {note}" if note else "taken"
        notes[each.method] = note
    return DotChart(
        pd.DataFrame(points),
        x="probability of a digit of a hidden number",
        places=(far, near),
        notes=notes,
        bold=next((each.method for each in check.readings if each.taken), ""),
        mark=(GUESS, "a guess"),
    )


def _entry(found: Probability | None) -> str | Entry:
    """A probability with its interval, and the numbers found."""
    if found is None:
        return "–"
    small = [TOO_FEW]
    if found.ci95 is not None:
        low, high = found.ci95
        small = [f"{low:.0%} to {high:.0%}"]
    if found.found is not None:
        small.append(f"{found.found} of {found.needles} found")
    return Entry(f"{found.value:.0%}", ", ".join(small))
