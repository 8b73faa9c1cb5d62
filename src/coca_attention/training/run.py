"""`train`: from a recipe to an ordinary Transformers folder; started again, it goes on."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from coca_attention.data import Document, TokenText, kept_tokenizer, load_tokenizer
from coca_attention.data.passkey import vocabulary_text
from coca_attention.environment import describe_environment, write_json, write_text
from coca_attention.errors import UserError
from coca_attention.models.loading import load_model, no_progress_bars
from coca_attention.training.blocks import (
    TEXT,
    check_separable,
    check_sources,
    epochs_read,
    training_blocks,
    training_documents,
    training_texts,
)
from coca_attention.training.build import model_config
from coca_attention.training.recipe import (
    Recipe,
    TrainingRecipe,
    as_yaml,
    differences,
    load_recipe,
)
from coca_attention.training.trainer import (
    STATE_FILE,
    RecipeTrainer,
    last_checkpoint,
    training_arguments,
)

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder that has it is finished.
SUMMARY_FILE = "training.json"


def train(recipe: Recipe, output: str | Path, *, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train a model, or go on where an earlier run of the same recipe stopped.

    Args:
        recipe: The run.
        output: Folder of the run. At the end it holds the model, the tokenizer, the recipe with
            every default written out, and ``training.json`` (curve, tokens, seconds, recipe,
            versions, hardware).
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
        check_sources(recipe.data)
    state = PartialState(cpu=not torch.accelerator.is_available())
    with state.main_process_first():
        claim_folder(recipe, output)
        if is_finished(output):
            return output
        tokenizer = _tokenizer(recipe, output)
    settings = recipe.training
    texts = training_texts(recipe, tokenizer)
    with state.main_process_first():
        check_same_text(texts, output)
    dataset = training_blocks(recipe, texts, tokenizer)

    set_seed(settings.seed)
    resume = last_checkpoint(output / "checkpoints")
    trained = None if resume is None else TrainerState.load_from_json(str(resume / STATE_FILE))
    # Killed between the last step and the end: Trainer would do one step more.
    done = trained is not None and trained.global_step >= settings.steps
    if done and resume is not None:
        model = load_model(resume)
    else:
        model = AutoModelForCausalLM.from_config(
            model_config(recipe, len(tokenizer), tokenizer.eos_token_id)
        )
    if recipe.data.separate_documents:
        check_separable(model)
    arguments = training_arguments(settings, output, state.num_processes)
    if recipe.data.mixture:
        arguments.train_sampling_strategy = "sequential"  # a mixture has its own order
    try:
        trainer = RecipeTrainer(
            settings,
            model=model,
            args=arguments,
            train_dataset=dataset,
            callbacks=[*_curves(settings, output, state), *callbacks],
        )
    except (ValueError, ImportError) as error:
        raise UserError(f"the Trainer refuses these settings: {error}") from error
    seconds = None
    if done and trained is not None:
        trainer.state = trained
    else:
        with no_progress_bars():
            result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        seconds = result.metrics.get("train_runtime") if resume is None else None
    if trainer.state.global_step != settings.steps:
        raise UserError(
            f"training stopped at step {trainer.state.global_step} of {settings.steps}; start it "
            "again to go on"
        )
    _save(trainer, tokenizer, recipe, output, seconds, epochs_read(recipe, dataset))
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


def _curves(settings: TrainingRecipe, output: Path, state: PartialState) -> list[TrainerCallback]:
    """TensorBoard into the run folder; Trainer's own takes its folder from the environment."""
    if "tensorboard" not in settings.report_to or not state.is_main_process:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(output / "logs"))]


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
    if recipe.data.tokenizer is not None:
        return load_tokenizer(recipe.data.tokenizer)
    data = recipe.data
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return kept_tokenizer(
        output / "tokenizer",
        lambda: chain(extra, training_documents(recipe.data)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def _save(
    trainer: RecipeTrainer,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    output: Path,
    seconds: float | None,
    epochs: dict[str, float],
) -> None:
    """Put the finished model into the run folder: written aside, then moved, the summary last."""
    partial = output / ".model.partial"
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    with no_progress_bars():
        trainer.save_model(str(partial))
    if not trainer.is_world_process_zero():
        return
    (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle; recipe.yaml says it all
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        os.replace(path, output / path.name)
    partial.rmdir()
    settings = recipe.training
    curve = [
        {"step": entry["step"], "loss": entry["loss"], "learning_rate": entry["learning_rate"]}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    write_json(
        output / SUMMARY_FILE,
        {
            "attention": recipe.model.attention,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": settings.steps,
            "tokens": settings.steps * settings.global_batch_size * recipe.data.block_length,
            "epochs": max(epochs.values()),
            "source_epochs": epochs,
            "seconds": seconds,  # None where it took more than one start
            "curve": curve,
            "recipe": asdict(recipe),
            "seed": settings.seed,
            "environment": describe_environment(),
        },
    )


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return json.loads((Path(output) / SUMMARY_FILE).read_text(encoding="utf-8"))
