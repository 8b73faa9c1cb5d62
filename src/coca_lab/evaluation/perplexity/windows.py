"""Which tokens each position of a sliding window reads and scores: pure arithmetic, no model."""

from collections.abc import Iterator
from dataclasses import dataclass

from coca_attention.errors import UserError


@dataclass(frozen=True)
class Window:
    """One forward pass over tokens[start:stop] that scores tokens[first_target:stop + 1].

    Token i is predicted from the tokens before it, so the last input, stop - 1, predicts token
    stop.
    """

    start: int
    stop: int
    first_target: int

    @property
    def inputs(self) -> int:
        """Number of tokens read."""
        return self.stop - self.start

    @property
    def targets(self) -> int:
        """Number of tokens scored."""
        return self.stop + 1 - self.first_target


def sliding_windows(
    length: int, window: int, stride: int, first_target: int = 1
) -> Iterator[Window]:
    """Windows that together score every token from ``first_target`` on exactly once.

    The targets are split into runs of ``stride`` tokens; the last run can be shorter. Each run is
    predicted from the ``window`` tokens that end just before its last target, or from fewer at the
    beginning of the document. A target with enough text before it therefore has between
    window - stride + 1 and window tokens of context.

    Args:
        length: Tokens in the document.
        window: Maximum number of tokens read in one pass.
        stride: Targets of one pass.
        first_target: Index of the first target, at least 1: token 0 has no context.

    Raises:
        UserError: If a size is out of range.
    """
    check_sizes(window, stride)
    if first_target < 1:
        raise UserError(f"the first target must be token 1 or later, got {first_target}")
    for first in range(first_target, length, stride):
        stop = min(first + stride, length) - 1
        yield Window(max(stop - window, 0), stop, first)


def shared_first_target(windows: list[int], stride: int) -> int:
    """First token that has at least window - stride + 1 tokens before it at every window size."""
    return max(windows) - stride + 1


def check_sizes(window: int, stride: int) -> None:
    """Raise UserError unless 1 <= stride <= window."""
    if window < 1:
        raise UserError(f"the window must be at least 1 token, got {window}")
    if stride < 1:
        raise UserError(f"the stride must be at least 1 token, got {stride}")
    if stride > window:
        raise UserError(
            f"the stride ({stride} tokens) must not exceed the window ({window}): the tokens in "
            "between would never be scored"
        )
