"""`train`: from a recipe to an ordinary Transformers folder, top to bottom.

Claim the folder, load the data, fit stage after stage, summarise. An interrupted run resumes from
the last checkpoint of its current stage.

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
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from coca_lab.environment import describe_environment
from coca_lab.files import read_json, write_json
from coca_lab.folders import write_card
from coca_lab.loading import load_model, model_without_weights
from coca_lab.recipe import Recipe, all_fields
from coca_lab.recipe_sections import TrainingRecipe
from coca_lab.training.checkpoints import catch_write_errors, last_state
from coca_lab.training.folder import (
    STAGE_FILE,
    START_FILE,
    SUMMARY_FILE,
    Summary,
    check_finished,
    check_same_text,
    claim,
    is_finished,
    stage_folder,
)
from coca_lab.training.model import choose_parameters, load_teacher, make_model
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.settings import training_arguments
from coca_lab.training.texts import TrainingData, load_data, load_run_tokenizer
from coca_lab.training.trainer import RecipeTrainer

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
    if is_finished(output):
        check_finished(recipe, output, may_change)
        return output
    state = PartialState(cpu=not torch.accelerator.is_available())
    # What the recipe says wrong is said before the text is read, which can take hours.
    arguments = [
        training_arguments(recipe, stage, stage_folder(recipe, output, number), state.num_processes)
        for number, stage in enumerate(recipe.run_stages)
    ]
    dtype = saved_dtype(recipe)
    with ExitStack() as stack:
        with state.main_process_first():
            if state.is_main_process:
                stack.enter_context(claim(recipe, output, may_change))
                log.info("%s: reading the text", output)
            tokenizer = load_run_tokenizer(recipe, output)
        data = load_data(recipe, tokenizer)
        if state.is_main_process:
            log.info("%s: %s", output, data.describe())
            check_same_text(data.fingerprint, output)
        run = Run(recipe, output, arguments, dtype, tokenizer, data, callbacks)
        measure_start(run)
        stages = [fit(run, number) for number in range(len(recipe.run_stages))]
        if state.is_main_process:
            with catch_write_errors(output, lambda: "the model is saved"):
                summarise(run, stages)
        state.wait_for_everyone()
    return output


def saved_dtype(recipe: Recipe) -> torch.dtype | None:
    """The dtype to save the model in; UserError if the start or the teacher cannot be loaded."""
    model, dtype = recipe.model, None
    if model.start is not None:
        dtype = model_without_weights(model.start, "auto").dtype
    if model.teacher is not None:
        model_without_weights(model.teacher)
    return dtype if model.dtype == "auto" else getattr(torch, model.dtype)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    recipe: Recipe
    output: Path
    arguments: list[TrainingArguments]  # of every stage
    dtype: torch.dtype | None  # to save the model in
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    callbacks: Sequence[TrainerCallback]

    def folder(self, number: int) -> Path:
        """Where the checkpoints of a stage are."""
        return stage_folder(self.recipe, self.output, number)

    def start_of(self, number: int) -> PreTrainedModel:
        """The model that a stage starts from: the recipe's, or that of the stage before."""
        if number == 0:
            return make_model(self.recipe, self.tokenizer)
        return load_model(self.folder(number - 1), device=str(PartialState().device))


def measure_start(run: Run) -> None:
    """Write the validation of ``model.start``, if there are both, into the run folder, once."""
    name, path, state = run.recipe.model.start, run.output / START_FILE, PartialState()
    if name is None or run.data.validation is None or path.is_file():
        return
    trainer = RecipeTrainer(
        run.recipe.training,
        deepcopy(run.arguments[0]),
        retrieval=run.data.retrieval,
        model=load_model(name, device=str(state.device)),
        eval_dataset=run.data.validation,
    )
    trainer.is_fsdp_enabled = False  # a whole model, which is read alone
    measured = trainer.measured(trainer.evaluate())
    if state.is_main_process:
        write_json(path, {"name": Path(name).name, **measured})


# Fit: one stage after another


def fit(run: Run, number: int) -> Summary:
    """Train a stage from its last checkpoint, or its start, and save its model; its summary."""
    gc.collect()  # the trainer and the model of the previous stage refer to each other
    recipe, folder, state = run.recipe, run.folder(number), PartialState()
    stage, is_last = recipe.run_stages[number], number + 1 == len(recipe.run_stages)
    if number and state.is_main_process:
        # Optimizer states, twice as large as the weights, are no longer needed.
        shutil.rmtree(run.folder(number - 1) / "checkpoints", ignore_errors=True)
    if (folder / STAGE_FILE).is_file():
        return read_json(folder / STAGE_FILE)
    settings = stage.settings(recipe.training)
    set_seed(settings.seed)
    resume, before = last_state(folder / "checkpoints")
    whole = run.start_of(number)
    parameters, model = whole.num_parameters(), choose_parameters(whole, stage)
    trained = model.num_parameters(only_trainable=True)
    sizes = {"parameters": parameters, "trained": trained, "trained_share": trained / parameters}
    if state.is_main_process:
        log.info("%s: %s", folder, _start(settings, sizes, resume and before.global_step))
    learns = stage.objective != "next_token"
    objective = teacher_loss(load_teacher(recipe), model, stage.objective) if learns else None
    with objective or nullcontext() as loss:
        trainer = RecipeTrainer(
            settings,
            run.arguments[number],
            loss=loss,
            retrieval=run.data.retrieval,
            callbacks=run.callbacks,
            model=model,
            train_dataset=run.data.stages[number],
            eval_dataset=run.data.validation,
        )
        seconds = trainer.train_to_the_end(resume, before)
    tokens = settings.global_batch_size * recipe.data.block_length
    done = settings.steps - before.global_step
    summary = {
        **{name: getattr(stage, name) for name in ("name", "train", "objective")},
        "steps": settings.steps,
        "tokens": settings.steps * tokens,
        **sizes,
        "seconds": seconds if resume is None else None,  # of the whole stage
        "throughput": {"tokens_per_second": done * tokens / seconds} if seconds else None,
        **trainer.curves(),
    }
    place, dtype = (run.output, run.dtype) if is_last else (folder, None)
    trainer.save_trained(run.tokenizer, place, dtype)
    if state.is_main_process and not is_last:
        with catch_write_errors(folder, trainer.describe_saved):
            write_json(folder / STAGE_FILE, summary)
    state.wait_for_everyone()
    return summary


def _start(settings: TrainingRecipe, sizes: dict[str, float], resumed: int | None) -> str:
    """What a stage trains, and from which step, in a few words."""
    few = "" if sizes["trained_share"] == 1 else f" ({sizes['trained']:,} of them trained)"
    from_step = "from the first step" if resumed is None else f"resuming from step {resumed:,}"
    return (
        f"{sizes['parameters']:,} parameters{few} on {PartialState().device}, {settings.steps:,} "
        f"steps of {settings.global_batch_size:,} blocks, {from_step}"
    )


# Summarise: the record that marks the run as finished


def summarise(run: Run, stages: list[Summary]) -> None:
    """Write the model card and ``training.json``, which marks the run as finished."""
    recipe, data, config = run.recipe, run.data, AutoConfig.from_pretrained(run.output)
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
        trained += f" Perplexity on held-out blocks of the training text: {perplexity:.2f}."
    write_card(run.output, config, source=recipe.model.start, sections={"Training": trained})
    write_json(run.output / SUMMARY_FILE, summary)


def join_curves(stages: Sequence[Summary], name: str) -> list[Summary]:
    """``curve`` or ``validation`` of all stages on one axis; entries name their stage, if any."""
    entries, done = [], 0
    for summary in stages:
        stage = {"stage": summary["name"]} if summary["name"] else {}
        entries += [{**entry, "step": entry["step"] + done, **stage} for entry in summary[name]]
        done += summary["steps"]
    return entries


def what_was_kept(summary: Summary) -> str:
    """What a run, by its `read_summary`, has kept of its start; empty where it was not measured."""
    start, curve = summary.get("start"), summary["validation"]
    if not start or not curve:
        return ""
    last = curve[-1]
    parts = [f"perplexity {100 * (last['perplexity'] / start['perplexity'] - 1):+.1f} %"]
    before = start.get("retrieval", {})
    for name, asks in summary.get("retrieval", {}).items():
        count, where = asks["prompts"], f"{asks['what']} at {asks['length']:,} tokens"
        had = f" where it has {round(before[name] * count)}" if name in before else ""
        parts.append(f"{where} {round(last['retrieval'][name] * count)} of {count}{had}")
    return f"kept of {start['name']}: {', '.join(parts)}"
