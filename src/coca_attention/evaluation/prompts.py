"""Prompts of tasks that a model answers, and their settings."""

from dataclasses import dataclass, field
from typing import Any

from coca_attention.errors import UserError
from coca_attention.evaluation.task import check_at_least

LONGEST = 10**8
"""Tokens of a prompt at most."""


@dataclass
class PromptSettings:
    """Which prompts a model answers, and how."""

    lengths: list[int] = field(default_factory=lambda: [512, 1024])
    """Prompt lengths in tokens."""
    samples: int = 100
    """Prompts per length."""
    seed: int = 0
    """Random seed of the prompts."""
    max_new_tokens: int = 64
    """Maximum number of tokens in an answer."""
    batch_tokens: int = 16384
    """Prompt tokens per batch; a batch has at least one prompt."""
    use_cache: bool = True
    """Whether to decode with a key/value cache; the result is the same."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the fields of its record that are known before it is answered.

    Attributes:
        ids: Token ids.
        facts: JSON values; ``index`` is unique among the prompts of a kind and length.
    """

    ids: list[int]
    facts: dict[str, Any]


def check_prompts(settings: PromptSettings) -> None:
    """Raise UserError unless the numbers are in range."""
    if not settings.lengths:
        raise UserError("give at least one prompt length")
    for length in settings.lengths:
        if not 1 <= length <= LONGEST:
            raise UserError(f"lengths must be between 1 and {LONGEST} tokens, got {length}")
    check_at_least(settings, 1, "samples", "max_new_tokens", "batch_tokens")
    check_at_least(settings, 0, "seed")


def prompt_costs(settings: PromptSettings) -> list[int]:
    """Tokens read for the prompts of every length; a generated token counts four times."""
    return [
        settings.samples * (length + 4 * settings.max_new_tokens) for length in settings.lengths
    ]
