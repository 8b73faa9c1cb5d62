"""`train`: from a recipe to an ordinary Transformers folder; started again, it goes on."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.data import Document, TokenText, kept_tokenizer, load_tokenizer
from coca_attention.data.passkey import vocabulary_text
from coca_attention.environment import describe_environment, write_json, write_text
from coca_attention.errors import UserError
from coca_attention.models.loading import load_model
from coca_attention.training.blocks import (
    TEXT,
    VALIDATION,
    check_sources,
    epochs_read,
    training_blocks,
    training_documents,
    training_texts,
    validation_blocks,
    validation_text,
)
from coca_attention.training.build import make_model
from coca_attention.training.fit import curve, fit, perplexity_of, save_trained, validation_curve
from coca_attention.training.recipe import (
    Recipe,
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
    if not is_finished(output):
        check_sources(recipe)
    state = PartialState(cpu=not torch.accelerator.is_available())
    with state.main_process_first():
        claim_folder(recipe, output)
        if is_finished(output):
            return output
        tokenizer = _tokenizer(recipe, output)
    settings = recipe.training
    texts = training_texts(recipe, tokenizer)
    judged = validation_text(recipe, tokenizer)
    with state.main_process_first():
        check_same_text(texts | ({VALIDATION: judged} if judged is not None else {}), output)
    dataset = training_blocks(recipe, texts, tokenizer)
    validation = validation_blocks(recipe, judged, tokenizer) if judged is not None else None

    start = None
    if validation is not None and recipe.model.start is not None:
        start = _start_measured(recipe, recipe.model.start, output, validation)
    stages = None
    if recipe.stages:
        trainer, stages = train_stages(
            recipe, output, dataset, tokenizer, validation=validation, callbacks=callbacks
        )
        seconds = _sum([stage["seconds"] for stage in stages])
    else:
        trainer, seconds = fit(
            settings,
            output,
            dataset,
            lambda: make_model(recipe, tokenizer, dataset),
            in_order=bool(recipe.data.mixture),  # a mixture has its own order
            validation=validation,
            validate_every=recipe.validation.every,
            callbacks=callbacks,
        )
    model = save_trained(trainer, tokenizer, output)
    if model is not None:
        summary = _summary(recipe, model, trainer, seconds, epochs_read(recipe, dataset), stages)
        if start is not None:
            summary["start"] = start
        with writing(output, trainer.kept):
            write_json(output / SUMMARY_FILE, summary)
    state.wait_for_everyone()
    return output


def check_same_text(texts: dict[str, TokenText], output: Path) -> None:
    """Keep a fingerprint of the training tokens, or check that it has not changed.

    Raises:
        UserError: If the run was begun on other text.
    """
    prints = {
        name: {"tokens": len(text.tokens), "sha256": text.sha256} for name, text in texts.items()
    }
    found = prints[TEXT] if list(prints) == [TEXT] else prints
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
        # Where tokens are kept changes nothing in them.
        changed = [n for n in differences(load_recipe(path), recipe) if n != "data.cache"]
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


def _tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; one that is trained is kept in the run folder for the next start."""
    named = recipe.data.tokenizer or recipe.model.start
    if named is not None:
        return load_tokenizer(named)
    data = recipe.data
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return kept_tokenizer(
        output / "tokenizer",
        lambda: chain(extra, training_documents(recipe.data)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def _start_measured(recipe: Recipe, name: str, output: Path, blocks: Any) -> dict[str, Any]:
    """The start's name and its own perplexity on the validation blocks, measured once in a run."""
    path = output / "start.json"
    if not path.is_file():
        model = load_model(name, device="cpu")
        found = perplexity_of(model, recipe.training, output, blocks)
        if PartialState().is_main_process:
            write_json(path, {"name": Path(name).name, "perplexity": found})
        PartialState().wait_for_everyone()
    return json.loads(path.read_text(encoding="utf-8"))


def _summary(
    recipe: Recipe,
    model: PreTrainedModel,
    trainer: RecipeTrainer,
    seconds: float | None,
    epochs: dict[str, float],
    stages: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """What ``training.json`` says of a finished run."""
    settings = recipe.training
    summary = {
        "attention": recipe.model.attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": recipe.steps,
        "tokens": recipe.steps * settings.global_batch_size * recipe.data.block_length,
        "epochs": max(epochs.values()),
        "source_epochs": epochs,
        "seconds": seconds,  # None where it took more than one start
        "curve": curve(trainer) if stages is None else joined_curve(stages, "curve"),
        "validation": (
            validation_curve(trainer) if stages is None else joined_curve(stages, "validation")
        ),
        "recipe": asdict(recipe),
        "seed": settings.seed,
        "environment": describe_environment(),
    }
    if stages is not None:
        curves = ("curve", "validation")  # these are joined above
        summary["stages"] = [{k: stage[k] for k in stage if k not in curves} for stage in stages]
    return summary


def _sum(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return json.loads((Path(output) / SUMMARY_FILE).read_text(encoding="utf-8"))
