"""Settings of the analyses."""

from dataclasses import dataclass, field

from coca_attention.errors import UserError


@dataclass
class AnalysisSettings:
    """Settings of the analysis."""

    max_documents: int = 8
    """Maximum number of documents to read."""
    max_tokens: int | None = None
    """Truncate documents to this many tokens; default: the training length, at most 2,048."""
    lengths: list[int] = field(default_factory=list)
    """Text lengths in tokens at which to count anomalous tokens and borders; default: 1, 4 and 16
    times the training length."""
    pairs: int = 1024
    """(query, key) pairs sampled from every document for the angles."""
    pairs_per_distance: int = 64
    """(query, key) pairs sampled from every document at each distance 1, 2, 4, … for the bounds."""
    bins: int = 36
    """Number of bins of the angle histograms."""
    shifts: list[int] = field(default_factory=lambda: [1, 16, 256, 4096])
    """Shifts of all positions to compare, in tokens; may be empty."""
    shift_queries: int = 16
    """Queries sampled from every document for comparing scores under a shift."""
    judged: int = 128
    """Positions sampled from every document for comparing predictions under a shift."""
    seed: int = 0
    """Random seed."""


def check_settings(settings: AnalysisSettings) -> None:
    """Raise UserError unless every value is in range."""
    least = {"max_documents": 1, "pairs": 1, "pairs_per_distance": 1, "bins": 2}
    least |= {"shift_queries": 1, "judged": 1, "seed": 0}
    for name, smallest in least.items():
        if getattr(settings, name) < smallest:
            raise UserError(f"{name} must be at least {smallest}, got {getattr(settings, name)}")
    if settings.max_tokens is not None and settings.max_tokens < 2:
        raise UserError(f"max_tokens must be at least 2, got {settings.max_tokens}")
    for name, smallest in (("lengths", 2), ("shifts", 1)):
        values = getattr(settings, name)
        if any(value < smallest for value in values):
            raise UserError(f"{name} must each be at least {smallest} tokens, got {values}")
        if len(set(values)) < len(values):
            raise UserError(f"{name} must not contain duplicates, got {values}")


@dataclass
class RetrievalSettings:
    """Which passkey prompts to read."""

    passkeys: list[int] = field(default_factory=list)
    """Lengths of passkey prompts in tokens: measures where the attention of their answers goes,
    instead of the angles on a text."""
    prompts: int = 10
    """Passkey prompts per length, the same as those of coca eval passkey."""
    near: int = 32
    """Nearest tokens, the query's own included, whose share of the attention is measured."""
    seed: int = 0
    """Random seed."""


def check_retrieval(settings: RetrievalSettings) -> None:
    """Raise UserError unless every value is in range."""
    for name in ("prompts", "near"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if any(length < 1 for length in settings.passkeys):
        raise UserError(f"passkeys must each be at least 1 token, got {settings.passkeys}")
    if len(set(settings.passkeys)) < len(settings.passkeys):
        raise UserError(f"passkeys must not contain duplicates, got {settings.passkeys}")
