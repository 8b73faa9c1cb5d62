"""Perplexity under a sliding window. README.md beside this file says what is measured."""

from coca_attention.evaluation.perplexity.keys import key_tokens
from coca_attention.evaluation.perplexity.score import (
    DocumentScore,
    TokenDocument,
    TokenScores,
    bootstrap_interval,
    by_tokens_read,
    paired_ratio_interval,
    perplexity,
    score_documents,
)
from coca_attention.evaluation.perplexity.task import (
    TextSettings,
    WindowSettings,
    check_settings,
    evaluate_perplexity,
    load_keys,
    load_text,
    tokens_needed,
)
from coca_attention.evaluation.perplexity.windows import (
    Window,
    shared_first_target,
    sliding_windows,
)

__all__ = [
    "DocumentScore",
    "TextSettings",
    "TokenDocument",
    "TokenScores",
    "Window",
    "WindowSettings",
    "bootstrap_interval",
    "by_tokens_read",
    "check_settings",
    "evaluate_perplexity",
    "key_tokens",
    "load_keys",
    "load_text",
    "paired_ratio_interval",
    "perplexity",
    "score_documents",
    "shared_first_target",
    "sliding_windows",
    "tokens_needed",
]
