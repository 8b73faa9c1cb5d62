"""`train`: from a recipe to an ordinary Transformers folder; resumes when restarted."""

import gc
import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from coca_attention.errors import UserError
from coca_lab.cards import write_card
from coca_lab.data import Document, load_or_train_tokenizer, load_tokenizer
from coca_lab.data.passkey import vocabulary_text
from coca_lab.environment import describe_environment
from coca_lab.files import check_writable, hold, read_json, write_json, write_text
from coca_lab.loading import load_model, model_without_weights
from coca_lab.training.checkpoints import catch_write_errors
from coca_lab.training.data import check_sources, load_data, training_documents
from coca_lab.training.fit import Run, measure, save_trained
from coca_lab.training.model import own_device, start_sizes
from coca_lab.training.recipe import TEXT, Recipe, as_yaml, differences, load_recipe
from coca_lab.training.stages import join_curves, train_stages
from coca_lab.training.trainer import training_arguments

log = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder that has it is finished.
SUMMARY_FILE = "training.json"
# While a process trains.
LOCK_FILE = ".lock"


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    may_change: Collection[str] = (),
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Train a model, or resume an interrupted run of the same recipe.

    Args:
        recipe: The run.
        output: Folder of the run. At the end it holds the model, the tokenizer, the recipe with
            all defaults, and ``training.json`` (curves, tokens, seconds, recipe, versions,
            hardware, stages).
        may_change: Fields of the recipe, such as ``data.source``, that may differ from those of an
            unfinished run in the folder. The text is compared in any case.
        callbacks: Further Trainer callbacks.

    Returns:
        The folder.

    Raises:
        UserError: If the folder holds a run of another recipe or is in use, or the data cannot be
            used.
        TrainingDiverged: If the loss or a weight is no longer finite.
    """
    recipe.check()
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output")
    if is_finished(output):
        claim_folder(recipe, output)
        return output
    check_sources(recipe)
    state = PartialState(cpu=not torch.accelerator.is_available())
    sizes, dtype = _start_of(recipe)
    with ExitStack() as stack:
        with state.main_process_first():
            if state.is_main_process:
                _check_before_reading(recipe, output, stack)
            claim_folder(recipe, output, may_change=may_change, sizes=sizes)
            if is_finished(output):
                return output
            tokenizer = load_run_tokenizer(recipe, output)
        run = Run(recipe, output, tokenizer, load_data(recipe, tokenizer), callbacks)
        if state.is_main_process:
            log.info("%s: %s", output, run.data.describe())
        with state.main_process_first():
            check_same_text(run.data.fingerprint, output)
        start = _measure_start(run)
        trainer, stages = train_stages(run)
        model = save_trained(trainer, tokenizer, output, dtype)
        if model is not None:
            with catch_write_errors(output, trainer.describe_saved):
                _summarise(run, sizes, model, stages, start)
        state.wait_for_everyone()
    return output


def _start_of(recipe: Recipe) -> tuple[dict[str, Any] | None, torch.dtype | None]:
    """Sizes of the model to start from, if there is one, and the dtype to save the result in."""
    sizes = dtype = None
    if recipe.model.start is not None:
        model = model_without_weights(recipe.model.start, "auto")
        sizes, dtype = start_sizes(model), model.dtype
    if recipe.model.dtype != "auto":
        dtype = getattr(torch, recipe.model.dtype)
    return sizes, dtype


def _check_before_reading(recipe: Recipe, output: Path, stack: ExitStack) -> None:
    """Lock the folder, and find out what is wrong before the text is read, which can take hours."""
    check_writable(output / RECIPE_FILE)
    stack.enter_context(hold(output / LOCK_FILE))
    training_arguments(recipe.training, output, PartialState().num_processes)
    if recipe.model.teacher is not None:
        model_without_weights(recipe.model.teacher)
    log.info("%s: reading the text", output)


def check_same_text(fingerprint: dict[str, Any], output: Path) -> None:
    """Write the fingerprint of the texts into the run folder, or compare it with the one there.

    Raises:
        UserError: If the run was started on different text.
    """
    found = fingerprint[TEXT] if list(fingerprint) == [TEXT] else fingerprint
    path = output / "text.json"
    if not path.is_file():
        write_json(path, found)
    elif read_json(path) != found:
        raise UserError(
            f"{output}: the training text has changed since this run was started (its fingerprint "
            f"is in {path}); restore the text, or choose another --output"
        )


def claim_folder(
    recipe: Recipe,
    output: Path,
    *,
    may_change: Collection[str] = (),
    sizes: dict[str, Any] | None = None,
) -> None:
    """Write the recipe into a run folder, or compare it with the one there.

    Args:
        recipe: The run.
        output: Its folder.
        may_change: As for `train`.
        sizes: Those of the model to start from, if there is one.

    Raises:
        UserError: If the folder belongs to another recipe or to something else.
    """
    path = output / RECIPE_FILE
    if path.is_file():
        found = load_recipe(path)
        different = differences(found.resolved(), recipe.resolved())
        # Neither has an influence on what is trained; model.dtype is that of the saved model.
        ignored = {"data.cache"}
        updated = set() if is_finished(output) else {"model.dtype", *may_change}
        changed = [name for name in different if name not in ignored | updated]
        if changed:
            raise UserError(
                f"{output} holds a run of another recipe (different: {', '.join(changed)}); choose "
                "another --output, or remove the folder"
            )
        if not updated.isdisjoint(different):
            write_text(path, as_yaml(recipe, sizes))
        return
    # A start that was killed may have left partial files.
    there = output.iterdir() if output.is_dir() else []
    others = [p for p in there if not p.name.endswith(".partial") and p.name != LOCK_FILE]
    if others or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} exists and is not a run folder; choose another --output")
    write_text(path, as_yaml(recipe, sizes))


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return read_json(Path(output) / SUMMARY_FILE)


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
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


def _measure_start(run: Run) -> dict[str, Any]:
    """Name and validation of ``model.start`` as the entry ``start``, measured once in a run.

    Empty without a start or without validation.
    """
    name = run.recipe.model.start
    if name is None or run.data.validation is None:
        return {}
    path = run.output / "start.json"
    if not path.is_file():
        model = load_model(name, device=own_device())
        found = measure(run, model)
        del model
        gc.collect()  # Trainer and model refer to each other
        if PartialState().is_main_process:
            write_json(path, {"name": Path(name).name, **found})
        PartialState().wait_for_everyone()
    return {"start": read_json(path)}


def _summarise(
    run: Run,
    sizes: dict[str, Any] | None,
    model: PreTrainedModel,
    stages: list[dict[str, Any]],
    start: dict[str, Any],
) -> None:
    """Write the model card and ``training.json``, which marks the run as finished."""
    recipe, data = run.recipe, run.data
    recorded = asdict(recipe.resolved())
    for name, value in (sizes or {}).items():
        recorded["data" if name == "vocab_size" else "model"][name] = value
    seconds = [stage["seconds"] for stage in stages]
    curves = {name: join_curves(stages, name) for name in ("curve", "validation")}
    summary = {
        "attention": recipe.model.attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.config.dtype).removeprefix("torch."),
        "steps": recipe.steps,
        "tokens": sum(stage["tokens"] for stage in stages),
        "epochs": max(data.epochs.values()),
        "source_epochs": data.epochs,
        "seconds": None if None in seconds else sum(seconds),  # None if the run was interrupted
        "throughput": stages[-1]["throughput"],  # of the last stage
        **curves,
        "recipe": recorded,
        "seed": recipe.training.seed,
        "environment": describe_environment(),
    } | start
    if data.retrieval is not None:
        summary["retrieval"] = data.retrieval.describe()
    if recipe.stages:
        summary["stages"] = [{k: stage[k] for k in stage if k not in curves} for stage in stages]
    trained = (
        f"{summary['tokens']:,} tokens in {summary['steps']:,} steps. All settings are in "
        "`recipe.yaml`, curves and versions in `training.json`."
    )
    if curves["validation"]:
        perplexity = curves["validation"][-1]["perplexity"]
        trained += f" Perplexity on held-out blocks of the training text: {perplexity:.2f}."
    source, sections = recipe.model.start, {"Training": trained}
    write_card(run.output, model.config, source=source, sections=sections)
    write_json(run.output / SUMMARY_FILE, summary)


def what_was_kept(summary: dict[str, Any]) -> str:
    """What a run has kept of its start, in a line; empty where it was not measured.

    Args:
        summary: The content of its ``training.json``.
    """
    start, curve = summary.get("start"), summary["validation"]
    if not start or not curve:
        return ""
    last = curve[-1]
    parts = [f"perplexity {100 * (last['perplexity'] / start['perplexity'] - 1):+.1f} %"]
    before = start.get("retrieval", {})
    for name, asked in summary.get("retrieval", {}).items():
        count, where = asked["prompts"], f"{asked['what']} at {asked['length']:,} tokens"
        had = f" where it has {round(before[name] * count)}" if name in before else ""
        parts.append(f"{where} {round(last['retrieval'][name] * count)} of {count}{had}")
    return f"kept of {start['name']}: {', '.join(parts)}"
