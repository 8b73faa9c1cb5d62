"""`train`: from a recipe to an ordinary Transformers folder, top to bottom.

Check the recipe, claim the folder, load the data, fit stage after stage, summarise. An interrupted
run resumes from the last checkpoint of its current stage.

A recipe without stages is a single stage in the run folder itself. Otherwise every stage is a run
of Trainer in ``stages/NAME``, which reads the blocks that follow those of the previous stage and
starts from its weights.
"""

import gc
import logging
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import (
    AutoConfig,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from coca_attention.errors import UserError
from coca_lab.environment import describe_environment
from coca_lab.files import read_json, write_json
from coca_lab.folders import write_card
from coca_lab.loading import (
    check_vocabulary,
    guard_vocabulary,
    load_model,
    model_without_weights,
    no_progress_bars,
)
from coca_lab.recipe import Recipe, all_fields
from coca_lab.training.arguments import training_arguments
from coca_lab.training.callbacks import shown
from coca_lab.training.folder import (
    STAGE_FILE,
    START_FILE,
    SUMMARY_FILE,
    Summary,
    catch_write_errors,
    check_finished,
    check_same_text,
    claim,
    last_state,
)
from coca_lab.training.model import choose_parameters, load_teacher, make_model
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.precision import with_precision
from coca_lab.training.texts import TrainingData, inputs_of, load_data
from coca_lab.training.trainer import RecipeTrainer
from coca_lab.weights import quantised_by

log = logging.getLogger(__name__)


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
        may_change: Fields of the recipe, such as ``data.source``, that may differ from those of
            the run in the folder. What they name is compared by content in any case.
        callbacks: Further Trainer callbacks.

    Returns:
        The folder.

    Raises:
        UserError: If the folder holds a run of another recipe, text or start or is in use, or the
            data cannot be used.
        TrainingDiverged: If the loss or a weight is no longer finite.
    """
    output = Path(output)
    recipe.check()
    recipe = with_precision(recipe, output)
    if (output / SUMMARY_FILE).is_file():
        check_finished(recipe, inputs_of(recipe), output, may_change)
        return output
    state = PartialState(cpu=not torch.accelerator.is_available())
    if state.num_processes == 1 and torch.cuda.device_count() > 1:
        raise UserError(
            f"one process cannot use {torch.cuda.device_count()} GPUs: start one process per GPU "
            "with accelerate launch, or select a GPU with CUDA_VISIBLE_DEVICES=0"
        )
    # What the recipe says wrong is said before the text is read, which can take hours.
    folders = [output / "stages" / stage.name for stage in recipe.stages] or [output]
    arguments = [
        training_arguments(recipe, schedule, folder, state.num_processes)
        for schedule, folder in zip(recipe.schedules, folders, strict=True)
    ]
    dtype = saved_dtype(recipe)
    with no_progress_bars(), ExitStack() as stack:
        with state.main_process_first():
            inputs = inputs_of(recipe)
            if state.is_main_process:
                stack.enter_context(claim(recipe, inputs, output, may_change))
                log.info("%s: reading the text", output)
        data = load_data(recipe, inputs, output)
        if state.is_main_process:
            log.info("%s: %s", output, data.describe())
            check_same_text(data.fingerprint, output)
        if data.validation is not None:
            # Every process reads whole micro-batches, of a text that is too short smaller ones.
            size = len(data.validation) // state.num_processes
            for each in arguments:
                most = each.per_device_train_batch_size
                each.per_device_eval_batch_size = largest_divisor(size, most)
        saved = [last_state(folder / "checkpoints") for folder in folders]
        run = Run(recipe, output, folders, arguments, dtype, data, saved, callbacks)
        if recipe.model.start is not None and data.validation is not None:
            measure_start(run, recipe.model.start)
        stages = [fit(run, number) for number in range(len(folders))]
        if state.is_main_process:
            with catch_write_errors(output, lambda: "the model is saved"):
                summarise(run, stages)
        state.wait_for_everyone()
    return output


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most so large."""
    return next(size for size in range(min(most, number), 0, -1) if number % size == 0)


# Before the text is read


def saved_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype to save the model in; UserError if the start or the teacher cannot be loaded."""
    model = recipe.model
    dtype = None
    if model.start is not None:
        start = model_without_weights(model.start, "auto")
        if quantised_by(model.start, start.config) is not None:
            raise UserError(
                f"{model.start} is quantised, and quantised weights cannot be trained: set "
                "model.start to the model that it was made from, in full precision"
            )
        dtype = start.dtype
    if model.teacher is not None:
        model_without_weights(model.teacher)
    return dtype if model.dtype == "auto" else getattr(torch, model.dtype)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    recipe: Recipe
    output: Path
    folders: list[Path]  # of every stage, with its checkpoints
    arguments: list[TrainingArguments]  # of every stage
    dtype: torch.dtype | None  # to save the model in
    data: TrainingData
    saved: list[tuple[Path | None, TrainerState]]  # what every stage resumes from
    callbacks: Sequence[TrainerCallback]


# Fit: one stage after another


def measure_start(run: Run, name: str) -> None:
    """Write the validation of the start into the run folder, once."""
    path = run.output / START_FILE
    state = PartialState()
    if path.is_file():
        return
    model = load_model(name, device=str(state.device))
    check_vocabulary(model, run.data.tokenizer, run.data.largest)
    guard_vocabulary(model, run.data.tokenizer)
    trainer = RecipeTrainer(
        run.recipe.training,
        deepcopy(run.arguments[0]),
        retrieval=run.data.retrieval,
        model=model,
        eval_dataset=run.data.validation,
    )
    trainer.is_fsdp_enabled = False  # a whole model, which is read alone
    measured = trainer.measured(trainer.evaluate())
    if state.is_main_process:
        write_json(path, {"name": Path(name).name, **measured})


def fit(run: Run, number: int) -> Summary:
    """Train a stage from its last checkpoint, or its start, and save its model; its summary."""
    gc.collect()  # the trainer and the model of the previous stage refer to each other
    recipe = run.recipe
    folder = run.folders[number]
    state = PartialState()
    stage = recipe.run_stages[number]
    settings = recipe.schedules[number]
    arguments = run.arguments[number]
    is_last = number + 1 == len(run.folders)
    if number and state.is_main_process:
        # Optimizer states, twice as large as the weights, are no longer needed.
        shutil.rmtree(run.folders[number - 1] / "checkpoints", ignore_errors=True)
    if (folder / STAGE_FILE).is_file():
        return read_json(folder / STAGE_FILE)
    set_seed(settings.seed)
    resume, before = run.saved[number]
    if number == 0:
        whole = make_model(recipe, run.data.tokenizer)
    else:
        whole = load_model(run.folders[number - 1], device=str(state.device))
    check_vocabulary(whole, run.data.tokenizer, run.data.largest)
    guard_vocabulary(whole, run.data.tokenizer)  # for what tasks and prompts have
    parameters = whole.num_parameters()
    model = choose_parameters(whole, stage)
    trained = model.num_parameters(only_trainable=True)
    sizes = {"parameters": parameters, "trained": trained, "trained_share": trained / parameters}
    if state.is_main_process:
        log.info(
            "%s: %s parameters%s on %s, %s steps of %s blocks, %s",
            folder,
            f"{parameters:,}",
            "" if trained == parameters else f" ({trained:,} of them trained)",
            state.device,
            f"{settings.steps:,}",
            f"{settings.global_batch_size:,}",
            f"resuming from step {before.global_step:,}" if resume else "from the first step",
        )
    learns = stage.objective != "next_token"
    objective = teacher_loss(load_teacher(recipe), model, stage.objective) if learns else None
    with objective or nullcontext() as loss:
        trainer = RecipeTrainer(
            settings,
            arguments,
            loss=loss,
            retrieval=run.data.retrieval,
            callbacks=[*shown(arguments, settings.report_to, run.data.retrieval), *run.callbacks],
            model=model,
            train_dataset=run.data.stages[number],
            eval_dataset=run.data.validation,
        )
        seconds = trainer.train_to_the_end(resume, before)
    place, dtype = (run.output, run.dtype) if is_last else (folder, None)
    with catch_write_errors(place, trainer.describe_saved):
        trainer.save_trained(run.data.tokenizer, place, dtype)
        tokens = settings.global_batch_size * recipe.data.block_length  # of a step
        done = settings.steps - before.global_step
        summary = {
            **{name: getattr(stage, name) for name in ("name", "train", "objective")},
            **sizes,
            **trainer.curves(),
            "steps": settings.steps,
            "tokens": settings.steps * tokens,
            "seconds": seconds if resume is None else None,  # known if it was not interrupted
            "throughput": {"tokens_per_second": done * tokens / seconds} if seconds else None,
        }
        if state.is_main_process and not is_last:
            write_json(folder / STAGE_FILE, summary)
    state.wait_for_everyone()
    return summary


# Summarise: the record that marks the run as finished


def summarise(run: Run, stages: list[Summary]) -> None:
    """Write the model card and ``training.json``, which marks the run as finished."""
    recipe = run.recipe
    data = run.data
    config = AutoConfig.from_pretrained(run.output)
    seconds = [stage["seconds"] for stage in stages]
    curves = {name: join_curves(stages, name) for name in ("curve", "validation")}
    summary = {
        "attention": recipe.model.attention,
        "parameters": stages[-1]["parameters"],
        "dtype": str(config.dtype).removeprefix("torch."),
        "steps": recipe.steps,
        "tokens": sum(stage["tokens"] for stage in stages),
        "epochs": max(data.epochs.values()),
        "source_epochs": data.epochs,
        "seconds": None if None in seconds else sum(seconds),  # None if the run was interrupted
        "throughput": stages[-1]["throughput"],  # of the last stage
        **curves,
        "recipe": all_fields(recipe),
        "seed": recipe.training.seed,
        "environment": describe_environment(),
    }
    if (run.output / START_FILE).is_file():
        summary["start"] = read_json(run.output / START_FILE)
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
        # Of an absolute path the last part: the card may be published.
        text = Path(recipe.validation.source or "").name
        where = f"blocks of `{text}`" if text else "held-out blocks of the training text"
        trained += f" Perplexity on {where}: {perplexity:.2f}."
    write_card(run.output, config, source=recipe.model.start, sections={"Training": trained})
    write_json(run.output / SUMMARY_FILE, summary)


def join_curves(stages: Sequence[Summary], name: str) -> list[Summary]:
    """``curve`` or ``validation`` of all stages on one axis; entries name their stage, if any."""
    entries = []
    done = 0
    for summary in stages:
        stage = {"stage": summary["name"]} if summary["name"] else {}
        entries += [{**entry, "step": entry["step"] + done, **stage} for entry in summary[name]]
        done += summary["steps"]
    return entries


def what_was_kept(summary: Summary) -> str:
    """What a run, by its `read_summary`, has kept of its start; empty where it was not measured."""
    start = summary.get("start")
    curve = summary["validation"]
    if not start or not curve:
        return ""
    last = curve[-1]
    parts = [f"perplexity {100 * (last['perplexity'] / start['perplexity'] - 1):+.1f}%"]
    before = start.get("retrieval", {})
    for name, asks in summary.get("retrieval", {}).items():
        count = asks["prompts"]
        where = f"{asks['what']} at {asks['length']:,} tokens"
        had = f" where it has {round(before[name] * count)}" if name in before else ""
        parts.append(f"{where} {round(last['retrieval'][name] * count)} of {count}{had}")
    return f"kept of {start['name']}: {', '.join(parts)}"
