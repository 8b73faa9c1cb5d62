"""Figure 3 of the paper: angles Θ between queries and keys, and the tokens whose scores rise.

    PYTHONPATH=. python -m studies.angles.figure3 runs/quickstart/RoFormer --source stdlib

prints a row a layer and draws how often every angle occurs. A causal model has two of the figure's
cases: (b), Θ ≤ π, and (d), Θ > π, where the score rises with distance up to τ = (2π - Θ) / θ.

Legend: H query heads, N pairs of tokens, P rotary pairs.
"""

import math
from typing import Any

import altair
import pandas as pd
import torch
from torch import Tensor

from studies.angles.layers import TURN, initial_angles, parser, read, sampled


def anomalous_share(angles: Tensor, theta: Tensor, length: int, farthest: int) -> Tensor:
    """Share of the (m, n) pairs of a text of ``length`` tokens that are nearer than τ_j."""
    rises = (angles > math.pi) & (theta > 0)  # a pair that does not turn never rises
    tau = torch.where(rises, (TURN - angles) / theta, 0.0)
    tokens = (tau.ceil() - 1).clamp(0, farthest)
    # There are L - d pairs at distance d, so c L - c (c + 1) / 2 up to distance c.
    every = farthest * length - farthest * (farthest + 1) / 2
    return (tokens * length - tokens * (tokens + 1) / 2) / every


def main() -> None:
    """Print the table, and draw the chart."""
    arguments = parser(__doc__)
    arguments.add_argument("--bins", type=int, default=36, help="of the chart (36)")
    arguments.add_argument("--chart", default="figure3.svg", help="file to draw (figure3.svg)")
    options = arguments.parse_args()
    model, documents, lengths = read(options)

    rows = []
    bins = []
    for layer, coefficients in sampled(model, documents, options):
        has_angle = coefficients.abs() > 0  # not where the ReLU gives t = 0
        angles = initial_angles(coefficients)
        row: dict[str, float] = {"layer": layer.index, "angles": int(has_angle.sum())}
        row["Θ > π"] = int((angles > math.pi)[has_angle].sum())
        for length in lengths:
            shares = anomalous_share(angles, layer.theta, length, layer.farthest(length))
            row[f"anomalous at {length:,} tokens"] = float(shares[has_angle].sum())
        rows.append(row)
        bins.append(torch.histc(angles[has_angle], options.bins, min=0, max=TURN).tolist())

    sums: Any = pd.DataFrame(rows).groupby("layer").sum()
    shares: Any = sums.drop(columns="angles").div(sums["angles"], axis="index")
    print(shares.map("{:.1%}".format).assign(angles=sums["angles"]).to_string())

    degrees = [360 * (place + 0.5) / options.bins for place in range(options.bins)]
    counts: Any = pd.DataFrame(bins, [row["layer"] for row in rows], degrees).groupby(level=0).sum()
    density: Any = counts.mul(options.bins).div(sums["angles"], axis="index")
    points: Any = density.rename_axis("layer").reset_index().melt("layer", var_name="degrees")
    altair.Chart(points).mark_line().encode(
        x=altair.X("degrees:Q", title="angle Θ from key to query (degrees)"),
        y=altair.Y("value:Q", title="density (1: uniform)"),
        color="layer:N",
    ).save(options.chart)


if __name__ == "__main__":
    main()
