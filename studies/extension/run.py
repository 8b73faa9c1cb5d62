"""Self-Extend on the bases of the study `extension`, and the tables of results/extension.

PYTHONPATH=src:. python -m studies.extension.run self-extend   # after coca study extension
PYTHONPATH=src:. python -m studies.extension.run table
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from coca_lab.data import load_tokenizer
from coca_lab.data.tasks import ask_for_passkeys, is_hit
from coca_lab.evaluation.perplexity import load_text
from coca_lab.evaluation.windows import score_documents, shared_first_target
from coca_lab.files import read_json, write_json
from coca_lab.generation import greedy_answers
from coca_lab.loading import load_model
from coca_lab.studies import load_study
from studies.pages import markdown, mean_and_interval
from studies.pages import write_tables as write_page
from studies.smollm2.self_extend import self_extend

RUNS, RESULTS = Path("runs/extension"), Path("results/extension")
SELF_EXTEND = "trials/self-extend.json"
NEAR = (128, 32)
"""Windows of Self-Extend: half and an eighth of the training length of 256, as for SmolLM2."""
FAR = 4096
NAMES = {"base": "as it is", "base, dynamic": "dynamic NTK", "base, yarn": "YaRN"}


def measure_self_extend() -> None:
    """Write perplexities and passkeys of every base with every window of Self-Extend."""
    torch.set_num_threads(1)
    study, cells = load_study("extension"), []
    text, keys = study.tasks["perplexity"], study.tasks["passkey"]
    first = shared_first_target(text.windows, text.step)
    for seed in study.seeds:
        folder = RUNS / (f"base-seed-{seed}" if seed else "base")
        tokenizer = load_tokenizer(folder)
        documents = load_text(text, tokenizer, at_least=max(text.windows) + 1)
        for near in NEAR:
            about = {"model": f"Self-Extend, window {near}", "training_seed": seed}
            for window in text.windows:
                model = load_model(folder, device="cpu")
                self_extend(model, window, window=near)
                scores = score_documents(
                    model, documents, window=window, stride=text.step, first_target=first
                )
                nats, tokens = sum(s.nats for s in scores), sum(s.tokens for s in scores)
                facts = {"window": window, "nats": nats, "tokens": tokens}
                cells.append({**about, "task": "perplexity", **facts})
            for length in keys.lengths:
                model = load_model(folder, device="cpu")
                self_extend(model, length + keys.max_new_tokens, window=near)
                hits = found(model, tokenizer, length, keys)
                facts = {"length": length, "accuracy": sum(hits) / len(hits)}
                cells.append({**about, "task": "passkey", **facts})
            print(*cells[-7:], sep="\n", flush=True)
    write_json(RESULTS / SELF_EXTEND, {"results": cells})


def found(model: Any, tokenizer: Any, length: int, keys: Any) -> list[bool]:
    """Whether each passkey of the study's prompts is in the answer."""
    prompts = ask_for_passkeys(tokenizer, length, range(keys.samples), seed=keys.seed)
    hits = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        (answer,) = greedy_answers(model, tokenizer, ids, max_new_tokens=keys.max_new_tokens)
        hits.append(is_hit(answer, prompt.facts["key"]))
    return hits


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
    texts, keys = cells["perplexity"], cells["passkey"]
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
    {"self-extend": measure_self_extend, "table": write_tables}[sys.argv[1]]()
