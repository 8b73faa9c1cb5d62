"""`train`: from a recipe to an ordinary Transformers folder, top to bottom.

Resolve what the recipe starts from, claim the folder, load the data, fit stage after stage,
summarise. An interrupted run resumes from the last checkpoint of its current stage.

A recipe without stages is a single stage in the run folder itself. Otherwise every stage is a run
of Trainer in ``stages/NAME``, which reads the blocks that follow those of the previous stage and
starts from its weights.
"""

import gc
import logging
import shutil
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from coca_attention.errors import Interrupted, UserError
from coca_lab.data import Document, load_or_train_tokenizer, load_tokenizer
from coca_lab.data.passkey import vocabulary_text
from coca_lab.environment import describe_environment
from coca_lab.files import check_writable, hold, read_json, replace, write_json, write_text
from coca_lab.folders import write_card
from coca_lab.loading import load_model, model_without_weights, no_progress_bars
from coca_lab.training.checkpoints import (
    STATE_FILE,
    catch_read_errors,
    catch_write_errors,
    last_checkpoint,
    sorted_checkpoints,
)
from coca_lab.training.data import TrainingData, check_sources, load_data, training_documents
from coca_lab.training.interrupts import StopOnSignal
from coca_lab.training.model import (
    choose_parameters,
    load_teacher,
    make_model,
    own_device,
    parameter_counts,
    start_sizes,
)
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.progress import Bar, Lines
from coca_lab.training.recipe import (
    TEXT,
    Recipe,
    StageRecipe,
    TrainingRecipe,
    as_yaml,
    differences,
    load_recipe,
)
from coca_lab.training.sharding import check_kind
from coca_lab.training.stages import join_curves, stage_blocks
from coca_lab.training.trainer import RecipeTrainer, training_arguments

log = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder, or a stage's, that has it is finished.
SUMMARY_FILE, STAGE_FILE = "training.json", "stage.json"
# While a process trains.
LOCK_FILE = ".lock"
TEXT_FILE, START_FILE, TOKENIZER = "text.json", "start.json", "tokenizer"


class TrainingStopped(UserError):
    """A callback has ended training before the last step; the same command goes on."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Attributes:
        recipe: The recipe.
        output: Its folder.
        tokenizer: Its tokenizer.
        data: Its blocks.
        callbacks: Further Trainer callbacks.
    """

    recipe: Recipe
    output: Path
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    callbacks: Sequence[TrainerCallback] = ()


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
    output = Path(output)
    recipe.check()
    if is_finished(output):
        check_same_recipe(recipe, output)
        return output
    # What is wrong is found out before the text is read, which can take hours.
    check_sources(recipe)
    state = PartialState(cpu=not torch.accelerator.is_available())
    sizes, dtype = _start_of(recipe)
    with ExitStack() as stack:
        with state.main_process_first():
            if state.is_main_process:
                check_writable(output / RECIPE_FILE)
                stack.enter_context(hold(output / LOCK_FILE))
                training_arguments(recipe.training, output, state.num_processes)
                claim_folder(recipe, output, sizes, may_change)
                log.info("%s: reading the text", output)
            tokenizer = load_run_tokenizer(recipe, output)
        data = load_data(recipe, tokenizer)
        if state.is_main_process:
            log.info("%s: %s", output, data.describe())
            check_same_text(data.fingerprint, output)
        run = Run(recipe, output, tokenizer, data, callbacks)
        start = _measure_start(run)
        trainer, stages = fit_stages(run)
        model = save_trained(trainer, tokenizer, output, dtype)
        if model is not None:
            with catch_write_errors(output, trainer.describe_saved):
                _summarise(run, sizes, model, stages, start)
        state.wait_for_everyone()
    return output


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return read_json(Path(output) / SUMMARY_FILE)


# Resolve: what the recipe starts from


def _start_of(recipe: Recipe) -> tuple[dict[str, Any] | None, torch.dtype | None]:
    """Sizes of the model to start from, if there is one, and the dtype to save the result in."""
    sizes = dtype = None
    if recipe.model.start is not None:
        model = model_without_weights(recipe.model.start, "auto")
        sizes, dtype = start_sizes(model), model.dtype
    if recipe.model.teacher is not None:
        model_without_weights(recipe.model.teacher)
    if recipe.model.dtype != "auto":
        dtype = getattr(torch, recipe.model.dtype)
    return sizes, dtype


# Claim: the folder is this run's


def claim_folder(
    recipe: Recipe,
    output: Path,
    sizes: dict[str, Any] | None = None,
    may_change: Collection[str] = (),
) -> None:
    """Make a folder that of a run, new or unfinished.

    Args:
        recipe: The run.
        output: Its folder.
        sizes: Those of the model to start from, if there is one.
        may_change: As for `train`.

    Raises:
        UserError: If the folder belongs to another recipe or to something else.
    """
    if has_begun(output):
        check_same_recipe(recipe, output, {"model.dtype", *may_change})
    else:
        # A start that failed, for example for lack of text, has left nothing to resume.
        for name in (TEXT_FILE, START_FILE):
            (output / name).unlink(missing_ok=True)
        for name in (TOKENIZER, "checkpoints", "stages", "logs"):
            shutil.rmtree(output / name, ignore_errors=True)
    write_text(output / RECIPE_FILE, as_yaml(recipe, sizes))


def has_begun(output: Path) -> bool:
    """Whether a folder holds a run with a checkpoint, whole or not; UserError if something else."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output")
    if not (output / RECIPE_FILE).is_file():
        # A start that was killed may have left partial files.
        there = output.iterdir() if output.is_dir() else []
        if any(not p.name.endswith(".partial") and p.name != LOCK_FILE for p in there):
            raise UserError(f"{output} exists and is not a run folder; choose another --output")
        return False
    folders = [output, *output.glob("stages/*")]
    return is_finished(output) or any(
        (folder / STAGE_FILE).is_file() or sorted_checkpoints(folder / "checkpoints")
        for folder in folders
    )


def check_same_recipe(recipe: Recipe, output: Path, may_change: Collection[str] = ()) -> None:
    """Raise UserError if the run in a folder has another recipe, but for fields that may change."""
    changed = differences(load_recipe(output / RECIPE_FILE), recipe)
    # Where tokens are stored has no influence on what is trained.
    if changed := [name for name in changed if name not in ("data.cache", *may_change)]:
        raise UserError(
            f"{output} holds a run of another recipe (different: {', '.join(changed)}); choose "
            "another --output, or remove the folder"
        )


# Data: a tokenizer, and the text that the run was started on


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is kept in the run folder for later starts."""
    data = recipe.data
    named = data.tokenizer or recipe.model.start
    if named is not None:
        return load_tokenizer(named)
    extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
    return load_or_train_tokenizer(
        output / TOKENIZER,
        lambda: chain(extra, training_documents(data)),
        data.vocab_size,
        split_digits=data.split_digits,
    )


def check_same_text(fingerprint: dict[str, Any], output: Path) -> None:
    """Write the fingerprint of the texts into the run folder, or compare it with the one there.

    Raises:
        UserError: If the run was started on different text.
    """
    found = fingerprint[TEXT] if list(fingerprint) == [TEXT] else fingerprint
    path = output / TEXT_FILE
    if not path.is_file():
        write_json(path, found)
    elif read_json(path) != found:
        raise UserError(
            f"{output}: the training text has changed since this run was started (its fingerprint "
            f"is in {path}); restore the text, or choose another --output"
        )


def _measure_start(run: Run) -> dict[str, Any]:
    """Name and validation of ``model.start`` as the entry ``start``, measured once in a run.

    Empty without a start or without validation.
    """
    name, settings = run.recipe.model.start, run.recipe.training
    if name is None or run.data.validation is None:
        return {}
    path, state = run.output / START_FILE, PartialState()
    if not path.is_file():
        trainer = RecipeTrainer(
            settings,
            retrieval=run.data.retrieval,
            model=load_model(name, device=own_device()),
            args=training_arguments(settings, run.output, state.num_processes),
            eval_dataset=run.data.validation,
        )
        trainer.is_fsdp_enabled = False  # a whole model, which is read alone
        found = trainer.measured(trainer.evaluate())
        del trainer
        gc.collect()  # Trainer and model refer to each other
        if state.is_main_process:
            write_json(path, {"name": Path(name).name, **found})
        state.wait_for_everyone()
    return {"start": read_json(path)}


# Fit: one stage after another


def fit_stages(run: Run) -> tuple[RecipeTrainer, list[dict[str, Any]]]:
    """Train all stages that are not finished yet.

    Returns:
        The trainer of the last stage, whose model is not saved yet, and the summary of every stage.

    Raises:
        UserError: As `fit`.
    """
    state, recipe = PartialState(), run.recipe
    *earlier, last = zip(recipe.run_stages, stage_blocks(recipe, run.data), strict=True)
    summaries: list[dict[str, Any]] = []
    before: Path | None = None
    for stage, blocks in earlier:
        folder = run.output / "stages" / stage.name
        if not (folder / STAGE_FILE).is_file():
            trainer, summary = fit(run, stage, blocks, folder, before)
            model = save_trained(trainer, run.tokenizer, folder)
            if model is not None:
                with catch_write_errors(folder, trainer.describe_saved):
                    write_json(folder / STAGE_FILE, summary)
            del trainer, model
            gc.collect()  # Trainer and model refer to each other
            state.wait_for_everyone()
        if state.is_main_process:
            # Their optimizer states, twice as large as the weights, are no longer needed.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        summaries.append(read_json(folder / STAGE_FILE))
        before = folder
    stage, blocks = last
    folder = run.output / "stages" / stage.name if recipe.stages else run.output
    trainer, summary = fit(run, stage, blocks, folder, before)
    return trainer, [*summaries, summary]


def fit(
    run: Run, stage: StageRecipe, blocks: Dataset[Any], folder: Path, before: Path | None
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """Train a stage to its last step, from the last checkpoint in the folder if there is one.

    Args:
        run: The run.
        stage: The stage; a recipe without stages has a single one.
        blocks: Its blocks.
        folder: Checkpoints and curves go into its subfolders.
        before: Folder of the stage whose model this one starts from, or None.

    Returns:
        The trainer with the trained model, and the stage's summary.

    Raises:
        UserError: If the Trainer rejects the settings, a checkpoint cannot be written or read, or
            the teacher or the starting model does not fit the recipe.
        TrainingStopped: If a callback has stopped training early.
        TrainingDiverged: If the loss or a weight is no longer finite.
        Interrupted: If SIGINT or SIGTERM came; the last step is saved unless two came.
    """
    settings = stage.settings(run.recipe.training)
    set_seed(settings.seed)
    resume, state = _resume(folder)
    done = 0 if state is None else state.global_step
    if before is None:
        model = make_model(run.recipe, run.tokenizer)
    else:
        model = load_model(before, device=own_device())
    model = choose_parameters(model, stage)
    trained, parameters = parameter_counts(model)
    if PartialState().is_main_process:
        log.info(
            f"{folder}: {parameters:,} parameters"
            f"{'' if trained == parameters else f' ({trained:,} of them trained)'} on "
            f"{PartialState().device}, {settings.steps:,} steps of {settings.global_batch_size:,} "
            f"blocks, {f'resuming from step {done:,}' if done else 'from the first step'}"
        )
    make_loss = nullcontext()
    if stage.objective != "next_token":
        make_loss = teacher_loss(load_teacher(run.recipe), model, stage.objective)
    seconds = None
    with make_loss as loss:
        trainer = _make_trainer(run, settings, folder, resume, model, loss, blocks)
        if state is None or done < settings.steps:
            seconds = _train_to_the_end(trainer, settings, folder, resume)
        else:
            # After a kill between the last step and the end, Trainer would do another step.
            trainer._load_from_checkpoint(str(resume))
            trainer.state = state
    tokens = settings.global_batch_size * run.recipe.data.block_length
    speed = (settings.steps - done) * tokens / seconds if seconds else None
    return trainer, {
        "name": stage.name,
        "train": stage.train,
        "objective": stage.objective,
        "steps": settings.steps,
        "tokens": settings.steps * tokens,
        "parameters": parameters,
        "trained": trained,
        "trained_share": trained / parameters,
        "seconds": seconds if resume is None else None,  # of the whole stage
        "throughput": None if speed is None else {"tokens_per_second": speed},
        **trainer.curves(),
    }


def _resume(folder: Path) -> tuple[Path | None, TrainerState | None]:
    """The checkpoint to resume from, and its state.

    One process chooses, as others may see an older state of a network file system.
    """
    chosen = None
    if PartialState().is_main_process:
        chosen = last_checkpoint(folder / "checkpoints", say=True)
    resume = broadcast_object_list([chosen])[0]
    if resume is None:
        return None, None
    with catch_read_errors(resume):
        return resume, TrainerState.load_from_json(str(resume / STATE_FILE))


def _make_trainer(
    run: Run,
    settings: TrainingRecipe,
    folder: Path,
    resume: Path | None,
    model: PreTrainedModel,
    loss: Any,
    blocks: Dataset[Any],
) -> RecipeTrainer:
    """The trainer of a stage; UserError if it rejects the settings or the checkpoint."""
    every, state, retrieval = run.recipe.validation.every, PartialState(), run.data.retrieval
    arguments = training_arguments(settings, folder, state.num_processes, validate_every=every)
    arguments.eval_on_start = every is not None and resume is None
    if run.recipe.stages or run.data.is_ordered:
        arguments.train_sampling_strategy = "sequential"
    in_terminal = sys.stderr.isatty() and not arguments.disable_tqdm
    shown: list[TrainerCallback] = [Bar(retrieval) if in_terminal else Lines(retrieval)]
    if "tensorboard" in settings.report_to and state.is_main_process:
        # In the run folder; Trainer's own takes its folder from the environment.
        from torch.utils.tensorboard import SummaryWriter
        from transformers.integrations import TensorBoardCallback

        shown.append(TensorBoardCallback(SummaryWriter(folder / "logs")))
    try:
        trainer = RecipeTrainer(
            settings,
            loss=loss,
            retrieval=retrieval,
            model=model,
            args=arguments,
            train_dataset=blocks,
            eval_dataset=run.data.validation,
            callbacks=[*shown, *run.callbacks],
        )
    except UserError:
        raise
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"the Trainer rejects these settings: {error}") from error
    if resume is not None:
        check_kind(resume, sharded=trainer.is_fsdp_enabled)
    return trainer


def _train_to_the_end(
    trainer: RecipeTrainer, settings: TrainingRecipe, folder: Path, resume: Path | None
) -> float:
    """Train to the last step; the seconds that it took."""
    stop = StopOnSignal(trainer.accelerator)
    trainer.add_callback(stop)
    try:
        with stop, no_progress_bars():
            result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except UserError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        if not settings.trainer:
            raise
        raise UserError(f"training.trainer cannot be used: {error}") from error
    done = trainer.state.global_step
    if stop.requested():
        raise Interrupted(
            f"{folder}: training ended after step {done:,} of {settings.steps:,}, which is saved; "
            "run the same command again to resume",
            stop.signal or signal.SIGTERM,
        )
    if done != settings.steps:
        raise TrainingStopped(
            f"training stopped at step {done} of {settings.steps}; run the same command again to "
            "resume"
        )
    return result.metrics["train_runtime"]


def save_trained(
    trainer: RecipeTrainer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel | None:
    """Merge adapters and save the model: written to a temporary folder, then moved.

    Args:
        trainer: The trainer.
        tokenizer: Saved with the model.
        folder: Where to.
        dtype: Of the saved weights; by default that of training.

    Returns:
        The model on the process that writes, None on the others.

    Raises:
        UserError: If the folder cannot be written, or the dtype cannot hold a weight.
        TrainingDiverged: If a weight is not finite.
    """
    partial = folder / ".model.partial"
    with no_progress_bars(), catch_write_errors(folder, trainer.describe_saved):
        model, weights = trainer.final_weights(dtype)
        if not trainer.is_world_process_zero():
            return None
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial, state_dict=weights)
        if dtype is not None:
            model.config.dtype = dtype
            model.config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            if path.is_dir():  # chat templates; a folder takes the place of an empty one alone
                shutil.rmtree(folder / path.name, ignore_errors=True)
            replace(path, folder / path.name)
        partial.rmdir()
    return model


# Summarise: the record that marks the run as finished


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
