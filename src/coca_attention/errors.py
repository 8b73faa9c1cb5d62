"""Errors that the user can fix, checks of numbers, and the words of their messages."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, metadata
from numbers import Integral, Real
from typing import TypeGuard


class UserError(ValueError):
    """An error that the user can fix: in a file, a setting or an argument.

    The message says what was expected, what was received, and what to do.
    """


RENAMED = {"max_distance": "near", "attention": "form"}
"""Names of settings in earlier versions or in recipes, and those that they have elsewhere."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown word: known ones that are near, or ``otherwise``.

    Near are up to five that begin with it, and that of the most letters in common.
    """
    known = list(known)
    start, dot, last = word.replace("max-distance", "max_distance").rpartition(".")
    renamed = start + dot + last.replace(last.lstrip("-"), RENAMED.get(last.lstrip("-"), last))
    if renamed in known:
        return f"; it is called {renamed} here"
    near = get_close_matches(word, known, n=1)
    begun = [name for name in known if len(word) > 2 and name.startswith(word)]
    if len(begun) <= 5:  # more would be a list of its own
        near = list(dict.fromkeys([*near, *begun]))
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def published_at() -> str:
    """The address of the source: ``Source`` of pyproject.toml's URLs, empty until it has one."""
    with suppress(PackageNotFoundError):
        urls = metadata("coca-attention").get_all("Project-URL") or []
        return dict(url.split(", ", 1) for url in urls).get("Source", "")
    return ""


def install(extra: str = "") -> str:
    """How to install this package, with an extra: a command line."""
    extras, source = f"[{extra}]" if extra else "", published_at()
    if source:
        return f"pip install 'coca-attention{extras} @ git+{source}'"
    return f"pip install -c constraints.txt '.{extras}'  # in a clone of coca-attention"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(
    name: str,
    value: object,
    lowest: int = 1,
    highest: int | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise ``error`` unless a value is a whole number in a range; True is none."""
    if not _is_whole(value) or value < lowest or (highest is not None and value > highest):
        limits = f"of at least {lowest:,}"
        if highest is not None:
            limits = f"between {lowest:,} and {highest:,}"
        raise error(f"{name} must be a whole number {limits}, got {value!r}")


def check_real(
    name: str,
    value: object,
    lowest: float = 0,
    highest: float = math.inf,
    *,
    above: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise ``error`` unless a value is a finite number in a range, ``above``: without its end."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    fits = lowest <= number <= highest and math.isfinite(number)
    if not fits or (above and number == lowest):
        limits = f"{'above' if above else 'from'} {lowest}"
        limits += f" to {highest}" if highest < math.inf else ""
        raise error(f"{name} must be a finite number {limits}, got {value!r}")


def check_is_loaded(model: object) -> None:
    """Raise UserError for a path, a name, None or whatever else is there in place of a model."""
    if not callable(model):
        raise UserError(
            f"expected a loaded model, got {model!r}: load it first, for example by "
            "AutoModelForCausalLM.from_pretrained; the commands coca extend and coca convert take "
            "its folder or name"
        )
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UserError(
            f"expected a Transformers model, got {name}: for a module of your own use "
            "CoCAAttention as its attention layer"
        )


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Begin the message of every UserError raised in the context with a prefix."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{prefix}{error}") from error
