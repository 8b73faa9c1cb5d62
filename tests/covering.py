"""Covering arrays: few cases in which every two values of different axes meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases with a value of every axis, for `pytest.mark.parametrize`; the same in every run."""
    values = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in values)))

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return {(i, j, case[i], case[j]) for i, j in combinations(range(len(case)), 2)}

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return [tuple(axis[k] for axis, k in zip(values, case, strict=True)) for case in chosen]


def pairs_slow(*axes: Iterable[Any]) -> list[Any]:
    """Those of `covering`, of which the ones that bring no value for the first time are slow."""
    cases, default, seen = covering(*axes), [], set()
    for case in cases:
        if not seen.issuperset(enumerate(case)):
            default.append(case)
            seen.update(enumerate(case))
    return mostly_slow(cases, default)


def mostly_slow(cases: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which those beside the default ones are slow."""
    default, slow = list(default), pytest.mark.slow
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    alone = [row if len(row) > 1 else row[0] for row in rows]
    return [
        case if case in default else pytest.param(*row, marks=slow)
        for case, row in zip(alone, rows, strict=True)
    ]
