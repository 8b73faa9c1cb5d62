"""How relative the scores of a model are (App. D.4): what changes when all positions move alike.

    PYTHONPATH=. python -m studies.angles.shifts runs/quickstart/CoCA-Strict --source stdlib

prints the share of every layer's scores that depends on more than the distance, how much scores and
attention change when a text begins later, and what a token then costs: results/analysis.

Legend: H query heads, N sampled queries or pairs of tokens, T length, P rotary pairs.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from studies.angles.layers import (
    Layer,
    pairs_of_text,
    parser,
    read,
    read_layers,
    relative_parts,
    score_rows,
    seen,
)


def part_energies(layer: Layer, queries: Tensor, keys: Tensor) -> Tensor:
    """Summed squares of the relative and the absolute part of the scores of some pairs, (2,)."""
    query, key = seen(layer, queries, keys)
    if layer.form == "rope":
        return torch.stack(((query * key).abs().square().sum(), query.real.new_zeros(())))
    relative, absolute = relative_parts(layer, query)
    turns = layer.theta > 0  # the others do not depend on positions
    parts = torch.where(turns, relative, relative + absolute), absolute * turns
    return torch.stack([(key * part).abs().square().sum() for part in parts])


def changes(before: Tensor, after: Tensor, visible: Tensor) -> Tensor:
    """What changes between scores (H, N, T), of which queries see those in ``visible`` (N, T).

    The sums, (3,), are of the squared changes of scores and of their squared spread, both without
    the mean over a query's keys, which softmax ignores, and of the attention that moves to others.
    """

    def centred(scores: Tensor) -> Tensor:
        scores = scores.masked_fill(~visible, 0.0)
        mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        return (scores - mean).masked_fill(~visible, 0.0)

    old = before.masked_fill(~visible, float("-inf")).softmax(-1)
    new = after.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.stack(
        (
            centred(after - before).square().sum(),
            centred(before).square().sum(),
            (new - old).abs().sum() / 2,
        )
    )


def main() -> None:
    """Print the tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--shifts", type=int, nargs="+", default=[1, 16, 256, 4096])
    arguments.add_argument("--queries", type=int, default=16, help="sampled of a document (16)")
    options = arguments.parse_args()
    model, documents, _ = read(options)

    energies = []
    moved = []
    losses = []
    for number, document in enumerate(documents):
        length = len(document)
        layers, logits = read_layers(model, document)
        for layer in layers:
            generator = np.random.default_rng([options.seed, number, layer.index])
            drawn = pairs_of_text(layer, options.pairs, generator)
            energies.append([layer.index, *part_energies(layer, *drawn).tolist()])
            queries = torch.from_numpy(generator.integers(length, size=options.queries))
            distance = queries[:, None] - torch.arange(length)
            visible = (distance >= 0) & (distance <= layer.farthest(length))
            before = score_rows(layer, queries)
            for shift in options.shifts:
                found = changes(before, score_rows(layer, queries, shift), visible)
                moved.append([layer.index, shift, before[..., 0].numel(), *found.tolist()])
        for shift in [0, *options.shifts]:
            if shift:
                ids = document[None].to(model.device)
                places = torch.arange(length, device=model.device)[None] + shift
                with torch.no_grad():
                    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
            nats = F.cross_entropy(logits[:-1].cpu().double(), document[1:], reduction="sum")
            losses.append([shift, length - 1, float(nats)])

    parts: Any = pd.DataFrame(energies, columns=["layer", "relative", "absolute"])
    parts = parts.groupby("layer").sum()
    share = parts["absolute"] / parts.sum(axis="columns")
    print(share.rename("absolute share").map("{:.3f}".format).to_string(header=True))
    names = ["layer", "moved by", "rows", "changed", "spread", "attention"]
    sums: Any = pd.DataFrame(moved, columns=names).groupby(["layer", "moved by"]).sum()
    change = (sums["changed"] / sums["spread"]) ** 0.5
    figures = {"score change": change, "attention moved": sums["attention"] / sums["rows"]}
    print(pd.DataFrame(figures).map("{:.2g}".format).to_string())
    sums = pd.DataFrame(losses, columns=["moved by", "tokens", "nats"]).groupby("moved by").sum()
    print((sums["nats"] / sums["tokens"]).rename("nats a token").round(4).to_string(header=True))


if __name__ == "__main__":
    main()
