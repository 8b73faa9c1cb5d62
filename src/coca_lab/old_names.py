"""Names of earlier versions in commands, recipes and studies, in today's."""

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
"""Commands, and what does their work."""


def methods_of_scalings(scalings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ``methods`` of a study from its ``scalings``, as studies called them before.

    Raises:
        UserError: If one is not a mapping with a kind.
    """
    found = []
    for each in scalings:
        if not isinstance(each, Mapping) or "kind" not in each:
            raise UserError(f"scalings were mappings such as {{kind: yarn, factor: 4}}; got {each}")
        rest = {name: value for name, value in each.items() if name != "kind"}
        found.append({"method": OLD_METHODS.get(each["kind"], each["kind"]), **rest})
    return found
