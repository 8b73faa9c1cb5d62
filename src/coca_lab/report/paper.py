"""The paper's published figures, for comparison (arXiv 2309.08646v3)."""

from collections.abc import Sequence

from coca_lab.report.results import Cell
from coca_lab.report.section import Section

TRAINING_LENGTH = 512
MODEL = "350 million parameters, training length 512 (arXiv 2309.08646)"
BASE = "7 billion parameters, training length 2,048, then 32,768 under interpolation."

# Table 1, training from scratch: perplexity on 100 PG-19 documents, stride 512, training length
# 512. "inf" and "OOM" as printed.
TABLE_1_WINDOWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TABLE_1: dict[str, tuple[str, ...]] = {
    "ALiBi": ("18.69", "21.27", "28.20", "35.66", "37.03", "OOM", "OOM"),
    "RoFormer": ("19.66", "411.50", "3276.00", "3026.00", "3028.00", "inf", "inf"),
    "RoFormer + dynamic NTK": (
        "19.66", "22.30", "38.00", "75.75", "138.13", "370.75", "380.75",
    ),
    "CoCA-Slack": ("20.11", "33.47", "69.06", "113.19", "157.38", "141.00", "171.63"),
    "CoCA-Slack + dynamic NTK": (
        "20.11", "20.81", "25.88", "34.16", "55.75", "89.31", "101.13",
    ),
}  # fmt: skip

# Table 2, training from scratch: share of passkeys found, 100 prompts a length.
TABLE_2: dict[str, tuple[str, ...]] = {
    "ALiBi": ("0.82", "0.65", "0.28", "0.18", "0.12", "OOM", "OOM"),
    "RoFormer": ("0.99", "0.53", "0.30", "0.18", "0.04", "0.02", "0.04"),
    "RoFormer + dynamic NTK": ("0.99", "1.00", "0.95", "0.70", "0.41", "0.16", "0.06"),
    "CoCA-Slack": ("1.00", "0.64", "0.33", "0.19", "0.06", "0.02", "0.04"),
    "CoCA-Slack + dynamic NTK": ("1.00", "1.00", "0.96", "0.89", "0.50", "0.23", "0.08"),
}

# Table 3: strict minus slack under dynamic NTK of a factor, perplexity and passkeys found.
TABLE_3_PERPLEXITY: dict[int, tuple[str, ...]] = {
    2: ("+0.07", "+0.61", "-1.58", "-4.03", "+15.37", "+12.38", "+1.94"),
    4: ("+0.07", "-0.49", "-0.66", "-0.88", "+3.16", "-18.25", "-2.57"),
    8: ("+0.07", "-1.74", "-0.64", "+1.16", "+0.03", "+0.5", "+0.31"),
}
TABLE_3_PASSKEY: dict[int, tuple[str, ...]] = {
    2: ("+0.0", "-0.12", "-0.3", "-0.42", "-0.34", "-0.22", "-0.07"),
    4: ("+0.0", "-0.11", "-0.38", "-0.46", "-0.38", "-0.19", "-0.02"),
    8: ("+0.0", "-0.05", "-0.34", "-0.51", "-0.4", "-0.07", "-0.01"),
}


# Table 4: LLaMA-7B trained on under position interpolation, from 2,048 tokens to 32,768.
TABLE_4_PERPLEXITY: dict[str, tuple[str, ...]] = {
    "LLaMA-7B + PI": ("9.06", "7.55", "7.74", "7.16", "7.04", "6.93", "7.11"),
    "LLaMA-7B + CoCA + PI": ("9.65", "8.19", "8.37", "7.87", "7.84", "7.83", "7.96"),
}
TABLE_4_PASSKEY: dict[str, tuple[str, ...]] = {
    "LLaMA-7B + PI": ("1.0", "1.0", "1.0", "1.0", "1.0", "1.0", "0.99"),
    "LLaMA-7B + CoCA + PI": ("1.0", "1.0", "1.0", "1.0", "1.0", "0.99", "0.99"),
}


def perplexity_sections(cells: Sequence[Cell], asked: bool) -> list[Section]:
    """The paper's Table 1, and the parts of its Tables 3 and 4 about perplexity.

    Those that compare with models among the cells, or all if asked for: Tables 1 and 3 with models
    of the paper's training length, Table 4 with models trained under position interpolation.
    """
    note = (
        f"{MODEL}, 50 billion tokens, 100 documents of PG-19, stride 512. Model sizes and texts "
        "differ: compare the shapes, not the numbers."
    )
    title = "The paper’s perplexity (its Table 1, training from scratch)"
    columns = "tokens read at once"
    found = []
    if asked or _have_its_length(cells):
        found += [_table(title, columns, TABLE_1, note), _differences(columns, TABLE_3_PERPLEXITY)]
    if asked or _are_interpolated(cells):
        found.append(_table(_interpolated("perplexity"), columns, TABLE_4_PERPLEXITY, BASE))
    return found


def passkey_sections(cells: Sequence[Cell], asked: bool) -> list[Section]:
    """The same of passkeys, with its Table 2 in the place of Table 1."""
    title = "The paper’s passkeys (its Table 2, training from scratch)"
    columns = "prompt length in tokens"
    found = []
    if asked or _have_its_length(cells):
        found.append(_table(title, columns, TABLE_2, f"{MODEL}, 100 prompts each."))
        found.append(_differences(columns, TABLE_3_PASSKEY))
    if asked or _are_interpolated(cells):
        found.append(_table(_interpolated("passkeys"), columns, TABLE_4_PASSKEY, BASE))
    return found


def _have_its_length(cells: Sequence[Cell]) -> bool:
    return any(cell.get("training_length") == TRAINING_LENGTH for cell in cells)


def _are_interpolated(cells: Sequence[Cell]) -> bool:
    """Whether a model has position interpolation of its own, and so was trained under it."""
    return any(
        cell["scaling"] == "none"
        and (cell.get("rope_parameters") or {}).get("rope_type") == "linear"
        for cell in cells
    )


def _interpolated(what: str) -> str:
    return f"The paper’s {what} after training under position interpolation (its Table 4)"


def _table(title: str, columns: str, rows: dict[str, tuple[str, ...]], note: str = "") -> Section:
    header = [columns, *(f"{n:,}" for n in TABLE_1_WINDOWS)]
    return Section(title, header=header, rows=[[k, *v] for k, v in rows.items()], note=note)


def _differences(columns: str, rows: dict[int, tuple[str, ...]]) -> Section:
    what = "perplexity" if rows is TABLE_3_PERPLEXITY else "passkeys found"
    named = {
        f"NTK ({factor})": tuple(value.replace("-", "−") for value in values)
        for factor, values in rows.items()
    }
    return _table(f"The paper’s {what}, strict minus slack (its Table 3)", columns, named)
