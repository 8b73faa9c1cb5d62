"""`train`: from a recipe to an ordinary Transformers folder, top to bottom.

Resolve what the recipe names, claim the folder, load the data, fit stage after stage, summarise.
An interrupted run resumes from the last checkpoint of its current stage.

A recipe without stages is a single stage in the run folder itself. Otherwise every stage is a run
of Trainer in ``stages/NAME``, which reads the blocks that follow those of the previous stage and
starts from its weights.
"""

import gc
import logging
import shutil
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    AutoConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)

from coca_attention.errors import UserError, error_prefix
from coca_lab.data import (
    BlockDataset,
    Document,
    SourceSettings,
    held_out,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from coca_lab.data.blocks import (
    TaskBlocks,
    apportion,
    block_order,
    mixture_order,
    spread_evenly,
)
from coca_lab.data.documents import source_files, text_fingerprint
from coca_lab.data.tasks import vocabulary_text
from coca_lab.data.text import (
    TOKENIZER_CHARACTERS,
    end_of_text,
    up_to,
)
from coca_lab.environment import describe_environment
from coca_lab.files import check_writable, hold, read_json, write_json, write_text, writing
from coca_lab.fingerprints import fingerprint, model_fingerprint
from coca_lab.folders import write_card
from coca_lab.loading import load_model, model_without_weights, no_progress_bars
from coca_lab.recipe import (
    TEXT,
    VALIDATION,
    Recipe,
    all_fields,
    as_yaml,
    check_same_recipe,
)
from coca_lab.training.callbacks import Interrupted, StopOnSignal
from coca_lab.training.checkpoints import catch_write_errors, last_state, sorted_checkpoints
from coca_lab.training.model import choose_parameters, load_teacher, make_model
from coca_lab.training.objectives import teacher_loss
from coca_lab.training.retrieval import Retrieval, load_retrieval
from coca_lab.training.trainer import RecipeTrainer, training_arguments

log = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
# Written last: a run folder, or a stage's, that has it is finished.
SUMMARY_FILE, STAGE_FILE = "training.json", "stage.json"
# While a process trains.
LOCK_FILE = ".lock"
TEXT_FILE, START_FILE, INPUTS_FILE = "text.json", "start.json", "inputs.json"
TOKENIZER = "tokenizer"
"""Folder of a newly trained tokenizer."""


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
    dtype = resolve(recipe, output)
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
        run = Run(recipe, output, dtype, tokenizer, data, callbacks)
        measure_start(run)
        stages = [fit(run, number) for number in range(len(recipe.run_stages))]
        if state.is_main_process:
            with catch_write_errors(output, lambda: "the model is saved"):
                summarise(run, stages)
        state.wait_for_everyone()
    return output


def is_finished(output: str | Path) -> bool:
    """Whether a run folder holds a fully trained model."""
    return (Path(output) / SUMMARY_FILE).is_file()


def check_finished(recipe: Recipe, output: Path, may_change: Collection[str] = ()) -> None:
    """Raise UserError if a finished run had another recipe, text, tokenizer, start or teacher."""
    check_same_recipe(recipe, output / RECIPE_FILE, may_change)
    inputs = inputs_of(recipe)
    known = check_same_inputs(inputs, output)
    # A dataset of the Hub has a name alone, and a run of an earlier version no record.
    unknown = [name for name, each in inputs.items() if not known or each.startswith("hf:")]
    if unknown:
        names = ", ".join(unknown)
        log.warning("%s is finished; not known is whether this changed since: %s", output, names)


def inputs_of(recipe: Recipe, start: str = "") -> dict[str, str]:
    """Fingerprints of the texts and models that a recipe names, by what they are.

    That of the start may be given, for one that is yet to be trained.
    """
    data, model, read = recipe.data, recipe.model, dict[str, str]()
    for name, _, each in texts(recipe):
        read.setdefault(each.source, "training text" if name == TEXT else f"{name} text")
    inputs = {name: text_fingerprint(source) for source, name in read.items()}
    for name, path in (("tokenizer", data.tokenizer), ("teacher", model.teacher)):
        if path is not None:
            inputs[name] = model_fingerprint(path)
    if model.start is not None:
        inputs["start"] = start or model_fingerprint(model.start)
    return inputs


def tokenizer_key(recipe: Recipe) -> str:
    """Fingerprint of everything that a newly trained tokenizer depends on."""
    data = recipe.data
    sources = [
        [text_fingerprint(x.source), x.text_field, x.bad_lines, getattr(x, "weight", 1.0)]
        for x in data.sources.values()
    ]
    about = [data.held_out, data.vocab_size, data.split_digits, bool(data.passkey_share)]
    return fingerprint([sources, about])


def check_same_inputs(inputs: dict[str, str], output: Path) -> bool:
    """Raise UserError if `inputs_of` a recipe differ from the run's; False if it has no record."""
    path = output / INPUTS_FILE
    if not path.is_file():
        return False
    before = read_json(path)
    changed = [f"the {name}" for name in inputs if inputs[name] != before.get(name)]
    if changed:
        raise UserError(
            f"{output}: {' and '.join(changed)} has changed since this run was started: restore "
            "it, remove the folder to train again, or choose another --output"
        )
    return True


def read_summary(output: str | Path) -> dict[str, Any]:
    """The ``training.json`` of a finished run folder."""
    return read_json(Path(output) / SUMMARY_FILE)


# Resolve: what the recipe names, before the text is read, which can take hours


def resolve(recipe: Recipe, output: Path) -> torch.dtype | None:
    """The dtype to save the model in; UserError if what the recipe names is missing."""
    for _, where, source in texts(recipe):
        with error_prefix(where):
            source_files(source.source)
    training_arguments(recipe.training, output, PartialState().num_processes)
    dtype = None
    if recipe.model.start is not None:
        dtype = model_without_weights(recipe.model.start, "auto").dtype
    if recipe.model.teacher is not None:
        model_without_weights(recipe.model.teacher)
    if recipe.model.dtype != "auto":
        dtype = getattr(torch, recipe.model.dtype)
    return dtype


# Claim: the folder is this run's


@contextmanager
def claim(recipe: Recipe, output: Path, may_change: Collection[str]) -> Iterator[None]:
    """Make a folder that of a run, new or unfinished, and keep other processes from it."""
    check_writable(output / RECIPE_FILE)
    with hold(output / LOCK_FILE):
        if has_begun(output):
            check_same_recipe(recipe, output / RECIPE_FILE, {"model.dtype", *may_change})
            check_same_inputs(inputs_of(recipe), output)
        else:
            # A start that failed, for example for lack of text, has left nothing to resume.
            for name in (TEXT_FILE, START_FILE):
                (output / name).unlink(missing_ok=True)
            for name in (TOKENIZER, "checkpoints", "stages", "logs"):
                shutil.rmtree(output / name, ignore_errors=True)
            write_json(output / INPUTS_FILE, inputs_of(recipe))
        write_text(output / RECIPE_FILE, as_yaml(recipe))
        yield


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


# Data: the text that the run was started on, cut into blocks


@dataclass(frozen=True)
class TrainingData:
    """Everything that a run reads."""

    stages: list[Subset]  # the blocks of every stage
    is_ordered: bool  # otherwise those of the only stage are one pass over the text, to be shuffled
    validation: Subset | None  # to measure perplexity on, in whole global batches
    retrieval: Retrieval | None
    fingerprint: dict[str, Any]  # of every text, its number of tokens and their SHA-256
    epochs: dict[str, float]  # passes over each source

    def describe(self) -> str:
        """The tokens of every text and how often they are read, in a few words."""
        counts = (f"{name} {text['tokens']:,} tokens" for name, text in self.fingerprint.items())
        return f"{', '.join(counts)}; {max(self.epochs.values()):.2f} passes"


def texts(recipe: Recipe) -> Iterator[tuple[str, str, SourceSettings]]:
    """The texts of a recipe: their names, where it names them, for errors, and what to read."""
    data, validation = recipe.data, recipe.validation
    for name, source in data.sources.items():
        yield name, f"data.mixture.{name}: " if data.mixture else "data.source: ", source
    if validation.every is not None:
        source = SourceSettings(validation.source or data.source, data.text_field, data.bad_lines)
        yield VALIDATION, "validation.source: " if validation.source else "data.held_out: ", source


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is saved in the run folder for later starts."""
    data = recipe.data
    name, folder = data.tokenizer or recipe.model.start, output / TOKENIZER
    if name is None and not folder.is_dir():
        documents = training_documents(recipe)
        trained = train_tokenizer(documents, data.vocab_size, split_digits=data.split_digits)
        with writing(folder) as partial:
            trained.save_pretrained(partial)
    return load_tokenizer(name or folder)


def training_documents(recipe: Recipe) -> Iterator[Document]:
    """Documents to train a tokenizer on: of every source, as many as its weight asks for."""
    if recipe.data.passkey_share:
        yield Document("passkey", vocabulary_text())
    for name, where, source in texts(recipe):
        if name != VALIDATION:
            most = getattr(source, "weight", 1.0) * TOKENIZER_CHARACTERS
            documents = (d for d in source.documents() if not held_out(d, recipe.data.held_out))
            with error_prefix(where):
                yield from up_to(most, documents)


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    """Tokenise the texts of a recipe, or find them in the cache, and cut them into blocks."""
    data, batch, seed = recipe.data, recipe.training.global_batch_size, recipe.training.seed
    # Before the text is read, which can take hours.
    retrieval = load_retrieval(recipe, tokenizer)
    shares = list(data.task_shares.values())
    weights = [source.weight * (1 - sum(shares)) for source in data.mixture.values()]
    read = apportion([*weights, *shares], batch, recipe.steps) if weights else None
    tokens, blocks = _read_texts(recipe, tokenizer, read)
    validation = blocks.pop(VALIDATION, None)
    for index, task in enumerate(data.task_shares):
        if read is None:
            count = round(len(blocks[TEXT]) * shares[index] / (1 - sum(shares)))
        else:
            count = max(int(read[-1, len(weights) + index]), 1)
        if count:
            length, apart = data.block_length, data.separate_documents
            blocks[task] = TaskBlocks(task, tokenizer, length, count, seed, apart)
    order, epochs = _order(recipe, {name: len(each) for name, each in blocks.items()}, read)
    # Stages read consecutive parts of one order.
    steps = [stage.settings(recipe.training).steps for stage in recipe.run_stages]
    parts: Any = np.split(order, batch * np.cumsum(steps)[:-1])
    every = ConcatDataset(blocks.values())
    return TrainingData(
        stages=[Subset(every, part) for part in parts],
        is_ordered=read is not None or bool(recipe.stages),
        validation=validation,
        retrieval=retrieval,
        fingerprint={
            name: {"tokens": len(text), "sha256": sha256(text.data).hexdigest()}
            for name, text in tokens.items()
        },
        epochs=epochs,
    )


def _read_texts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, read: np.ndarray | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tokens of every text, and its blocks; those of validation spread evenly over it."""
    data, validation = recipe.data, recipe.validation
    wanted = {VALIDATION: validation.batches * recipe.training.global_batch_size}
    if read is not None:
        wanted |= dict(zip(data.mixture, read[-1].tolist(), strict=False))
    tokens, blocks = dict[str, np.ndarray](), dict[str, Any]()
    for name, where, source in texts(recipe):
        has_source = name == VALIDATION and bool(validation.source)
        most = getattr(source, "max_tokens", None)
        if most is None and name in wanted and source.source.startswith("hf:"):
            most = wanted[name] * data.block_length + 1  # a stream is read as far as needed
        with error_prefix(where):
            tokens[name] = tokenise(
                source,
                tokenizer,
                share=0.0 if has_source else data.held_out,
                from_held_out=name == VALIDATION and not has_source,
                max_tokens=most,
                folder=data.token_folder,
            )
            end = end_of_text(tokenizer) if data.separate_documents else None
            blocks[name] = BlockDataset(tokens[name], data.block_length, end=end)
            if name == VALIDATION:
                blocks[name] = spread_evenly(blocks[name], wanted[name])
    return tokens, blocks


def _order(
    recipe: Recipe, sizes: dict[str, int], read: np.ndarray | None
) -> tuple[np.ndarray, dict[str, float]]:
    """The order in which the blocks of all texts are read, and the passes over each."""
    batch, seed = recipe.training.global_batch_size, recipe.training.seed
    if read is not None:
        epochs = {name: int(n) / sizes[name] for name, n in zip(sizes, read[-1], strict=True)}
        return mixture_order(list(sizes.values()), read, seed), epochs
    there, needed = sum(sizes.values()), recipe.steps * batch
    whole = there // batch * batch
    if not whole:
        raise UserError(
            f"the training data makes {there} blocks, fewer than global_batch_size {batch}; use "
            "more text or a smaller batch"
        )
    order = block_order(whole, needed, seed) if recipe.stages else np.arange(whole)
    return order, {TEXT: needed / whole}


def check_same_text(fingerprint: dict[str, Any], output: Path) -> None:
    """Write the fingerprint of the texts into the run folder, or compare it with the one there."""
    texts = fingerprint[TEXT] if list(fingerprint) == [TEXT] else fingerprint
    path = output / TEXT_FILE
    if not path.is_file():
        write_json(path, texts)
    elif read_json(path) != texts:
        raise UserError(
            f"{output}: the training text has changed since this run was started (its fingerprint "
            f"is in {path}); restore the text, or choose another --output"
        )


# Fit: one stage after another


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    recipe: Recipe
    output: Path
    dtype: torch.dtype | None  # to save the model in
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    callbacks: Sequence[TrainerCallback]

    def folder(self, number: int) -> Path:
        """Where the checkpoints of a stage are."""
        recipe = self.recipe
        return self.output / "stages" / recipe.stages[number].name if recipe.stages else self.output


def measure_start(run: Run) -> None:
    """Write the validation of ``model.start``, if there are both, into the run folder, once."""
    name, settings = run.recipe.model.start, run.recipe.training
    path, state = run.output / START_FILE, PartialState()
    if name is None or run.data.validation is None or path.is_file():
        return
    trainer = RecipeTrainer(
        settings,
        run.output,
        retrieval=run.data.retrieval,
        model=load_model(name, device=str(state.device)),
        eval_dataset=run.data.validation,
    )
    trainer.is_fsdp_enabled = False  # a whole model, which is read alone
    measured = trainer.measured(trainer.evaluate())
    if state.is_main_process:
        write_json(path, {"name": Path(name).name, **measured})


def fit(run: Run, number: int) -> dict[str, Any]:
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
    model: Any
    if number:
        model = load_model(run.folder(number - 1), device=str(state.device))
    else:
        model = make_model(recipe, run.tokenizer)
    parameters = model.num_parameters()
    model = choose_parameters(model, stage)
    trained = model.num_parameters(only_trainable=True)
    if state.is_main_process:
        few = "" if trained == parameters else f" ({trained:,} of them trained)"
        start = f"resuming from step {before.global_step:,}" if resume else "from the first step"
        log.info(
            f"{folder}: {parameters:,} parameters{few} on {state.device}, {settings.steps:,} steps "
            f"of {settings.global_batch_size:,} blocks, {start}"
        )
    make_loss = nullcontext()
    if stage.objective != "next_token":
        make_loss = teacher_loss(load_teacher(recipe), model, stage.objective)
    options: dict[str, Any] = {}
    if run.data.is_ordered:
        options["train_sampling_strategy"] = "sequential"
    if (every := recipe.validation.every) is not None:
        options |= {"eval_strategy": "steps", "eval_steps": every, "eval_on_start": resume is None}
    with make_loss as loss:
        trainer = RecipeTrainer(
            settings,
            folder,
            loss=loss,
            retrieval=run.data.retrieval,
            callbacks=run.callbacks,
            options=options,
            model=model,
            train_dataset=run.data.stages[number],
            eval_dataset=run.data.validation,
        )
        seconds = _train_to_the_end(trainer, folder, resume, before)
    tokens = settings.global_batch_size * recipe.data.block_length
    done = settings.steps - before.global_step
    summary = {
        "name": stage.name,
        "train": stage.train,
        "objective": stage.objective,
        "steps": settings.steps,
        "tokens": settings.steps * tokens,
        "parameters": parameters,
        "trained": trained,
        "trained_share": trained / parameters,
        "seconds": seconds if resume is None else None,  # of the whole stage
        "throughput": {"tokens_per_second": done * tokens / seconds} if seconds else None,
        **trainer.curves(),
    }
    if is_last:
        trainer.save_trained(run.tokenizer, run.output, run.dtype)
    else:
        trainer.save_trained(run.tokenizer, folder, None)
    if state.is_main_process and not is_last:
        with catch_write_errors(folder, trainer.describe_saved):
            write_json(folder / STAGE_FILE, summary)
    state.wait_for_everyone()
    return summary


def _train_to_the_end(
    trainer: RecipeTrainer, folder: Path, resume: Path | None, before: TrainerState
) -> float | None:
    """Train to the last step; the seconds that it took, or None if nothing was left to train."""
    steps, stop = trainer.settings.steps, StopOnSignal(trainer.accelerator)
    if before.global_step == steps:
        # After a kill between the last step and the end, Trainer would do another step.
        trainer._load_from_checkpoint(str(resume))
        trainer.state = before
        return None
    trainer.add_callback(stop)
    try:
        with stop, no_progress_bars():
            result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except UserError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        if not trainer.settings.trainer:
            raise
        raise UserError(f"training.trainer cannot be used: {error}") from error
    done = trainer.state.global_step
    if stop.requested():
        raise Interrupted(
            f"{folder}: training ended after step {done:,} of {steps:,}, which is saved; run the "
            "same command again to resume",
            stop.signal or signal.SIGTERM,
        )
    if done != steps:
        raise UserError(
            f"training stopped at step {done} of {steps}; run the same command again to resume"
        )
    return result.metrics["train_runtime"]


# Summarise: the record that marks the run as finished


def summarise(run: Run, stages: list[dict[str, Any]]) -> None:
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


def join_curves(stages: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """``curve`` or ``validation`` of all stages on one axis; entries name their stage, if any."""
    entries, done = [], 0
    for summary in stages:
        stage = {"stage": summary["name"]} if summary["name"] else {}
        entries += [{**entry, "step": entry["step"] + done, **stage} for entry in summary[name]]
        done += summary["steps"]
    return entries


def what_was_kept(summary: dict[str, Any]) -> str:
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
