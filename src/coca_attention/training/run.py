"""`train`: from a recipe to an ordinary Transformers folder; started again, it goes on."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

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
from coca_attention.models.loading import load_model, no_progress_bars
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
    arguments = training_arguments(settings, output, state.num_processes)
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
    _save(trainer, tokenizer, recipe, output, seconds, len(dataset))
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
    if recipe.data.tokenizer is not None:
        return load_tokenizer(recipe.data.tokenizer)
    data = recipe.data
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return kept_tokenizer(
        output / "tokenizer",
        lambda: chain(extra, _training_documents(recipe)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def _save(
    trainer: RecipeTrainer,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    output: Path,
    seconds: float | None,
    blocks: int,
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
            "epochs": settings.steps * settings.global_batch_size / blocks,
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
