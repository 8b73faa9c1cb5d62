"""The tables of results/extension, from what `coca study extension` and Self-Extend have measured.

PYTHONPATH=src:. python -m studies.extension
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from coca_lab.files import read_json
from studies.pages import markdown, mean_and_interval
from studies.pages import write_tables as write_page

RESULTS = Path("results/extension")
SELF_EXTEND = "trials/self-extend.json"
FAR = 4096
NAMES = {"base": "as it is", "base, dynamic": "dynamic NTK", "base, yarn": "YaRN"}


def read_cells() -> pd.DataFrame:
    """A row for every way and base: log perplexities by window, shares of passkeys by length."""
    files = (RESULTS / "results.json", RESULTS / SELF_EXTEND)
    cells = pd.DataFrame(cell for file in files for cell in read_json(file)["results"])
    scaled = cells.scaling.fillna("none").map(lambda kind: "" if kind == "none" else f", {kind}")
    cells["way"] = (cells.model + scaled).replace(NAMES)
    text = cells.task == "perplexity"
    cells["value"] = (cells.nats / cells.tokens).where(text, cells.accuracy)
    cells["at"] = cells.window.where(text, cells.length).astype(int)
    return cells.pivot_table(index=["way", "training_seed"], columns=["task", "at"], values="value")


def table(cells: pd.DataFrame, ways: list[str], reference: str) -> Iterator[list[str]]:
    """Means over bases, and the ratio of perplexities at 4,096 tokens to those of one way."""
    texts = cells["perplexity"]
    keys = cells["passkey"]
    yield [
        "",
        *(f"perplexity {window:,}" for window in texts),
        *(f"passkeys {length:,}" for length in keys),
        f"{reference}: ratio at {FAR:,}",
    ]
    for way in ways:
        means = (f"{math.exp(nats):.1f}" for nats in texts.loc[way].mean())
        shares = (f"{share:.2f}" for share in keys.loc[way].mean())
        yield [way, *means, *shares, "" if way == reference else ratio(texts, way, reference)]


def ratio(texts: pd.DataFrame, way: str, reference: str) -> str:
    """Paired ratio of perplexities over the bases, with Student's 95 % interval."""
    differences = (texts.loc[way][FAR] - texts.loc[reference][FAR]).tolist()
    return mean_and_interval(differences, lambda nats: f"{math.exp(nats):.2f}")


def write_tables() -> None:
    """Write the tables into the page: ways without training, then trained ones."""
    cells = read_cells()
    ways = list(dict.fromkeys(cells.index.get_level_values("way")))
    after = [way for way in ways if ", trained" in way]
    by_way = cells["perplexity"][FAR].groupby("way").mean()
    best = min((way for way in after if way.startswith("limited")), key=by_way.__getitem__)
    before = sorted(set(ways) - set(after), key=by_way.__getitem__)
    bodies = [
        markdown(table(cells, before, "limited distances")),
        markdown(table(cells, ["limited distances", *sorted(after, key=by_way.__getitem__)], best)),
    ]
    write_page(RESULTS / "README.md", "\n\n".join(bodies))


if __name__ == "__main__":
    write_tables()
