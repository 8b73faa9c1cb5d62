"""The verdict on collinearity: results/verdict says what is compared, and how it is decided.

A trial is an ordinary recipe, trained and evaluated in a process of its own, and one JSON file.
What has a file is not run again, so the study resumes wherever the files are.

    python -m studies.verdict.run          # what is missing, for as long as it takes
    python -m studies.verdict.run table    # cache and parameters of every arm
"""

import math
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from coca_attention.errors import UserError
from coca_lab.arguments import option_words, shipped
from coca_lab.data import Document, encode_documents, held_out, read_documents
from coca_lab.files import read_json, write_json
from coca_lab.training import Recipe, load_recipe
from studies.verdict.model import limit_distances
from studies.verdict.rule import (
    LIMITED,
    LONGER,
    NEAR,
    REPEATS,
    SEEDS,
    TEST_WINDOWS,
    TIMES,
    TRIALS,
    TUNING_SEED,
    read_runs,
    to_repeat,
)

MODULE = "studies.verdict.run"
RUNS = "runs/verdict"

RATES = (1.5e-3, 3e-3, 6e-3)
"""Learning rates that every arm is tried with; beyond an end that is best follow its next ones."""
MOST_RATES = 5

# Shares of the documents, by the hash that holds them out of training.
VALIDATION, TEST = (0.0, 0.05), (0.05, 0.2)
STRIDE = 128
# The largest window, behind whose tokens targets begin, and the tokens read of a document.
VALIDATION_WINDOW = (NEAR, 2304)


@dataclass(frozen=True)
class Trial:
    """An arm with a learning rate and a seed, and how many times the usual steps it takes."""

    arm: str
    learning_rate: float
    seed: int
    times: int = 1

    @property
    def name(self) -> str:
        """Name of its file and folder."""
        times = f"-{self.times}x" if self.times > 1 else ""
        return f"{self.arm}-{self.learning_rate:g}-{self.seed}{times}"

    def recipe(self) -> Recipe:
        """The recipe of its arm; UserError if there is no such arm."""
        study, arms = read_study()
        if self.arm not in arms:
            raise UserError(f"no arm {self.arm}; known: {', '.join(arms)}")
        options = study["models"][arms[self.arm]] | {
            "training.learning_rate": self.learning_rate,
            "training.seed": self.seed,
        }
        recipe = load_recipe(study["recipe"], option_words(options))
        options["training.steps"] = recipe.training.steps * self.times
        return load_recipe(study["recipe"], option_words(options))


def read_study() -> tuple[dict[str, Any], dict[str, str]]:
    """The study, and the names of its models by their first word, that of the arm."""
    study = yaml.safe_load(shipped("study")["verdict"].read_text(encoding="utf-8"))
    return study, {name.split()[0]: name for name in study["models"]}


def next_trial(folder: str | Path, arms: Iterable[str]) -> Trial | None:
    """The first trial without a file, or None.

    The learning rates of all arms, then seed by seed, what the rule wants repeated, and the longer
    runs.

    Args:
        folder: That of the files.
        arms: Names of the arms.
    """
    found = {
        Trial(each["arm"], each["learning_rate"], each["seed"], each.get("times", 1)): each
        for each in map(read_json, sorted(Path(folder).glob("*.json")))
    }
    best: dict[str, float] = {}
    for arm in arms:
        tried = {
            trial.learning_rate: _validation_loss(each)
            for trial, each in found.items()
            if trial.arm == arm and trial.seed == TUNING_SEED
        }
        for rate in RATES:
            if rate not in tried:
                return Trial(arm, rate, TUNING_SEED)
        best[arm] = min(tried, key=lambda rate: (tried[rate], rate))
        beyond = {min(tried): min(tried) / 2, max(tried): max(tried) * 2}.get(best[arm])
        if beyond is not None and len(tried) < MOST_RATES:
            return Trial(arm, beyond, TUNING_SEED)
    planned = [Trial(arm, rate, seed) for seed in SEEDS for arm, rate in best.items()]
    if found.keys() >= set(planned):
        again = to_repeat(read_runs(folder)[1])
        planned += [Trial(arm, best[arm], seed) for seed in REPEATS for arm in again]
        planned += [Trial(arm, best[arm], SEEDS[0], TIMES) for arm in LONGER if arm in best]
    return next((trial for trial in planned if trial not in found), None)


def _validation_loss(result: dict[str, Any]) -> float:
    """Nats per token; a run that diverged is worse than any other."""
    if result["status"] != "finished":
        return math.inf
    (scores,) = result["text"]
    return sum(scores["nats"]) / sum(scores["tokens"])


def run(trials: str = TRIALS, runs: str = RUNS) -> None:
    """Run every trial that has no file, one after another.

    Args:
        trials: Folder of the trials' files.
        runs: Folder of the trained models.
    """
    while trial := next_trial(trials, read_study()[1]):
        print(f"{time.strftime('%F %T')} {trial.name}", flush=True)
        words = [f"--trials={trials}", f"--runs={runs}", "trial"]
        words += [trial.arm, f"{trial.learning_rate:g}", str(trial.seed), str(trial.times)]
        subprocess.run([sys.executable, "-m", MODULE, *words], check=True)


def run_trial(trial: Trial, trials: str = TRIALS, runs: str = RUNS) -> None:
    """Train and evaluate one trial, and write its file.

    Args:
        trial: What to train.
        trials: Folder of the trials' files.
        runs: Folder of the trained models; an interrupted run is continued.
    """
    from coca_lab.training import train
    from coca_lab.training.trainer import TrainingDiverged

    folder = Path(runs) / trial.name
    result = {**asdict(trial), "status": "finished"}
    try:
        train(trial.recipe(), folder)
    except TrainingDiverged as error:
        result |= {"status": "diverged", "error": str(error)}
    else:
        result |= _measure(folder, trial)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_json(Path(trials) / f"{trial.name}.json", result)


def table() -> None:
    """Print what a cache holds for a token, in every layer, and the parameters of all arms."""
    for arm, name in read_study()[1].items():
        model = make_arm(arm)
        cached = [layer.self_attn.cache_numbers for layer in model.model.layers]
        print(f"{name:28} {cached} {sum(p.numel() for p in model.parameters()):,}")


def make_arm(arm: str) -> Any:
    """The untrained model of an arm, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    from coca_lab.training.model import model_config

    recipe = Trial(arm, RATES[0], 0).recipe()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(recipe, recipe.data.vocab_size))


def _measure(folder: Path, trial: Trial) -> dict[str, Any]:
    """Figures of a trained model: on the validation text while tuning, else on the test text."""
    from coca_lab.data import load_tokenizer
    from coca_lab.loading import load_model

    start = time.monotonic()
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    if trial.seed != TUNING_SEED:
        texts = _documents(tokenizer, TEST)
        text = [
            _score(model, texts, window, longest, most)
            for longest, most in TEST_WINDOWS
            for window in (NEAR, longest)
        ]
        if trial.arm in LIMITED:
            limit_distances(model, NEAR)
            longest, most = TEST_WINDOWS[0]
            cell = _score(model, texts, longest, longest, most)
            text.append(cell | {"max_distance": NEAR})
    else:
        texts = _documents(tokenizer, VALIDATION)
        text = [_score(model, texts, NEAR, *VALIDATION_WINDOW)]
    trained = read_json(folder / "training.json")
    return {
        "parameters": trained["parameters"],
        "steps": trained["steps"],
        "tokens": trained["tokens"],
        "seconds": trained["seconds"],
        "loss": [[entry["step"], entry["loss"]] for entry in trained["curve"]][::5],
        "read": read_json(folder / "text.json"),
        "text": text,
        "evaluation_seconds": round(time.monotonic() - start),
        "environment": trained["environment"],
    }


def _documents(tokenizer: Any, shares: tuple[float, float]) -> list[tuple[Document, list[int]]]:
    """Documents of Python's library between two shares of `held_out`, with their token ids."""
    low, high = shares
    chosen = (d for d in read_documents("stdlib") if held_out(d, high) and not held_out(d, low))
    return list(encode_documents(chosen, tokenizer))


def _score(model: Any, texts: Any, window: int, longest: int, most: int) -> dict[str, Any]:
    """Nats of the same targets, whatever the window.

    Args:
        model: The model.
        texts: From `_documents`; of those longer than ``longest`` tokens, the first ``most`` are
            read.
        window: Tokens read in one pass.
        longest: The largest window of these targets, which begin behind its tokens.
        most: See above.
    """
    import torch

    from coca_lab.evaluation.windows import (
        TokenDocument,
        score_documents,
        shared_first_target,
    )

    documents = [
        TokenDocument(document.id, torch.tensor(ids[:most]))
        for document, ids in texts
        if len(ids) > longest
    ]
    first = shared_first_target([longest], STRIDE)
    scores = score_documents(model, documents, window=window, stride=STRIDE, first_target=first)
    return {
        "longest": longest,
        "window": window,
        "documents": [score.id for score in scores],
        "nats": [score.nats for score in scores],
        "tokens": [score.tokens for score in scores],
    }


def main(words: list[str] | None = None) -> None:
    """The command line."""
    parser = ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--trials", default=TRIALS, help="folder of the trials' files")
    parser.add_argument("--runs", default=RUNS, help="folder of the trained models")
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("trial", help="one trial in place of all that are missing")
    for name, kind in (("arm", str), ("learning_rate", float), ("seed", int)):
        one.add_argument(name, type=kind)
    one.add_argument("times", type=int, nargs="?", default=1)
    commands.add_parser("table", help="cache and parameters of every arm")
    read = parser.parse_args(words)
    if read.command == "trial":
        trial = Trial(read.arm, read.learning_rate, read.seed, read.times)
        run_trial(trial, read.trials, read.runs)
    elif read.command == "table":
        table()
    else:
        run(read.trials, read.runs)


if __name__ == "__main__":
    main()
