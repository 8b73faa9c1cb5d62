"""`train`: from a recipe to an ordinary Transformers folder; started again, it goes on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.data import (
    BlockDataset,
    Document,
    PasskeyBlocks,
    held_out,
    kept_tokenizer,
    load_tokenizer,
    token_array,
)
from coca_attention.data.passkey import vocabulary_text
from coca_attention.environment import describe_environment, write_json, write_text
from coca_attention.errors import UserError
from coca_attention.training.build import make_model
from coca_attention.training.fit import curve, fit, save_trained
from coca_attention.training.recipe import (
    Recipe,
    TrainingRecipe,
    as_yaml,
    differences,
    load_recipe,
)
from coca_attention.training.stages import joined_curve, train_stages
from coca_attention.training.trainer import RecipeTrainer, writing

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder that has it is finished.
SUMMARY_FILE = "training.json"


def train(recipe: Recipe, output: str | Path, *, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train a model, or go on where an earlier run of the same recipe stopped.

    Args:
        recipe: The run.
        output: Folder of the run. At the end it holds the model, the tokenizer, the recipe with
            every default written out, and ``training.json`` (curve, tokens, seconds, recipe,
            versions, hardware, stages).
        callbacks: Further Trainer callbacks.

    Returns:
        The folder.

    Raises:
        UserError: If the folder holds a run of another recipe, or the data cannot be used.
        TrainingDiverged: If the loss or a weight is no longer finite.
    """
    recipe.check()
    output = Path(output)
    state = PartialState()
    with state.main_process_first():
        claim_folder(recipe, output)
        if is_finished(output):
            return output
        tokenizer = _tokenizer(recipe, output)
    settings = recipe.training
    tokens = training_tokens(recipe, tokenizer)
    with state.main_process_first():
        check_same_text(tokens, output)
    dataset = _whole_batches(_blocks(recipe, tokens, tokenizer), settings)

    stages = None
    if recipe.stages:
        trainer, stages = train_stages(recipe, output, dataset, tokenizer, callbacks=callbacks)
        seconds = _sum([stage["seconds"] for stage in stages])
    else:
        trainer, seconds = fit(
            settings,
            output,
            dataset,
            lambda: make_model(recipe, tokenizer, dataset),
            callbacks=callbacks,
        )
    model = save_trained(trainer, tokenizer, output)
    if model is not None:
        summary = _summary(recipe, model, trainer, seconds, len(dataset), stages)
        with writing(output, trainer.kept):
            write_json(output / SUMMARY_FILE, summary)
    state.wait_for_everyone()
    return output


def _blocks(
    recipe: Recipe, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> ConcatDataset | BlockDataset:
    """Blocks of text, and passkey texts as many as their share asks for."""
    length, share = recipe.data.block_length, recipe.data.passkey_share
    text = BlockDataset(tokens, length)
    count = round(len(text) * share / (1 - share))
    if not count:
        return text
    return ConcatDataset([text, PasskeyBlocks(tokenizer, length, count, recipe.training.seed)])


def _whole_batches(dataset: Any, settings: TrainingRecipe) -> Subset:
    """The blocks that fill whole global batches, so that every step sees as many."""
    whole = len(dataset) // settings.global_batch_size * settings.global_batch_size
    if not whole:
        raise UserError(
            f"the training data makes {len(dataset)} blocks, fewer than "
            f"global_batch_size {settings.global_batch_size}; use more text or a smaller batch"
        )
    return Subset(dataset, range(whole))


def check_same_text(tokens: np.ndarray, output: Path) -> None:
    """Keep a fingerprint of the training tokens, or check that it has not changed.

    Raises:
        UserError: If the run was begun on other text.
    """
    found = {"tokens": len(tokens), "sha256": hashlib.sha256(tokens.data).hexdigest()}
    path = output / "text.json"
    if not path.is_file():
        write_json(path, found)
    elif json.loads(path.read_text(encoding="utf-8")) != found:
        raise UserError(
            f"{output}: the training text has changed since this run was begun ({path} holds its "
            "fingerprint); bring the text back, or give another --output"
        )


def claim_folder(recipe: Recipe, output: Path) -> None:
    """Write the recipe into a run folder, or check that the one there is the same.

    Raises:
        UserError: If the folder belongs to another recipe or to something else.
    """
    path = output / RECIPE_FILE
    if path.is_file():
        changed = differences(load_recipe(path), recipe)
        if changed:
            raise UserError(
                f"{output} holds a run of another recipe (different: {', '.join(changed)}); give "
                "another --output, or remove the folder"
            )
        return
    # What a start killed while writing has left does not count.
    there = output.iterdir() if output.is_dir() else []
    others = [path for path in there if not path.name.endswith(".partial")]
    if others or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} is there already and is no run folder; give another --output")
    write_text(path, as_yaml(recipe))


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a model trained to its end."""
    return (Path(output) / SUMMARY_FILE).is_file()


def training_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The training split of a recipe's data as one array of token ids."""
    return token_array(_training_documents(recipe), tokenizer, max_tokens=recipe.data.max_tokens)


def _training_documents(recipe: Recipe) -> Any:
    share = recipe.data.held_out
    return (d for d in recipe.data.documents() if not held_out(d, share))


def _tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; one that is trained is kept in the run folder for the next start."""
    named = recipe.data.tokenizer or recipe.model.start
    if named is not None:
        return load_tokenizer(named)
    data = recipe.data
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return kept_tokenizer(
        output / "tokenizer",
        lambda: chain(extra, _training_documents(recipe)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def _summary(
    recipe: Recipe,
    model: PreTrainedModel,
    trainer: RecipeTrainer,
    seconds: float | None,
    blocks: int,
    stages: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """What ``training.json`` says of a finished run."""
    settings = recipe.training
    steps = settings.steps if stages is None else sum(stage["steps"] for stage in stages)
    summary = {
        "attention": recipe.model.attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens": steps * settings.global_batch_size * recipe.data.block_length,
        "epochs": steps * settings.global_batch_size / blocks,
        "seconds": seconds,  # None where it took more than one start
        "curve": curve(trainer) if stages is None else joined_curve(stages),
        "recipe": asdict(recipe),
        "seed": settings.seed,
        "environment": describe_environment(),
    }
    if stages is not None:
        summary["stages"] = [{k: v for k, v in stage.items() if k != "curve"} for stage in stages]
    return summary


def _sum(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return json.loads((Path(output) / SUMMARY_FILE).read_text(encoding="utf-8"))
