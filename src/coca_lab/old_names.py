"""Names of earlier versions in commands, recipes and studies, and what does their work."""

from collections.abc import Mapping
from typing import Any

from coca_attention.errors import UserError

OLD_METHODS = {"ntk": "ntk_text", "fold": "temperature"}
"""By the ``kind`` of a scaling, the method that it is: ``ntk`` computed its base from each text."""

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
GONE_FIELDS = {"recall": RECALL}
"""Sections of a file."""


def in_todays_names(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file; ``scalings`` of a study, whose method was called kind, are methods.

    Raises:
        UserError: If there are methods, too, or a scaling is not a mapping with a kind.
    """
    if "scalings" not in content:
        return content
    if "methods" in content:
        raise UserError("scalings is the old name of methods: leave it out")
    if not isinstance(content["scalings"], list):
        raise UserError(f"scalings: expected a list, got {content['scalings']!r}")
    methods = []
    for each in content["scalings"]:
        if not isinstance(each, Mapping) or "kind" not in each:
            raise UserError(f"scalings were mappings such as {{kind: yarn, factor: 4}}; got {each}")
        rest = {name: value for name, value in each.items() if name != "kind"}
        methods.append({"method": OLD_METHODS.get(each["kind"], each["kind"]), **rest})
    others = {name: value for name, value in content.items() if name != "scalings"}
    return {**others, "methods": methods}
