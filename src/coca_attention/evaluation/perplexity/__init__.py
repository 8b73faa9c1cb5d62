"""Perplexity under a sliding window. README.md in this folder describes the task."""

from coca_attention.evaluation.perplexity.keys import key_tokens
from coca_attention.evaluation.perplexity.score import (
    TokenDocument,
    TokenScores,
    by_tokens_read,
    score_documents,
)
from coca_attention.evaluation.perplexity.task import (
    TASK,
    PerplexitySettings,
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
    "TASK",
    "PerplexitySettings",
    "TextSettings",
    "TokenDocument",
    "TokenScores",
    "Window",
    "WindowSettings",
    "by_tokens_read",
    "check_settings",
    "evaluate_perplexity",
    "key_tokens",
    "load_keys",
    "load_text",
    "score_documents",
    "shared_first_target",
    "sliding_windows",
    "tokens_needed",
]
