"""The paper's comparison at a size of one's choice, in pieces of time: train, evaluate, report.

Everything follows from a size and a number of tokens. What depends on the machine is decided once
and kept in ``plan.json``, so that the same command goes on where the last one was cut.
"""

import gc
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coca_attention.data import SourceSettings, held_out
from coca_attention.environment import read_json, write_json, write_text
from coca_attention.environment import replace as move
from coca_attention.errors import UserError, did_you_mean, error_prefix
from coca_attention.evaluation.passkey import PasskeySettings
from coca_attention.evaluation.perplexity import PerplexitySettings
from coca_attention.evaluation.perplexity.windows import sliding_windows
from coca_attention.evaluation.suite import ScalingSettings, Suite, run_suite
from coca_attention.evaluation.task import Progress
from coca_attention.quickstart import MODELS as QUICKSTART_MODELS
from coca_attention.quickstart import SCALED
from coca_attention.training import Recipe
from coca_attention.training.sections import DataRecipe, ModelRecipe, TrainingRecipe

MODELS: dict[str, dict[str, Any]] = {
    **{name: QUICKSTART_MODELS[name] for name in ("RoFormer", "CoCA-Slack", "CoCA-Strict")},
    "Roles": {"attention": "rope", "layers": "llg"},
    "ALiBi": QUICKSTART_MODELS["ALiBi"],
}
"""Fields of the model's recipe, in the order of training."""
HELD_OUT = 0.05
PLAN_FILE = "plan.json"
# Learning rates are those of this width, times this width / the model's (docs/reproduce.md).
WIDTH, RATE = 128, 3e-3
# A budget of tokens makes at least so many steps, if need be of smaller batches than the paper's.
STEPS, BATCH, SMALLEST = 2000, 256, 8
# For devices that are not at hand (docs/reproduce.md): the share of the peak FLOP/s; bytes of
# activations per token, layer and channel, and per logit.
ASSUMED_UTILIZATION, ACTIVATION, LOGIT = 0.4, 34, 10
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Size:
    """Shape of the models and of the evaluation: the paper's, scaled down."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 32768
    block_length: int = 512
    longest: int = 64
    documents: int = 100
    samples: int = 100


SIZES = {
    "toy": Size(32, 3, 2, vocab_size=512, block_length=256, longest=4, documents=2, samples=2),
    "50m": Size(512, 12, 8),
    "125m": Size(768, 12, 12),
    "350m": Size(1024, 24, 16),
}


@dataclass
class ReproduceSettings:
    """What to train and evaluate, and how much of it now."""

    size: Literal["toy", "50m", "125m", "350m"] = "50m"
    """Parameters of the models; toy is for a try on a CPU."""
    output: str = ""
    """Folder of everything; by default runs/reproduce-SIZE."""
    text: str = ""
    """Text to tokenise, as data.source of a recipe; not needed once there is tokenised text."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    test_text: str = ""
    """Text to evaluate on, as text; by default a twentieth of its documents, held out."""
    max_tokens: int | None = None
    """Tokens of the text to keep at most; by default all."""
    tokenised: str = ""
    """Folder of tokenised text; by default OUTPUT/text."""
    tokenizer: str | None = None
    """Folder or name of a Transformers tokenizer; by default a byte-level BPE is trained."""
    models: list[str] = field(default_factory=lambda: list(MODELS))
    """Which models: RoFormer, CoCA-Slack, CoCA-Strict, Roles (two local layers and a global one,
    repeated) and ALiBi."""
    tokens: int | None = None
    """Training tokens of every model; by default tokens_per_parameter."""
    tokens_per_parameter: float = 20.0
    """Training tokens for each parameter of RoFormer."""
    minutes_per_model: float | None = None
    """In place of tokens: as many as the slowest model reads in this time here, as measured at the
    start."""
    passkey_share: float = 0.0
    """Share of the blocks that are passkey texts; the paper trains on text alone, and small models
    then find no passkeys."""
    factors: list[float] = field(default_factory=lambda: [2.0, 4.0, 8.0])
    """NTK factors that rotary models without roles are evaluated with, besides none."""
    longest: int | None = None
    """Longest window and prompt as a multiple of the training length; by default 64."""
    documents: int | None = None
    """Documents to evaluate on; by default 100."""
    samples: int | None = None
    """Passkey prompts of each length; by default 100."""
    learning_rate: float | None = None
    """Peak learning rate of all models; by default 3e-3 x 128 / the width of the model."""
    precision: Literal["float32", "bfloat16"] | None = None
    """By default bfloat16 on a GPU and float32 on a CPU."""
    compile: bool = False
    """Train with torch.compile."""
    seed: int = 0
    """Seed of the weights, the order of the text and the prompts."""
    minutes: float | None = None
    """Stop after this time, with a checkpoint; the same command goes on. By default nothing stops
    it."""
    hours: float | None = None
    """The same in hours."""
    prepare: bool = False
    """Only tokenise the text."""
    dry_run: bool = False
    """Only say what there is to do and what it costs: from measured steps or, with device, from the
    number of operations. Write nothing."""
    device: str = ""
    """For dry_run, a GPU that is not at hand, such as H100, H200 or A100."""
    devices: int = 1
    """How many of that GPU."""

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output or f"runs/reproduce-{self.size}")

    @property
    def text_folder(self) -> Path:
        """The folder of tokenised text."""
        return Path(self.tokenised) if self.tokenised else self.folder / "text"

    @property
    def shape(self) -> Size:
        """The size, with what is set in its place."""
        names = ("longest", "documents", "samples")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(SIZES[self.size], **given)

    @property
    def lengths(self) -> list[int]:
        """Windows and prompts to evaluate at: the training length times 1, 2, 4 … longest."""
        shape = self.shape
        powers = range(shape.longest.bit_length())
        return [shape.block_length * 2**p for p in powers if 2**p <= shape.longest]

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        for name in self.models:
            if name not in MODELS:
                raise UserError(
                    f"models are of {', '.join(MODELS)}; got {name!r}{did_you_mean(name, MODELS)}"
                )
        if not self.models:
            raise UserError(f"models: name at least one of {', '.join(MODELS)}")
        names = (
            "max_tokens", "tokens", "tokens_per_parameter", "minutes_per_model", "longest",
            "documents", "samples", "learning_rate", "minutes", "hours", "devices",
        )  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} must be above 0, got {value}")
        for one, other in (("minutes", "hours"), ("tokens", "minutes_per_model")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise UserError(f"{one} and {other} say the same: set one of them")
        if self.device and not self.dry_run:
            raise UserError("device is for --dry-run: training uses the GPUs of this machine")


class TimeUp(Exception):
    """The minutes of this command are over."""


@dataclass(frozen=True)
class Deadline:
    """When this command has to stop.

    Attributes:
        end: Of `time.monotonic`, or None for never.
    """

    end: float | None

    def passed(self) -> bool:
        """Whether the time is over, by the clock of the first process."""
        if self.end is None:
            return False
        from accelerate import PartialState
        from accelerate.utils import broadcast_object_list

        late = time.monotonic() > self.end
        return broadcast_object_list([late])[0] if PartialState().num_processes > 1 else late

    def check(self) -> None:
        """Raise TimeUp when the time is over."""
        if self.passed():
            raise TimeUp


@dataclass
class Plan:
    """What is decided once: the machine may be another one when the run goes on.

    Attributes:
        settings: What the run was started with.
        precision: Of the training and evaluation.
        tokens: Training tokens of every model.
        global_batch_size: Blocks of a step.
        micro_batch_size: Blocks of a process and forward pass.
    """

    settings: dict[str, Any]
    precision: str
    tokens: int
    global_batch_size: int
    micro_batch_size: int

    def recipe(self, settings: ReproduceSettings, name: str) -> Recipe:
        """The recipe of a model: one template for all."""
        shape, folder = settings.shape, settings.text_folder
        steps = max(self.tokens // (self.global_batch_size * shape.block_length), 1)
        tokenizer = str(folder / "tokenizer")
        if not Path(tokenizer).is_dir():
            tokenizer = settings.tokenizer
        text = DataRecipe()
        if tokenizer is not None:  # None to find out costs, before there is any text
            text = replace(text, source=str(folder / "train.npy"), tokenizer=tokenizer)
        return Recipe(
            model=ModelRecipe(
                **MODELS[name],
                hidden_size=shape.hidden_size,
                num_layers=shape.num_layers,
                num_heads=shape.num_heads,
            ),
            data=replace(
                text,
                held_out=0.0,
                vocab_size=shape.vocab_size,
                block_length=shape.block_length,
                passkey_share=settings.passkey_share,
            ),
            training=TrainingRecipe(
                steps=steps,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                learning_rate=settings.learning_rate or RATE * WIDTH / shape.hidden_size,
                warmup_share=0.02,
                precision=self.precision,  # pyright: ignore[reportArgumentType]
                compile=settings.compile,
                seed=settings.seed,
                save_every=500,
                keep_checkpoints=1,
            ),
        )


# What may change from one command to the next; of the text, runs check that it is the same.
CHANGES = (
    "output", "models", "minutes", "hours", "prepare", "dry_run", "device", "devices",
    "longest", "documents", "samples", "factors",
    "text", "text_field", "test_text", "max_tokens", "tokenised", "tokenizer",
)  # fmt: skip


def reproduce(settings: ReproduceSettings, *, progress: Progress | None = None) -> Path | None:
    """Train the models that are not finished, evaluate what is missing, and draw the page.

    Args:
        settings: What to do. The same settings, but for `CHANGES`, continue what is in the folder.
        progress: Called with a label, and the tokens evaluated so far and in all.

    Returns:
        ``report.html``, or None if the minutes were over before.

    Raises:
        UserError: If the text is missing or too short, the folder has another run, or a model does
            not fit into memory.
    """
    started = time.monotonic()
    settings.check()
    minutes = settings.minutes or 60 * (settings.hours or 0)
    deadline = Deadline(started + 60 * minutes if minutes else None)

    import torch
    from accelerate import PartialState

    from coca_attention.report import write_report

    folder = settings.folder
    state = PartialState(cpu=not torch.accelerator.is_available())
    with state.main_process_first():
        if state.is_main_process:
            prepare_text(settings)
    if settings.prepare:
        return None
    plan = load_plan(settings)
    try:
        for name in settings.models:
            _train(settings, plan, name, deadline)
        results = _evaluate(settings, plan, deadline, progress)
    except TimeUp:
        return None
    page = folder / "report.html"
    if state.is_main_process:
        runs = [folder / name / "training.json" for name in settings.models]
        lengths = settings.lengths
        title = f"{settings.size}: trained on {lengths[0]:,} tokens, read up to {lengths[-1]:,}"
        write_report([results, *runs], page, title=title)
    return page


def prepare_text(settings: ReproduceSettings) -> None:
    """Write the folder of tokenised text, unless it is there.

    ``tokenizer/``; ``train.npy``, the token ids; ``test.jsonl.xz``, documents long enough for the
    longest window, cut behind it; and ``text.json``, which is written last.

    Raises:
        UserError: If there is no text, too few tokens or no long document.
    """
    import numpy as np

    from coca_attention.data import load_or_train_tokenizer, load_tokenizer, tokenise
    from coca_attention.data.tokens import encode_documents

    folder, shape = settings.text_folder, settings.shape
    about = folder / "text.json"
    if about.is_file():
        known = read_json(about)["text"]
        if settings.text and known != settings.text:
            raise UserError(
                f"{folder} has tokens of {known}, not of {settings.text}: leave out --text, or "
                "choose another --tokenised"
            )
        return
    if not settings.text:
        raise UserError(
            f"{folder} has no tokenised text: name the text to tokenise with --text, or its folder "
            "with --tokenised"
        )
    share = 0.0 if settings.test_text else HELD_OUT
    source = SourceSettings(settings.text, settings.text_field)
    tests = replace(source, source=settings.test_text) if settings.test_text else source
    longest = settings.lengths[-1]
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer)
        tokenizer.save_pretrained(folder / "tokenizer")
    else:
        tokenizer = load_or_train_tokenizer(
            folder / "tokenizer",
            lambda: (d for d in source.documents() if not held_out(d, share)),
            shape.vocab_size,
            split_digits=True,
        )
    lines: list[str] = []
    long = (d for d in tests.documents() if held_out(d, share or 1.0))
    for document, ids in encode_documents(long, tokenizer):
        if len(ids) > longest:
            # As much of it as is read; the rest of a book would only have to be carried along.
            ratio = longest / len(ids)
            for more in (1.1, 1.5, 1 / ratio):
                text = document.text[: math.ceil(more * ratio * len(document.text))]
                if len(tokenizer(text, add_special_tokens=False)["input_ids"]) > longest:
                    break
            lines.append(json.dumps({"id": document.id, "text": text}) + "\n")
            if len(lines) == shape.documents:
                break
    if not lines:
        raise UserError(
            f"no document to evaluate on has more than {longest:,} tokens: name longer ones with "
            "--test-text, or choose a smaller --longest"
        )
    partial = folder / "new.partial"
    with lzma.open(partial, "wt") as file:
        file.writelines(lines)
    move(partial, folder / "test.jsonl.xz")
    cache = folder / "cache"
    text = tokenise(source, tokenizer, share=share, max_tokens=settings.max_tokens, folder=cache)
    with open(partial, "wb") as file:
        np.save(file, text.tokens)
    move(partial, folder / "train.npy")
    count = len(text.tokens)
    del text
    for path in sorted(cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cache.rmdir()
    write_json(about, {"text": settings.text, "tokens": count, "test_documents": len(lines)})


def load_plan(settings: ReproduceSettings) -> Plan:
    """The plan of the run in the folder, or a new one.

    Raises:
        UserError: If the folder has a run with other settings.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    path, state = settings.folder / PLAN_FILE, PartialState()
    # One process looks, as others may be later and find what it has written.
    found = read_json(path) if state.is_main_process and path.is_file() else None
    found = broadcast_object_list([found])[0] if state.num_processes > 1 else found
    if found is None:
        plan = make_plan(settings)
        if state.is_main_process:
            write_json(path, asdict(plan))
        return plan
    plan = Plan(**found)
    kept = _kept(settings)
    changed = [name for name in kept if plan.settings.get(name) != kept[name]]
    if changed:
        raise UserError(
            f"{settings.folder} holds a run with another {', '.join(changed)}: choose another "
            "--output"
        )
    return plan


def _kept(settings: ReproduceSettings) -> dict[str, Any]:
    """The settings that no later command may change."""
    return {name: value for name, value in asdict(settings).items() if name not in CHANGES}


def make_plan(settings: ReproduceSettings, costs: dict[str, Any] | None = None) -> Plan:
    """Decide on tokens and batches; on a GPU, or with minutes_per_model, after a few steps.

    Args:
        settings: The run.
        costs: Gets, for every model, what `dry_run` has measured, which is done in any case then.
    """
    import torch

    gpu = torch.accelerator.is_available()
    plan = Plan(
        _kept(settings), settings.precision or ("bfloat16" if gpu else "float32"), 1, BATCH, 1
    )
    parameters = _without_weights(settings, plan, "RoFormer").num_parameters()
    _share_out(plan, settings, settings.tokens or round(settings.tokens_per_parameter * parameters))
    if not gpu:
        # A larger one needs more memory and is no faster.
        plan.micro_batch_size = min(plan.micro_batch_size, 16)
    if not gpu and settings.minutes_per_model is None and costs is None:
        return plan
    measured = {name: _fit(settings, plan, name) for name in settings.models}
    if costs is not None:
        costs.update(measured)
    if settings.minutes_per_model is not None:
        speeds = [
            cost.stages[0].tokens_per_step / cost.stages[0].step_seconds
            for cost in measured.values()
        ]
        micro = plan.micro_batch_size
        _share_out(plan, settings, int(60 * settings.minutes_per_model * min(speeds)))
        plan.micro_batch_size = min(micro, plan.micro_batch_size)
    return plan


def _share_out(plan: Plan, settings: ReproduceSettings, tokens: int, devices: int = 0) -> None:
    """Set tokens and batches: the paper's, halved until there are `STEPS` steps.

    Raises:
        UserError: If the processes, one for each device, cannot share out a batch.
    """
    length, batch = settings.shape.block_length, BATCH
    while batch > SMALLEST and tokens < STEPS * batch * length:
        batch //= 2
    plan.tokens, plan.global_batch_size = tokens, batch
    plan.micro_batch_size = _blocks_each(batch, devices)


def _blocks_each(batch: int, processes: int = 0) -> int:
    """Blocks of a step for every process; by default, for those of this run."""
    from accelerate import PartialState

    processes = processes or PartialState().num_processes
    if batch % processes:
        raise UserError(
            f"the {batch} blocks of a step cannot be shared out evenly to {processes} processes: "
            f"use a power of two of them, at most {batch}"
        )
    return batch // processes


def _fit(settings: ReproduceSettings, plan: Plan, name: str) -> Any:
    """Halve the batch of a pass until a model fits into memory; return what a step costs."""
    from coca_attention.training.dry_run import dry_run

    while True:
        cost = dry_run(plan.recipe(settings, name), steps=2)
        peak = cost.stages[0].peak
        if not cost.why_not and (peak or 0) <= MEMORY_SHARE * cost.device_memory:
            return cost
        if plan.micro_batch_size == 1:
            raise UserError(
                f"{name} of size {settings.size} does not fit into {cost.device}: "
                f"{cost.why_not or f'a step takes {(peak or 0) / 1e9:.1f} GB'}; choose a smaller "
                "--size"
            )
        _halve(plan)


def _halve(plan: Plan) -> None:
    """Halve the batch of a pass, and free the memory of the one that was too large."""
    import torch

    plan.micro_batch_size //= 2
    gc.collect()  # Trainer and model refer to each other
    torch.cuda.empty_cache()


def _train(settings: ReproduceSettings, plan: Plan, name: str, deadline: Deadline) -> None:
    """Train a model unless it is finished; raise TimeUp if the time is over before."""
    import torch
    from accelerate import PartialState
    from transformers import TrainerCallback

    from coca_attention.training import as_yaml, is_finished, train
    from coca_attention.training.fit import TrainingStopped
    from coca_attention.training.run import RECIPE_FILE

    folder = settings.folder / name
    if is_finished(folder):
        return
    deadline.check()
    # There may be more processes than when the run was started.
    each = _blocks_each(plan.global_batch_size)
    plan.micro_batch_size = min(plan.micro_batch_size, each)

    class Stop(TrainerCallback):
        """Ends with a checkpoint, at an entry of the curve, which is then that of a whole run."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            left = state.max_steps - state.global_step
            if left and state.global_step % args.logging_steps == 0 and deadline.passed():
                control.should_save = control.should_training_stop = True

    while True:
        recipe = plan.recipe(settings, name)
        if PartialState().is_main_process and (folder / RECIPE_FILE).is_file():
            # Micro-batches and the place of the text may have changed; the text is compared.
            write_text(folder / RECIPE_FILE, as_yaml(recipe))
        try:
            with error_prefix(f"{name}: "):
                train(recipe, folder, callbacks=[Stop()])
            return
        except TrainingStopped as stopped:
            raise TimeUp from stopped
        except torch.OutOfMemoryError:
            if plan.micro_batch_size == 1:
                raise
        # Goes on from its checkpoint, by the same steps in smaller parts.
        _halve(plan)
        if PartialState().is_main_process:
            write_json(settings.folder / PLAN_FILE, asdict(plan))


def suite_of(settings: ReproduceSettings, plan: Plan) -> Suite:
    """The tasks of suites/paper.yaml for the models, at the lengths of the size."""
    shape, lengths = settings.shape, settings.lengths
    scaled = [name for name in settings.models if name in SCALED]
    factors = settings.factors if scaled else []
    return Suite(
        models={name: str(settings.folder / name) for name in settings.models},
        scalings=[
            ScalingSettings(),
            *(ScalingSettings("ntk", factor, scaled) for factor in factors),
        ],
        tasks={
            "perplexity": PerplexitySettings(
                source=str(settings.text_folder / "test.jsonl.xz"),
                max_documents=shape.documents,
                max_tokens=lengths[-1] + 1,
                skip_short=True,
                windows=lengths,
                stride=shape.block_length,
                targets="all",
            ),
            "passkey": PasskeySettings(lengths=lengths, samples=shape.samples, seed=settings.seed),
        },
        dtype=plan.precision,  # pyright: ignore[reportArgumentType]
    )


def _evaluate(
    settings: ReproduceSettings, plan: Plan, deadline: Deadline, progress: Progress | None
) -> Path:
    deadline.check()

    def report(label: str, done: int, total: int) -> None:
        # By its own clock: processes share this work without waiting for each other.
        if deadline.end is not None and time.monotonic() > deadline.end:
            raise TimeUp
        if progress is not None:
            progress(label, done, total)

    return run_suite(suite_of(settings, plan), settings.folder / "suite", progress=report)


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Attributes:
        name: Of the model.
        parameters: Of the model.
        tokens: To train it on.
        steps: Optimizer steps.
        micro_batch_size: Blocks of a process and forward pass.
        memory: Bytes on every device while it trains.
        training: Seconds of its training.
        evaluation: Seconds of its evaluation.
    """

    name: str
    parameters: int
    tokens: int
    steps: int
    micro_batch_size: int
    memory: float
    training: float
    evaluation: float


def costs_of(settings: ReproduceSettings) -> list[Cost]:
    """What every model costs; nothing is written.

    With ``device``, from the floating-point operations at `ASSUMED_UTILIZATION` of the peak, and
    from the bytes of weights, gradients, AdamW's state and activations. Otherwise from measured
    steps.

    Raises:
        UserError: If the device is not known, or a model does not fit into its memory.
    """
    from coca_attention.training.throughput import DEVICES

    settings.check()
    if not settings.device:
        measured: dict[str, Any] = {}
        plan = make_plan(settings, measured)
        found = []
        for name, cost in measured.items():
            stage = cost.stages[0]
            speed = stage.tokens_per_step / stage.step_seconds
            found.append(_cost(settings, plan, name, stage.parameters, stage.peak, speed))
        return found
    if settings.device not in DEVICES:
        raise UserError(
            f"device must be one of {', '.join(DEVICES)}, got "
            f"{settings.device!r}{did_you_mean(settings.device, DEVICES)}"
        )
    peak, memory = DEVICES[settings.device]
    rate = ASSUMED_UTILIZATION * peak * settings.devices
    plan = Plan(_kept(settings), "bfloat16", 1, BATCH, 1)
    models = {name: _without_weights(settings, plan, name) for name in MODELS}
    length = settings.shape.block_length
    speeds = {name: rate / _training_flops(model, length) for name, model in models.items()}
    slowest = min(speeds[name] for name in settings.models)
    tokens = settings.tokens or round(
        settings.tokens_per_parameter * models["RoFormer"].num_parameters()
        if settings.minutes_per_model is None
        else 60 * settings.minutes_per_model * slowest
    )
    _share_out(plan, settings, tokens, settings.devices)
    sizes = {name: models[name].num_parameters() for name in settings.models}

    def needed(parameters: int) -> float:
        # Weights, gradients and two moments in float32; the weights again in bfloat16.
        shape, pass_tokens = settings.shape, plan.micro_batch_size * length
        each = ACTIVATION * shape.hidden_size * shape.num_layers + LOGIT * shape.vocab_size
        return (16 + 2) * parameters + each * pass_tokens

    while needed(max(sizes.values())) > MEMORY_SHARE * memory:
        if plan.micro_batch_size == 1:
            raise UserError(f"size {settings.size} does not fit into a {settings.device}")
        plan.micro_batch_size //= 2
    return [
        _cost(settings, plan, name, sizes[name], needed(sizes[name]), speeds[name])
        for name in settings.models
    ]


def _cost(
    settings: ReproduceSettings, plan: Plan, name: str, parameters: int, memory: float, speed: float
) -> Cost:
    """The cost of a model that trains at so many tokens a second."""
    recipe = plan.recipe(settings, name)
    steps, shape, suite = recipe.steps, settings.shape, suite_of(settings, plan)
    tokens = steps * plan.global_batch_size * shape.block_length
    model = _without_weights(settings, plan, name)
    per_second = speed * _training_flops(model, shape.block_length)
    ways = sum(s.models is None or name in s.models for s in suite.scalings)
    evaluation = 0.0
    for length in settings.lengths:
        windows = sliding_windows(settings.lengths[-1] + 1, length, shape.block_length)
        read = shape.documents * sum(window.inputs for window in windows) + shape.samples * length
        evaluation += ways * read * _training_flops(model, length) / 3 / per_second
    return Cost(
        name, parameters, tokens, steps, plan.micro_batch_size, memory, tokens / speed, evaluation
    )


def _without_weights(settings: ReproduceSettings, plan: Plan, name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from coca_attention.data import load_tokenizer
    from coca_attention.training.model import model_config

    recipe = plan.recipe(settings, name)
    tokenizer = recipe.data.tokenizer
    size = len(load_tokenizer(tokenizer)) if tokenizer else settings.shape.vocab_size
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(recipe, size))


def _training_flops(model: Any, length: int) -> float:
    from coca_attention.training.throughput import training_flops

    flops = training_flops(model, length)
    assert flops is not None  # none of MODELS is a mixture of experts
    return flops
