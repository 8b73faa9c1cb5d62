"""The paper's published figures, for comparison (arXiv 2309.08646v3)."""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files

import yaml

from coca_lab.report.results import Cell
from coca_lab.report.section import Section

TRAINING_LENGTH = 512
WINDOWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def _sections(task: str, cells: Sequence[Cell], asked: bool) -> list[Section]:
    """The paper's tables about a task: those that compare with models among the cells, or all.

    Tables 1 to 3 compare with models of the paper's training length, Table 4 with models that have
    position interpolation of their own, and so were trained under it.
    """
    trained = any(cell.get("training_length") == TRAINING_LENGTH for cell in cells)
    interpolated = any(
        cell["scaling"] == "none"
        and (cell.get("rope_parameters") or {}).get("rope_type") == "linear"
        for cell in cells
    )
    compared = {"its training length": trained, "interpolated models": interpolated}
    text = files("coca_lab.report").joinpath("paper.yaml").read_text(encoding="utf-8")
    return [
        Section(
            table["title"],
            header=[table["columns"], *(f"{n:,}" for n in WINDOWS)],
            rows=table["rows"],
            note=table["note"],
        )
        for table in yaml.safe_load(text)
        if table["task"] == task and (asked or compared[table["of"]])
    ]


perplexity_sections = partial(_sections, "perplexity")
passkey_sections = partial(_sections, "passkey")
