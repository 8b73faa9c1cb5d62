"""`train`: from a recipe to an ordinary Transformers folder; resumes when restarted."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.data import Document, load_or_train_tokenizer, load_tokenizer
from coca_attention.data.passkey import vocabulary_text
from coca_attention.environment import describe_environment, write_json, write_text
from coca_attention.errors import UserError
from coca_attention.models.cards import write_card
from coca_attention.models.loading import load_model
from coca_attention.training.data import TrainingData, check_sources, load_data, training_documents
from coca_attention.training.fit import perplexity_of, save_trained
from coca_attention.training.recipe import Recipe, as_yaml, differences, load_recipe
from coca_attention.training.sections import TEXT
from coca_attention.training.stages import join_curves, train_stages
from coca_attention.training.trainer import catch_write_errors

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder that has it is finished.
SUMMARY_FILE = "training.json"


def train(recipe: Recipe, output: str | Path, *, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train a model, or resume an interrupted run of the same recipe.

    Args:
        recipe: The run.
        output: Folder of the run. At the end it holds the model, the tokenizer, the recipe with
            all defaults, and ``training.json`` (curves, tokens, seconds, recipe, versions,
            hardware, stages).
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
        tokenizer = _load_tokenizer(recipe, output)
    data = load_data(recipe, tokenizer)
    with state.main_process_first():
        check_same_text(data.fingerprint, output)
    start = _measure_start(recipe, data, output)
    trainer, stages = train_stages(recipe, data, tokenizer, output, callbacks=callbacks)
    model = save_trained(trainer, tokenizer, output)
    if model is not None:
        summary = _summary(recipe, model, data, stages) | start
        with catch_write_errors(output, trainer.describe_saved):
            write_card(output, model.config, **_card(recipe, summary))
            write_json(output / SUMMARY_FILE, summary)
    state.wait_for_everyone()
    return output


def check_same_text(fingerprint: dict[str, Any], output: Path) -> None:
    """Write the fingerprint of the texts into the run folder, or compare it with the one there.

    Raises:
        UserError: If the run was started on different text.
    """
    found = fingerprint[TEXT] if list(fingerprint) == [TEXT] else fingerprint
    path = output / "text.json"
    if not path.is_file():
        write_json(path, found)
    elif json.loads(path.read_text(encoding="utf-8")) != found:
        raise UserError(
            f"{output}: the training text has changed since this run was started (its fingerprint "
            f"is in {path}); restore the text, or choose another --output"
        )


def claim_folder(recipe: Recipe, output: Path) -> None:
    """Write the recipe into a run folder, or compare it with the one there.

    Raises:
        UserError: If the folder belongs to another recipe or to something else.
    """
    path = output / RECIPE_FILE
    if path.is_file():
        # The folder of the token cache has no influence on the tokens.
        changed = [n for n in differences(load_recipe(path), recipe) if n != "data.cache"]
        if changed:
            raise UserError(
                f"{output} holds a run of another recipe (different: {', '.join(changed)}); choose "
                "another --output, or remove the folder"
            )
        return
    # A start that was killed may have left partial files.
    there = output.iterdir() if output.is_dir() else []
    others = [path for path in there if not path.name.endswith(".partial")]
    if others or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} exists and is not a run folder; choose another --output")
    write_text(path, as_yaml(recipe))


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return json.loads((Path(output) / SUMMARY_FILE).read_text(encoding="utf-8"))


def _load_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is kept in the run folder for later starts."""
    data = recipe.data
    named = data.tokenizer or recipe.model.start
    if named is not None:
        return load_tokenizer(named)
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return load_or_train_tokenizer(
        output / "tokenizer",
        lambda: chain(extra, training_documents(data)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def _measure_start(recipe: Recipe, data: TrainingData, output: Path) -> dict[str, Any]:
    """Name and perplexity of ``model.start`` as the entry ``start``, measured once in a run.

    Empty without a start or without validation.
    """
    name = recipe.model.start
    if name is None or data.validation is None:
        return {}
    path = output / "start.json"
    if not path.is_file():
        model = load_model(name, device="cpu")
        found = perplexity_of(model, recipe.training, output, data.validation)
        if PartialState().is_main_process:
            write_json(path, {"name": Path(name).name, "perplexity": found})
        PartialState().wait_for_everyone()
    return {"start": json.loads(path.read_text(encoding="utf-8"))}


def _summary(
    recipe: Recipe, model: PreTrainedModel, data: TrainingData, stages: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of ``training.json``, except for the start."""
    seconds = [stage["seconds"] for stage in stages]
    curves = {name: join_curves(stages, name) for name in ("curve", "validation")}
    summary = {
        "attention": recipe.model.attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": recipe.steps,
        "tokens": sum(stage["tokens"] for stage in stages),
        "epochs": max(data.epochs.values()),
        "source_epochs": data.epochs,
        "seconds": None if None in seconds else sum(seconds),  # None if the run was interrupted
        **curves,
        "recipe": asdict(recipe),
        "seed": recipe.training.seed,
        "environment": describe_environment(),
    }
    if recipe.stages:
        summary["stages"] = [{k: stage[k] for k in stage if k not in curves} for stage in stages]
    return summary


def _card(recipe: Recipe, summary: dict[str, Any]) -> dict[str, Any]:
    """What the model card of a run says besides the model's configuration."""
    validation = summary["validation"]
    training = {
        "tokens": f"{summary['tokens']:,}, in {summary['steps']:,} steps",
        "parameters": f"{summary['parameters']:,}",
        "seed": summary["seed"],
        "all settings": "`recipe.yaml`; curves and versions: `training.json`",
    }
    return {
        "source": recipe.model.start,
        "training": training,
        "perplexity": validation[-1]["perplexity"] if validation else None,
    }
