"""Reading result files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError

IN_FOLDERS = ("training.json", "results.json")
"""Of a run; of a suite, a search or the quickstart. Read first, and an error if damaged."""
KINDS = {"results", "training", "curve"}


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read result files.

    Args:
        paths: Result files; or folders: of a run, a suite, a search or the quickstart, or with
            result files in them. A file that is named twice is read once. Numbered files beside
            ``results.json`` and ``training.json``, of earlier measurements, are left out.

    Returns:
        The contents, each with the path of its file as ``file``.

    Raises:
        UserError: If a file is missing, is not JSON, or has no results.
    """
    files = {file.resolve(): file for path in paths for file in _files(Path(path))}
    return [_read(file) for file in files.values()]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [path / name for name in IN_FOLDERS if (path / name).is_file()]
    # Not those that were kept beside them: of a shorter run, or of another measurement.
    names = "|".join(file.stem for file in found)
    others = [
        file
        for file in sorted(path.glob("*.json"))
        if not re.fullmatch(rf"({names})(-\d+)?", file.stem)
    ]
    found += [file for file in others if _is_result_file(file)]
    if not found:
        raise UserError(
            f"{path}: this folder has neither results.json nor training.json nor other result "
            "files; give what coca train, eval, analyze, search, bench or quickstart has written"
        )
    return found


def _is_result_file(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(KINDS & set(content))


def _refuse(number: str) -> None:
    raise ValueError(f"it has {number} in place of a number")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a result file, no valid JSON ({error})") from error
    if not isinstance(content, dict) or not KINDS & set(content):
        raise UserError(
            f"{path}: not a result file: expected an object with results (from coca eval) or "
            "a curve (training.json of a run)"
        )
    if "curve" in content:
        # A copy of a run's training.json takes the run's name from the name of the file.
        name = path.resolve().parent.name if path.name == "training.json" else path.stem
        content = {**content, "training": [{"name": name, **content}]}
    return {**content, "file": str(path)}


def all_cells(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of all result files, each with the attention of its model and its file."""
    return [
        {
            "attention": _attention(cell.get("model", "")),
            "machine": _machine(content),
            "file": content.get("file"),
            **cell,
        }
        for content in contents
        for cell in content.get("results", [])
    ]


def _attention(name: str) -> str | None:
    """The attention of a model from its name: early result files do not record it."""
    if name.startswith("CoCA"):
        return name.removeprefix("CoCA").strip("- ").lower() or "coca"
    return {"RoFormer": "rope", "ALiBi": "alibi"}.get(name)


def _machine(content: dict[str, Any]) -> str | None:
    """What times depend on."""
    about = content.get("environment")
    if not about:
        return None
    processors = about.get("gpus") or [about.get("processor")]
    torch = about.get("versions", {}).get("torch")
    threads = about.get("threads")
    plural = "" if threads == 1 else "s"
    return f"{', '.join(map(str, processors))}, {threads} thread{plural}, PyTorch {torch}"
