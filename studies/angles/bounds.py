"""The paper's bounds on scores (Eq. 19 to 21, App. D.2), and the scores by distance.

    PYTHONPATH=. python -m studies.angles.bounds runs/quickstart/RoFormer --source stdlib

counts how often the inequalities are violated, and draws the mean score and its bounds at the
distances 1, 2, 4, …, as shares of Σ_j |q_j| |k_j|.

Legend: H query heads, N pairs of tokens, P rotary pairs; coefficients h_j and l_j are of
`score_coefficients`, (H, N, P).
"""

from typing import Any

import altair
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from studies.angles.layers import pairs_at, parser, read, read_layers, score_coefficients

ROUND_OFF = 1e-9
"""By how much a left side may exceed its right side, relative to the summed magnitudes."""
LINES = ("score", "bound for any angles (Eq. 19)", "bound for angles of 0 (Eq. 20)")


def steps(coefficients: Tensor) -> Tensor:
    """|x_{i+1} - x_i| of neighbouring pairs, (..., P), with zero after the last."""
    # Both bounds, by Abel's summation by parts, need this zero, which the paper does not state:
    # coefficients that are all equal would be bounded by 0.
    zero = torch.zeros_like(coefficients[..., :1])
    return torch.cat((coefficients, zero), dim=-1).diff(dim=-1).abs()


def rotations(distances: Tensor, theta: Tensor) -> Tensor:
    """e^{i d θ_j}: (N,) and (P,) to (N, P), complex128."""
    angles = distances.double().unsqueeze(-1) * theta
    return torch.polar(torch.ones_like(angles), angles)


def rotary_scores(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """a(d) = Re Σ_j h_j e^{i d θ_j} (Eq. 2), (..., N)."""
    return (coefficients * rotations(distances, theta)).sum(-1).real


def rotary_bound(coefficients: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 19: max_i |h_{i+1} - h_i| Σ_j |S_{j+1}|."""
    sums = rotations(distances, theta).cumsum(-1)
    return steps(coefficients).amax(-1) * sums.abs().sum(-1)


def collinear_bound(magnitudes: Tensor, distances: Tensor, theta: Tensor) -> Tensor:
    """Right side of Eq. 20: max_i |l_{i+1} - l_i| Σ_j |C_{j+1}|. A bound if all Θ_j are 0."""
    sums = rotations(distances, theta).real.cumsum(-1)
    return steps(magnitudes).amax(-1) * sums.abs().sum(-1)


def violations(left: Tensor, right: Tensor, size: Tensor) -> int:
    """How often ``left`` exceeds ``right`` beyond the round-off of terms of summed ``size``."""
    return int((left > right + ROUND_OFF * size).sum())


def main() -> None:
    """Print the tables, and draw the chart."""
    arguments = parser(__doc__)
    arguments.add_argument("--chart", default="bounds.svg", help="file to draw (bounds.svg)")
    options = arguments.parse_args()
    model, documents, _ = read(options)

    counts = []
    means = []
    for number, document in enumerate(documents):
        for layer in read_layers(model, document)[0]:
            generator = np.random.default_rng([options.seed, number, layer.index])
            theta = layer.theta
            powers = 2 ** np.arange(layer.farthest(len(document)).bit_length())
            each = np.repeat(powers, options.pairs // len(powers))
            queries, keys = pairs_at(each, len(document), generator)
            distances = queries - keys
            h, magnitudes = score_coefficients(layer, queries, keys)
            size = h.abs().sum(-1)
            score = rotary_scores(h, distances, theta).abs()
            rotary = rotary_bound(h, distances, theta)
            collinear = collinear_bound(magnitudes, distances, theta)
            at_zero = rotary_scores(magnitudes, distances, theta).abs()
            found = {
                "layer": layer.index,
                "scores": score.numel(),
                "Eq. 19": violations(score, rotary, size),
                "Eq. 20, at Θ = 0": violations(at_zero, collinear, magnitudes.sum(-1)),
                "Eq. 21": violations(steps(h.abs()), steps(h), size.unsqueeze(-1)),
                "Eq. 20 by the scores": violations(score, collinear, size),
            }
            counts.append(found)
            shares = torch.stack((score, rotary, collinear), dim=-1) / size.unsqueeze(-1)
            for distance in powers.tolist():
                here = (distances == distance) & (size > 0)
                means.append([distance, *shares[here].mean(0).tolist()])

    print("Violations; the last column is no inequality of the paper unless Θ = 0:")
    print(pd.DataFrame(counts).groupby("layer").sum().to_string())
    by_distance: Any = pd.DataFrame(means, columns=["distance", *LINES]).groupby("distance").mean()
    print(by_distance.map("{:.3g}".format).to_string())

    points: Any = by_distance.reset_index().melt("distance", var_name="line")
    log = altair.Scale(type="log")
    altair.Chart(points).mark_line(point=True).encode(
        x=altair.X("distance:Q", title="distance m - n (tokens)", scale=log),
        y=altair.Y("value:Q", title="share of the sum of |q||k|", scale=log),
        color=altair.Color("line:N", title=None),
    ).save(options.chart)


if __name__ == "__main__":
    main()
