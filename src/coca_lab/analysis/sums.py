"""Sums over texts: objects that add up, and that JSON keeps to the last bit."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor


class Sums:
    """An object whose attributes are sums over texts; those named largest… are maxima.

    Attributes may be numbers, tensors, other sums, and lists and dictionaries of these; None where
    nothing has been added yet.
    """

    FIXED: ClassVar[tuple[str, ...]] = ()
    """Attributes that are no sums."""

    def _sums(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.FIXED}

    def merge(self, other: Self) -> None:
        """Add the sums over other texts."""
        for name, value in other._sums().items():
            setattr(self, name, _merged(name, getattr(self, name), value))

    def pack(self) -> dict[str, Any]:
        """The sums as JSON values."""
        return {name: _packed(value) for name, value in self._sums().items()}

    def unpack(self, content: dict[str, Any]) -> Self:
        """Take over the sums that `pack` gave; returns this object."""
        for name, value in content.items():
            setattr(self, name, _unpacked(getattr(self, name), value))
        return self


def _merged(name: str, mine: Any, theirs: Any) -> Any:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    if isinstance(mine, Sums):
        mine.merge(theirs)
        return mine
    if isinstance(mine, list):
        return [_merged(name, *each) for each in zip(mine, theirs, strict=True)]
    if isinstance(mine, dict):
        return {key: _merged(name, mine.get(key), theirs.get(key)) for key in {**mine, **theirs}}
    return max(mine, theirs) if name.startswith("largest") else mine + theirs


def _packed(value: Any) -> Any:
    if isinstance(value, Sums):
        return value.pack()
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _packed(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        return (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return value


def _unpacked(mine: Any, content: Any) -> Any:
    """The value that `_packed` gave, of the type of what it takes the place of."""
    if isinstance(mine, Sums):
        return mine.unpack(content)
    if isinstance(mine, list):
        return [_unpacked(*each) for each in zip(mine, content, strict=True)]
    if isinstance(content, dict):
        return {int(key): _unpacked(None, each) for key, each in content.items()}
    if isinstance(content, list):
        found = torch.tensor(content, dtype=torch.float64)
        return torch.view_as_complex(found) if _is_complex(mine) else found
    return content


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()
