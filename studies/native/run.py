"""The study of results/native: trains and evaluates every trial that has no file yet.

    PYTHONPATH=src:. python studies/native/run.py run    # what is missing, for as long as it takes
    PYTHONPATH=src:. python studies/native/run.py table  # write the tables of results/native

A trial is an arm of arms.yaml with a seed: `coca train` with the options of its arm, in a process
of its own that resumes, then the measurements in this one, and one JSON file.
"""

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from coca_lab.arguments import option_words
from coca_lab.data import encode_documents, held_out, load_tokenizer, read_documents
from coca_lab.data.tasks import ask_for_passkeys, is_hit
from coca_lab.environment import describe_environment
from coca_lab.evaluation.windows import (
    TokenDocument,
    score_documents,
    shared_first_target,
)
from coca_lab.files import read_json, write_json
from coca_lab.generation import greedy_answers
from coca_lab.intervals import mean_interval
from coca_lab.loading import load_model
from studies.verdict.rule import markdown

HERE = Path(__file__).parent
TRIALS, RUNS = Path("results/native/trials"), Path("runs/native")
SEEDS = range(5)
LENGTH = 256

HELD_OUT = 0.2
STRIDE = 128
# Windows whose targets are the same, and the tokens read of a document.
TEXTS = {4096: ([256, 1024, 4096], 4608), 16384: ([256, 4096, 16384], 16640)}
PASSKEYS = {256: 50, 512: 50, 1024: 50, 4096: 50, 16384: 20}
PASSKEY_SEED = 1
ANSWER = 32
FOUND = 0.95
"""Share of passkeys at L from which on a run has learned to retrieve."""
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
FOLDED = (4, 16, 64)
"""Contexts, in training lengths, whose factor is folded into trained queries."""
WITH_DECAY = {
    "decay": ("native", "no-sinks", "temperature", "random-context", "low-sinks"),
    "neox-decay": ("neox-no-sinks", "neox-temperature"),
    "decay-12": ("embedding-12",),
}
"""Arms without a decay, by the one with it in a like body."""


def read_arms() -> dict[str, dict[str, Any]]:
    """The arms by name, in their order."""
    return yaml.safe_load((HERE / "arms.yaml").read_text(encoding="utf-8"))


def run() -> None:
    """Run what is missing, seed by seed, so that a study cut short has compared all arms."""
    TRIALS.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for arm, about in read_arms().items():
            file = TRIALS / f"{arm}-{seed}.json"
            if not file.exists():
                print(f"{time.strftime('%F %T')} {arm} {seed}", flush=True)
                write_json(file, trial(arm, about, seed))


def trial(arm: str, about: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train, which goes on from the last checkpoint, and measure."""
    folder = RUNS / f"{arm}-{seed}"
    options = {**about.get("options", {}), "training.seed": seed}
    command = [sys.executable, "-m", "coca_lab.cli", "train", str(HERE / "recipe.yaml")]
    subprocess.run(
        [*command, *option_words(options), "--output", str(folder)],
        check=True,
        env=os.environ | {"COCA_IMPORT": about.get("module", ""), "PYTHONPATH": _path()},
    )
    start = time.monotonic()
    trained = read_json(folder / "training.json")
    result = {
        "arm": arm,
        "seed": seed,
        "options": options,
        "module": about.get("module"),
        **{name: trained[name] for name in ("parameters", "steps", "tokens", "seconds")},
        "curve": [[entry["step"], entry["loss"]] for entry in trained["curve"]],
        "validation": trained["validation"],
        "measured": measure(folder),
        "evaluation_seconds": round(time.monotonic() - start),
        "environment": describe_environment(),
    }
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _path() -> str:
    return os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


def measure(folder: Path) -> dict[str, Any]:
    """Perplexity and passkeys of a model, and of it with every factor of `FOLDED` if it can."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    texts = _documents(tokenizer)
    found = {"as trained": {"text": _text(model, texts), "passkeys": _passkeys(model, tokenizer)}}
    if _global_queries(model) and not model.config.rope_parameters.get("temperature"):
        for times in FOLDED:
            with folded(model, times * LENGTH):
                short = {4096: ([256, 4096], TEXTS[4096][1])}
                found[f"folded for {times} L"] = {
                    "text": _text(model, texts, short),
                    "passkeys": _passkeys(model, tokenizer),
                }
    return found


@contextmanager
def folded(model: Any, context: int) -> Any:
    """Inside, the scores of global layers are multiplied by ln(context + 1) / ln(L + 1)."""
    factor = math.log(context + 1) / math.log(LENGTH + 1)
    saved = [query.weight.detach().clone() for query in _global_queries(model)]
    with torch.no_grad():
        for query in _global_queries(model):
            query.weight.mul_(factor)
    yield
    with torch.no_grad():
        for query, weight in zip(_global_queries(model), saved, strict=True):
            query.weight.copy_(weight)


def _global_queries(model: Any) -> list[Any]:
    """Query projections of the layers that see the whole text, where they are separate modules."""
    layers = zip(model.base_model.layers, model.config.layer_types, strict=True)
    chosen = [getattr(x, "self_attn", x) for x, kind in layers if kind == "full_attention"]
    return [x.q_proj for x in chosen if hasattr(x, "q_proj")]


def _documents(tokenizer: Any) -> list[tuple[str, list[int]]]:
    chosen = (document for document in read_documents("stdlib") if held_out(document, HELD_OUT))
    return [(document.id, ids) for document, ids in encode_documents(chosen, tokenizer)]


def _text(model: Any, texts: Any, sizes: Any = TEXTS) -> list[dict[str, Any]]:
    """Nats of the same targets of every document by window."""
    found = []
    for longest, (windows, most) in sizes.items():
        documents = [TokenDocument(x, torch.tensor(i[:most])) for x, i in texts if len(i) > longest]
        first = shared_first_target([longest], STRIDE)
        for window in windows:
            scores = score_documents(
                model, documents, window=window, stride=STRIDE, first_target=first
            )
            found.append(
                {
                    "longest": longest,
                    "window": window,
                    "documents": [score.id for score in scores],
                    "nats": [round(score.nats, 4) for score in scores],
                    "tokens": [score.tokens for score in scores],
                }
            )
    return found


def _passkeys(model: Any, tokenizer: Any) -> dict[int, list[bool]]:
    """Whether each key is found, by the length of the prompt."""
    found: dict[int, list[bool]] = {}
    for length, count in PASSKEYS.items():
        prompts = ask_for_passkeys(tokenizer, length, range(count), seed=PASSKEY_SEED)
        found[length] = []
        for start in range(0, count, size := max(1, 16384 // length)):
            batch = prompts[start : start + size]
            ids = torch.tensor([prompt.ids for prompt in batch])
            answers = greedy_answers(model, tokenizer, ids, max_new_tokens=ANSWER)
            pairs = zip(answers, batch, strict=True)
            found[length] += [is_hit(answer, prompt.facts["key"]) for answer, prompt in pairs]
    return found


def table() -> None:
    """Write the tables of the page from the trials' files."""
    trials: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(TRIALS.glob("*.json")):
        trial = read_json(path)
        trials.setdefault(trial["arm"], []).append(trial)
    text = f"{markdown(_rows(trials))}\n\n{markdown(_differences(trials))}"
    page = TRIALS.parent / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _rows(trials: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Every arm, as trained and folded."""
    learning = ["", "seeds", "learned to retrieve", "begins at step"]
    perplexity = ["perplexity 256", "1,024", "4,096", "16,384 (longer documents)"]
    yield [*learning, *perplexity, *(f"passkeys {n:,}" for n in PASSKEYS)]
    for arm in read_arms():
        for variant in trials[arm][0]["measured"] if arm in trials else ():
            yield _row(arm, variant, trials[arm])


def _differences(trials: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Perplexity without a decay against that with it, over the seeds that both have."""
    yield ["without a decay", "with it", "seeds", "perplexity 256", "4,096"]
    for base, arms in WITH_DECAY.items():
        for arm in arms:
            one, other = ({x["seed"]: x for x in trials.get(name, ())} for name in (arm, base))
            seeds = sorted(one.keys() & other.keys())
            if seeds:
                pairs = [(one[seed]["measured"], other[seed]["measured"]) for seed in seeds]
                cells = [_difference(pairs, window) for window in (LENGTH, 16 * LENGTH)]
                yield [arm, base, ", ".join(map(str, seeds)), *cells]


def _difference(pairs: list[tuple[Any, Any]], window: int) -> str:
    """In percent, with the interval over seeds."""
    found = [
        math.log(_perplexity([a["as trained"]], 4096, window))
        - math.log(_perplexity([b["as trained"]], 4096, window))
        for a, b in pairs
    ]
    values = [sum(found) / len(found), *(mean_interval(found) or ())]
    mean, *interval = (f"{100 * math.expm1(value):+.1f}" for value in values)
    return f"{mean} %" + (f" ({' to '.join(interval)})" if interval else "")


def _row(arm: str, variant: str, trials: list[dict[str, Any]]) -> list[str]:
    """Means over seeds; the passkeys of every seed."""
    name = arm if variant == "as trained" else f"{arm}, {variant}"
    measured = [trial["measured"][variant] for trial in trials]
    learned = sum(_share(each["passkeys"]["256"]) >= FOUND for each in measured)
    places = [(4096, 256), (4096, 1024), (4096, 4096), (16384, 16384)]
    steps = ", ".join(str(begins(trial["validation"]) or "never") for trial in trials)
    found = [
        ", ".join(f"{_share(each['passkeys'][str(length)]):.2f}" for each in measured)
        for length in PASSKEYS
    ]
    return [
        name,
        ", ".join(str(trial["seed"]) for trial in trials),
        f"{learned} of {len(trials)}",
        steps,
        *(f"{x:.2f}" if (x := _perplexity(measured, *place)) else "" for place in places),
        *found,
    ]


def begins(validation: list[dict[str, Any]]) -> int | None:
    """The first step from which on at least half of the passkeys are found at every measurement."""
    first = None
    for entry in validation:
        found = entry["retrieval"][f"passkey_{LENGTH}"] >= 0.5
        first = (first or entry["step"]) if found else None
    return first


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def _perplexity(measured: list[dict[str, Any]], longest: int, window: int) -> float:
    """exp of the mean over seeds of nats per token; 0 where it was not measured."""
    cells = [
        cell
        for each in measured
        for cell in each["text"]
        if (cell["longest"], cell["window"]) == (longest, window)
    ]
    means = [sum(cell["nats"]) / sum(cell["tokens"]) for cell in cells]
    return math.exp(sum(means) / len(means)) if means else 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"run": run, "table": table}[sys.argv[1]]()
