"""Slack against strict under the same scaling: the shape of the paper's Table 3."""

import math
from collections.abc import Sequence
from typing import Any

from coca_attention.report import paper
from coca_attention.report.retrieval import Section

SLACK, STRICT = "CoCA-Slack", "CoCA-Strict"


def form_sections(cells: Sequence[dict[str, Any]]) -> list[Section]:
    """One section for perplexity and one for passkeys, where both forms were measured alike."""
    sections = []
    for task, value, size, title, theirs in (
        (
            "perplexity",
            "perplexity",
            "window",
            "Strict minus slack: perplexity",
            paper.TABLE_3_PERPLEXITY,
        ),
        (
            "passkey",
            "accuracy",
            "length",
            "Strict minus slack: passkeys found",
            paper.TABLE_3_PASSKEY,
        ),
    ):
        found = {
            (c["model"], c["scaling"], c.get("factor"), c[size]): c[value]
            for c in cells
            if c["task"] == task and c["scaling"] != "attend-last"
        }
        scalings = dict.fromkeys(
            (kind, factor) for model, kind, factor, _ in found if model == SLACK
        )
        sizes = sorted({n for *_, n in found})
        rows = []
        for kind, factor in scalings:
            pairs = [
                (found.get((SLACK, kind, factor, n)), found.get((STRICT, kind, factor, n)))
                for n in sizes
            ]
            if not any(slack is not None and strict is not None for slack, strict in pairs):
                continue
            name = "no scaling" if kind == "none" else f"{kind}-{factor:g}"
            rows.append([f"{SLACK}, {name}", *(_value(slack) for slack, _ in pairs)])
            rows.append([f"{STRICT}, {name}", *(_difference(*pair) for pair in pairs)])
        if not rows:
            continue
        length = "tokens read at once" if task == "perplexity" else "prompt length in tokens"
        sections.append(
            Section(
                title,
                text="The shape of the paper’s Table 3: slack’s figures, and below them how far "
                "strict is from each.",
                header=[length, *(f"{n:,}" for n in sizes)],
                rows=rows,
                note="The paper’s differences at 512 to 32,768 tokens: "
                + "; ".join(f"ntk-{k}: {', '.join(row)}" for k, row in theirs.items())
                + ".",
            )
        )
    return sections


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _difference(slack: float | None, strict: float | None) -> str:
    if slack is None or strict is None or not math.isfinite(strict - slack):
        return "–"
    return f"{strict - slack:+.2f}".replace("-", "−")
