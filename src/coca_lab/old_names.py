"""Names of earlier versions in commands, recipes and studies, and what does their work."""

RECALL = (
    "recall is a task of studies.recall, in a clone: set COCA_IMPORT=studies.recall PYTHONPATH=."
)
GONE = {
    "coca analyze": "angles of queries and keys are measured by PYTHONPATH=. python -m "
    "studies.angles.figure3 MODEL --source TEXT, figure7, bounds and shifts, in a clone "
    "(docs/analysis.md)",
    "coca eval recall": RECALL,
}
"""Commands."""
GONE_FIELDS = {
    "recall": RECALL,
    "scalings": "write methods, such as [{method: yarn, factor: 4}], with ntk_text for ntk and "
    "temperature for fold",
}
"""Sections and fields of a file."""
