"""Reading result files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read result files, or the ``training.json`` of run folders.

    Raises:
        UserError: If a file is missing, is not JSON, or has no results.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            path = path / "training.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a result file, no valid JSON ({error})") from error
        if not isinstance(content, dict) or not {"results", "training", "curve"} & set(content):
            raise UserError(
                f"{path}: not a result file: expected an object with results (from coca eval) or "
                "a curve (training.json of a run)"
            )
        if "curve" in content:
            # A copy of a run's training.json takes the run's name from the name of the file.
            name = path.parent.name if path.name == "training.json" else path.stem
            content = {**content, "training": [{"name": name, **content}]}
        found.append(content)
    return found


def all_cells(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of all result files, each with the attention of its model."""
    cells = [cell for content in contents for cell in content.get("results", [])]
    return [{"attention": _attention(cell.get("model", "")), **cell} for cell in cells]


def _attention(name: str) -> str | None:
    """The attention of a model from its name: early result files do not record it."""
    if name.startswith("CoCA"):
        return name.removeprefix("CoCA").strip("- ").lower() or "coca"
    return {"RoFormer": "rope", "ALiBi": "alibi"}.get(name)
