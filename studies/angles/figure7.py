"""Figure 7 of the paper (App. D.1): how often scores change their direction with distance.

    PYTHONPATH=. python -m studies.angles.figure7 runs/quickstart/RoFormer --source stdlib

prints the borders that the angle Θ_j + d θ_j of a pair crosses, on average, as the distance d grows
from 0 to the farthest key (Eq. 25): peaks at q_j, troughs at -q_j, and full turns, back at k_j.
Beside them are the peaks and troughs of a collinear key, whose Θ is 0.

Legend: H query heads, N pairs of tokens, P rotary pairs.
"""

import math
from typing import Any

import pandas as pd
from torch import Tensor

from studies.angles.layers import TURN, initial_angles, parser, read, sampled


def borders_crossed(angles: Tensor, theta: Tensor, distance: int) -> tuple[Tensor, Tensor, Tensor]:
    """Peaks, troughs and returns as m - n grows from 0, which does not count, to ``distance``."""
    # The slope of the score changes its sign where Θ_j + d θ_j passes a multiple of π: an even one
    # at q_j, an odd one at -q_j.
    swept = distance * theta
    start = angles / TURN
    end = (angles + swept) / TURN
    peaks = end.floor() - start.floor()
    troughs = (end + 0.5).floor() - (start + 0.5).floor()
    return peaks, troughs, (swept / TURN).floor().expand(angles.shape)


def main() -> None:
    """Print the table."""
    options = parser(__doc__).parse_args()
    model, documents, lengths = read(options)

    rows = []
    for layer, coefficients in sampled(model, documents, options):
        has_angle = coefficients.abs() > 0  # not where the ReLU gives t = 0
        angles = initial_angles(coefficients)
        for length in lengths:
            farthest = layer.farthest(length)
            row = {"layer": layer.index, "tokens": length, "angles": int(has_angle.sum())}
            crossed = borders_crossed(angles, layer.theta, farthest)
            for name, each in zip(("peaks", "troughs", "returns"), crossed, strict=True):
                row[name] = float(each[has_angle].sum())
            collinear = (farthest * layer.theta / math.pi).floor().expand(angles.shape)
            row["both at Θ = 0"] = float(collinear[has_angle].sum())
            rows.append(row)

    sums: Any = pd.DataFrame(rows).groupby(["layer", "tokens"]).sum()
    means: Any = sums.drop(columns="angles").div(sums["angles"], axis="index")
    print(means.round(2).assign(angles=sums["angles"]).to_string())


if __name__ == "__main__":
    main()
