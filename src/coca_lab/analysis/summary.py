"""Statistics of a layer as sums over texts, whose size does not depend on the text length.

Legend: H query heads, N pairs of tokens, P rotary pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from coca_lab.analysis.angles import (
    CASES,
    TURN,
    anomalous_distance,
    anomalous_share,
    anomalous_tokens,
    borders_crossed,
    farthest_key,
    figure_3_cases,
    initial_angles,
    signed_angles,
)
from coca_lab.analysis.decay import (
    BoundCheck,
    collinear_bound,
    rotary_bound,
    rotary_scores,
    steps,
)
from coca_lab.analysis.keys import SeenKeys
from coca_lab.analysis.sums import Sums


def numbers(values: Tensor | Sequence[float | None]) -> list[float | None]:
    """Plain numbers for JSON; None for values that are not finite."""
    found = values.tolist() if isinstance(values, Tensor) else values
    return [None if x is None or not math.isfinite(x) else float(x) for x in found]


class AngleSums(Sums):
    """Angles of one layer, their cases, anomalous tokens and borders.

    Pairs whose query or key is zero (in CoCA models, if the ReLU gives t = 0) have no angle: they
    are counted, and excluded from everything else.

    Args:
        theta: Angle per token of every rotary pair, (P,).
        lengths: Text lengths in tokens for anomalous tokens and borders.
        window: Sliding window of the layer in tokens; None for all.
        bins: Number of bins of the histogram over [0, 2π).
    """

    FIXED = ("theta", "lengths", "window", "bins")

    def __init__(
        self, theta: Tensor, lengths: Sequence[int], window: int | None, bins: int
    ) -> None:
        pairs = len(theta)
        self.theta, self.lengths, self.window, self.bins = theta, lengths, window, bins
        self.samples = 0
        self.angled = torch.zeros(pairs, dtype=torch.float64)
        self.histogram = torch.zeros(pairs, bins, dtype=torch.float64)
        self.direction = torch.zeros(pairs, dtype=torch.complex128)
        self.cases = torch.zeros(pairs, len(CASES), dtype=torch.float64)
        self.heads: Tensor | None = None
        self.weight = torch.zeros(2, dtype=torch.float64)
        self.largest = 0.0
        self.tau = torch.zeros(pairs, dtype=torch.float64)
        self.measured = torch.zeros(pairs, dtype=torch.float64)
        # By length: anomalous tokens and share, crossings of q_j, of -q_j, full turns.
        self.by_length = torch.zeros(len(lengths), 5, pairs, dtype=torch.float64)

    def add(self, query: Tensor, key: Tensor, distances: Tensor) -> None:
        """Add queries and keys (H, N, P), complex, with distances m - n (N,)."""
        if not len(distances):
            return
        size = (query * key.conj()).abs()
        angled = size > 0
        angles = initial_angles(query, key)
        cases = figure_3_cases(angles, distances)
        tau = anomalous_distance(angles, self.theta)

        def summed(x: Tensor) -> Tensor:
            return x.double().masked_fill(~angled, 0.0).sum((0, 1))

        self.samples += angled.shape[0] * angled.shape[1]
        self.angled += angled.sum((0, 1))
        bins = (angles / TURN * self.bins).long().clamp(max=self.bins - 1)
        bins += torch.arange(len(self.theta)) * self.bins
        counted = bins[angled].bincount(minlength=self.histogram.numel())
        self.histogram += counted.view_as(self.histogram)
        self.direction += torch.polar(angled.double(), angles).sum((0, 1))
        self.cases += torch.stack([summed(cases == case) for case in range(len(CASES))], dim=-1)
        above = (angles > math.pi) & angled
        by_head = torch.stack((above.sum((1, 2)), angled.sum((1, 2)))).double()
        self.heads = by_head if self.heads is None else self.heads + by_head
        self.weight += torch.stack((size[above].sum(), size.sum()))
        largest = signed_angles(query, key).abs().masked_fill(~angled, 0.0).max()
        self.largest = max(self.largest, float(largest))
        self.tau += summed(tau)
        self.measured += summed((distances > 0).unsqueeze(-1) & (distances.unsqueeze(-1) < tau))
        for index, length in enumerate(self.lengths):
            tokens = anomalous_tokens(tau, length, self.window)
            borders = borders_crossed(angles, self.theta, farthest_key(length, self.window))
            parts = (tokens, anomalous_share(tokens, length, self.window), *borders)
            self.by_length[index] += torch.stack([summed(part) for part in parts])

    def values(self) -> dict[str, Any]:
        """Plain JSON values, described in docs/analysis.md."""
        angled = self.angled
        total = self.cases.sum()
        rate = self.direction / angled
        mean = torch.remainder(rate.angle(), TURN)
        collinear = torch.floor(
            torch.tensor([farthest_key(n, self.window) for n in self.lengths]).unsqueeze(-1)
            * self.theta
            / math.pi
        )
        lengths = []
        for index, length in enumerate(self.lengths):
            tokens, share, peaks, troughs, returns = self.by_length[index] / angled
            lengths.append(
                {
                    "length": length,
                    "anomalous_tokens": numbers(tokens),
                    "anomalous_share": numbers(share),
                    "borders": {
                        "peaks": numbers(peaks),
                        "troughs": numbers(troughs),
                        "returns": numbers(returns),
                        "collinear": numbers(collinear[index]),
                    },
                }
            )
        heads = torch.zeros(2, 0) if self.heads is None else self.heads
        return {
            "samples": self.samples,
            "zero_share": numbers(1 - angled / self.samples),
            "cases": dict(zip(CASES, numbers(self.cases.sum(0) / total), strict=True)),
            "case_d": numbers(self.cases[:, CASES.index("d")] / angled),
            "case_d_by_head": numbers(heads[0] / heads[1]),
            "case_d_weight": numbers([float(self.weight[0] / self.weight[1])])[0],
            "largest": self.largest,
            "mean": numbers(mean),
            "concentration": numbers(rate.abs()),
            "histogram": [numbers(row) for row in self.histogram / angled.unsqueeze(-1)],
            "tau": numbers(self.tau / self.cases[:, CASES.index("d")]),
            "anomalous_share_read": numbers(self.measured / angled),
            "lengths": lengths,
        }


class DecaySums(Sums):
    """Scores of one layer by distance, their bounds, and the inequalities checked."""

    FIXED = ("theta",)

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta
        self.rotary, self.collinear, self.steps, self.score = (BoundCheck() for _ in range(4))
        self.by_distance: dict[int, Tensor] = {}

    def add(self, seen: SeenKeys, distances: Tensor) -> None:
        """Add queries and keys at these distances (N,)."""
        if not len(distances):
            return
        coefficients = seen.query * seen.effective.conj()  # h_j
        magnitudes = (seen.query * seen.built.conj()).abs()  # l_j of collinear keys
        size, collinear_size = coefficients.abs().sum(-1), magnitudes.sum(-1)
        score = rotary_scores(coefficients, distances, self.theta).abs()
        rotary = rotary_bound(coefficients, distances, self.theta)
        collinear = collinear_bound(magnitudes, distances, self.theta)
        self.rotary.add(score, rotary, size)
        at_zero = rotary_scores(magnitudes, distances, self.theta).abs()
        self.collinear.add(at_zero, collinear, collinear_size)
        self.steps.add(steps(coefficients.abs()), steps(coefficients), size.unsqueeze(-1))
        self.score.add(score, collinear, size)
        for distance in distances.unique().tolist():
            here = (distances == distance).unsqueeze(0) & (size > 0)
            parts = [(x[here] / size[here]).sum() for x in (score, rotary, collinear)]
            sums = torch.stack([*parts, here.sum().double()])
            self.by_distance[distance] = self.by_distance.get(distance, 0.0) + sums

    @property
    def checks(self) -> dict[str, BoundCheck]:
        """The inequalities by their names in results."""
        return {
            "eq19": self.rotary,
            "eq20": self.collinear,
            "eq21": self.steps,
            "score_against_eq20": self.score,
        }

    def values(self) -> dict[str, Any]:
        """Plain JSON values, described in docs/analysis.md."""
        rows = []
        for distance in sorted(self.by_distance):
            *sums, count = self.by_distance[distance]
            score, rotary, collinear = numbers(torch.stack(sums) / count)
            rows.append({"distance": distance, "score": score, "eq19": rotary, "eq20": collinear})
        checks = {name: asdict(check) for name, check in self.checks.items()}
        return {**checks, "by_distance": rows}
