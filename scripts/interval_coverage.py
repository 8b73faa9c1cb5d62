"""How often the 95 % intervals of perplexities and means contain the truth, by simulation.

Documents are drawn from populations made of the per-document scores in results/: a document of the
file at random, its nats per token moved by half a standard deviation (Student's t with 5 degrees
of freedom, so that tails are heavy), its number of tokens by 30 % (log-normal). The truth is the
nats per token of a million of them. Prints a table for results/README.md.

.venv/bin/python scripts/interval_coverage.py [--samples 4000]
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coca_lab.intervals import (
    DocumentScore,
    mean_interval,
    paired_ratio_interval,
    perplexity_interval,
)

RESULTS = Path(__file__).parents[1] / "results"
DOCUMENTS, SEEDS = (2, 4, 8, 12, 20, 30), (3, 5)
POPULATIONS: dict[str, tuple[str, str | None]] = {
    "20 books, equal tokens": ("books/results.json", None),
    "30 files, equal tokens": ("quickstart/seed-0.json", None),
    "30 files, the tokens of 8 whole ones": ("quickstart/seed-0.json", "long-context/results.json"),
    "13 files, 555 to 6,207 tokens": ("conversion/passkeys.json", None),
}
OUTLIER = {"8 files, one unlike the others": ("long-context/results.json", None)}
OTHERS = {"long-context/results.json": "Roles, strict"}
"""The model that another is compared with, where it is not the second."""
Draw = Callable[[int], np.ndarray]


def cells(content: Any) -> Iterator[dict[str, Any]]:
    """The perplexity cells of a result file, of all seeds."""
    if isinstance(content, dict):
        if content.get("task") == "perplexity" and content.get("documents"):
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for part in content:
            yield from cells(part)


def scores(file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nats per token of a model's documents, another model's against them, and the tokens."""
    found = list(cells(json.loads((RESULTS / file).read_text())))
    one, models = found[0], list(dict.fromkeys(cell["model"] for cell in found))
    name = OTHERS.get(file, models[1])
    other = next(c for c in found if c["model"] == name and c["window"] == one["window"])
    tokens = np.array([document["tokens"] for document in one["documents"]], dtype=float)
    own, others = (np.array([d["nats"] for d in c["documents"]]) / tokens for c in (one, other))
    return own, others - own, tokens


def population(means: np.ndarray, tokens: np.ndarray, together: bool, seed: int) -> Draw:
    """A function that draws documents: (documents, 2), nats and tokens."""
    generator = np.random.default_rng(seed)
    centre, spread = means.mean(), means.std(ddof=1)

    def draw(count: int) -> np.ndarray:
        chosen = generator.integers(len(means), size=count)
        moved = spread / 2 * generator.standard_t(5, count) * math.sqrt(3 / 5)
        mean = centre + (means[chosen] - centre + moved) / math.sqrt(1.25)
        other = chosen if together else generator.integers(len(tokens), size=count)
        length = tokens[other] * np.exp(generator.normal(0, 0.3, count))
        return np.stack([mean * length, length], axis=1)

    return draw


def coverage(draw: Draw, documents: int, samples: int, paired: bool) -> float:
    """Share of samples whose interval contains the truth."""
    nats, tokens = draw(1_000_000).sum(axis=0)
    truth, hits = math.exp(nats / tokens), 0
    for sample in draw(documents * samples).reshape(samples, documents, 2):
        found = [DocumentScore("", *document) for document in sample]
        base = [DocumentScore("", 0.0, document.tokens) for document in found]
        low, high = paired_ratio_interval(found, base) if paired else perplexity_interval(found)
        hits += low <= truth <= high
    return hits / samples


def seeds_coverage(seeds: int, samples: int) -> float:
    """The same for means over seeds: log perplexities about the mean of their trial."""
    runs: dict[str, dict[int, float]] = {}  # by model and seed, in the shortest window
    for cell in cells(json.loads((RESULTS / "long-context/results.json").read_text())):
        trials = runs.setdefault(cell["model"], {})
        trials.setdefault(cell["training_seed"], math.log(cell["perplexity"]))
    values = [np.array(list(trials.values())) for trials in runs.values()]
    rest = np.concatenate([each - each.mean() for each in values])
    generator = np.random.default_rng(0)
    drawn = generator.choice(rest, (samples, seeds)) + generator.normal(
        0, rest.std() / 2, (samples, seeds)
    )
    found = [mean_interval(list(sample)) for sample in drawn]
    return float(np.mean([low <= 0 <= high for low, high in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    samples = parser.parse_args().samples
    print(f"| documents | | {' | '.join(map(str, DOCUMENTS))} |\n|{'---|' * (2 + len(DOCUMENTS))}")
    for seed, (name, (file, lengths)) in enumerate({**POPULATIONS, **OUTLIER}.items()):
        near, change, own = scores(file)
        tokens = own if lengths is None else scores(lengths)[2]
        for label, means in (("perplexity", near), ("ratio", change)):
            draw = population(means, tokens, lengths is None, seed)
            row = [coverage(draw, n, samples, label == "ratio") for n in DOCUMENTS]
            print(f"| {name} | {label} | {' | '.join(f'{share:.3f}' for share in row)} |")
    shares = ", ".join(f"{n} seeds {seeds_coverage(n, samples):.3f}" for n in SEEDS)
    print(f"\nMeans over seeds: {shares}")


if __name__ == "__main__":
    main()
