"""`train`: from a recipe to an ordinary Transformers folder; started again, it goes on."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback, set_seed

from coca_attention.data import (
    BlockDataset,
    held_out,
    kept_tokenizer,
    load_tokenizer,
    read_documents,
    token_array,
)
from coca_attention.environment import describe_environment, write_json, write_text
from coca_attention.errors import UserError
from coca_attention.training.build import model_config
from coca_attention.training.recipe import (
    Recipe,
    TrainingRecipe,
    as_yaml,
    differences,
    load_recipe,
)
from coca_attention.training.trainer import RecipeTrainer, last_checkpoint, training_arguments

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder that has it is finished.
SUMMARY_FILE = "training.json"


def train(recipe: Recipe, output: str | Path, *, callbacks: Sequence[TrainerCallback] = ()) -> Path:
    """Train a model, or go on where an earlier run of the same recipe stopped.

    Args:
        recipe: The run.
        output: Folder of the run. At the end it holds the model, the tokenizer, the recipe with
            every default written out, and ``training.json`` (curve, tokens, seconds, versions,
            hardware).
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
    tokens = training_tokens(recipe, tokenizer)
    dataset = BlockDataset(tokens, recipe.data.block_length)

    settings = recipe.training
    set_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(
        model_config(recipe, len(tokenizer), tokenizer.eos_token_id)
    )
    trainer = RecipeTrainer(
        settings,
        model=model,
        args=training_arguments(settings, output, state.num_processes),
        train_dataset=dataset,
        callbacks=[*_curves(settings, output, state), *callbacks],
    )
    resume = last_checkpoint(output / "checkpoints")
    result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    _save(trainer, tokenizer, recipe, output, dict(result.metrics), len(dataset))
    state.wait_for_everyone()
    return output


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
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already and is no run folder; give another --output")
    write_text(path, as_yaml(recipe))


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a model trained to its end."""
    return (Path(output) / SUMMARY_FILE).is_file()


def training_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The training split of a recipe's data as one array of token ids."""
    return token_array(_training_documents(recipe), tokenizer, max_tokens=recipe.data.max_tokens)


def _training_documents(recipe: Recipe) -> Any:
    data = recipe.data
    documents = read_documents(data.source, text_field=data.text_field, bad_lines=data.bad_lines)
    return (document for document in documents if not held_out(document, data.held_out))


def _tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; one that is trained is kept in the run folder for the next start."""
    if recipe.data.tokenizer is not None:
        return load_tokenizer(recipe.data.tokenizer)
    return kept_tokenizer(
        output / "tokenizer", lambda: _training_documents(recipe), recipe.data.vocab_size
    )


def _save(
    trainer: RecipeTrainer,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    output: Path,
    metrics: dict[str, Any],
    blocks: int,
) -> None:
    """Put the finished model into the run folder: written aside, then moved, the summary last."""
    partial = output / ".model.partial"
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
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
            "seconds": metrics.get("train_runtime"),
            "curve": curve,
            "seed": settings.seed,
            "environment": describe_environment(),
        },
    )


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return json.loads((Path(output) / SUMMARY_FILE).read_text(encoding="utf-8"))
