"""Commands that make models and let them speak."""

import logging
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from accelerate import PartialState
from pydantic import Field
from transformers import TextStreamer, set_seed

from coca_attention.errors import UserError
from coca_attention.models import set_rotary_scaling
from coca_attention.models.configuration import (
    original_length,
    rope_parameters,
    rotation,
    training_length,
)
from coca_attention.models.conversion import Conversion, convert
from coca_lab.cli.console import (
    Progress,
    parse,
    parse_file,
    print_table,
)
from coca_lab.data import load_tokenizer
from coca_lab.engine import Engine
from coca_lab.evaluation.limit_check import LimitCheck, LimitCheckSettings, check_limits
from coca_lab.evaluation.task import open_model
from coca_lab.folders import convert_folder, new_folder
from coca_lab.generation import FiniteScores
from coca_lab.loading import check_vocabulary, load_model, model_without_weights
from coca_lab.training import load_recipe, read_summary, recipe_parser, train
from coca_lab.training.run import what_was_kept

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=1)]

SHOWN = (
    "model.attention", "model.hidden_size", "model.num_layers", "model.num_heads", "model.layers",
    "model.start", "data.source", "data.block_length", "data.held_out", "data.max_tokens",
    "data.passkey_share", "validation.every", "validation.passkeys",
    "training.steps", "training.global_batch_size", "training.micro_batch_size",
    "training.learning_rate", "training.precision", "training.seed", "training.save_every",
)  # fmt: skip
"""Fields of a recipe in the short help."""

# Logits divided by less than this may overflow.
COLDEST = 1e-3


@dataclass
class GenerateSettings:
    """How text is generated."""

    max_new_tokens: Count = 64
    """Tokens to generate at most."""
    temperature: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """0 takes the likeliest token every time; above, tokens are drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that together have this probability; by default as the model's
    generation_config.json says."""
    top_k: Count | None = None
    """Draw from this many of the likeliest tokens; by default as generation_config.json says."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the draws."""
    scaling: str = "none"
    """Rotary scaling, such as linear, ntk, dynamic or yarn; ntk fixes the base from the prompt's
    length plus max_new_tokens."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    """Factor of the scaling."""
    chat: bool = False
    """Put the prompt into the tokenizer's chat template, as a user's message, and print the answer
    alone."""
    stream: bool = False
    """Print the text as it is made also where the output is not a terminal."""
    dtype: Dtype = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator where there is one."""

    def __post_init__(self) -> None:
        if 0 < self.temperature < COLDEST:
            raise UserError(f"temperature must be 0, or at least {COLDEST}, got {self.temperature}")
        if not self.temperature and (self.top_p, self.top_k) != (None, None):
            raise UserError("top_p and top_k are for draws: set --temperature, for example to 1")


@dataclass
class FolderSettings:
    """How the folders are read and written."""

    from_original: bool = False
    """MODEL is a checkpoint in the format of the paper's authors."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the weights; auto keeps it."""


def run_train(words: list[str]) -> None:
    """Train a model from a recipe (YAML); resumes when run again."""
    usage = "coca train RECIPE.yaml [--training.steps 100 …]"
    recipe, overrides, chosen = parse_file(words, run_train, recipe_parser, "recipe", usage, SHOWN)
    folder = chosen.output
    settings = load_recipe(recipe, overrides)
    summary = read_summary(train(settings, folder))
    if not PartialState().is_main_process:
        return
    curve = summary["validation"]
    validation = f", validation perplexity {curve[-1]['perplexity']:.2f}" if curve else ""
    print(
        f"{folder}: {summary['parameters']:,} parameters, {summary['tokens']:,} tokens, "
        f"last loss {summary['curve'][-1]['loss']:.3f}{validation}"
    )
    if summary["recipe"]["data"].get("mixture"):
        read = (f"{name} {times:.2f}" for name, times in summary["source_epochs"].items())
        print(f"passes over each source: {', '.join(read)}")
    kept = what_was_kept(summary)
    if kept:
        print(kept)


def run_generate(words: list[str]) -> None:
    """Continue a prompt with a Transformers causal language model."""
    positionals = ["model", "prompt"]
    path, prompt, settings = parse(
        "coca generate", run_generate, words, [GenerateSettings], positionals
    )
    if prompt == "-":
        prompt = _standard_input()
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError("the prompt is not valid UTF-8 text")
    model: Any = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer: Any = load_tokenizer(path)
    check_vocabulary(model, tokenizer)
    if settings.chat:
        if tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {path} has no chat template: leave out --chat")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not settings.chat)
    inputs = inputs.to(model.device)
    before = inputs["input_ids"].shape[-1]
    if before == 0:
        raise UserError("the prompt has no tokens; give some text to continue")
    if settings.scaling != "none":
        total = before + settings.max_new_tokens
        length = max(total, original_length(model.config.get_text_config()) or 0)
        target = length if settings.scaling == "ntk" else None
        set_rotary_scaling(model, settings.scaling, factor=settings.factor, length=target)
    set_seed(settings.seed)
    options: dict[str, Any] = {"do_sample": bool(settings.temperature)}
    for name in ("temperature", "top_p", "top_k"):
        if getattr(settings, name):
            options[name] = getattr(settings, name)
    streams = settings.stream or sys.stdout.isatty()
    if streams:
        options["streamer"] = TextStreamer(
            tokenizer, skip_prompt=settings.chat, skip_special_tokens=True
        )
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=settings.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        logits_processor=[FiniteScores()],
        **options,
    )[0]
    if not streams:
        print(tokenizer.decode(ids[before if settings.chat else 0 :], skip_special_tokens=True))


def _standard_input() -> str:
    """The prompt from standard input, without the end of its last line."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not text in {error.encoding}: {error.reason}") from error


def run_convert(words: list[str]) -> None:
    """Turn a vanilla model's folder into the CoCA model of its family, to be trained on."""
    path, target, wanted, folder, check = parse(
        "coca convert",
        run_convert,
        words,
        [Conversion, FolderSettings, LimitCheckSettings],
        ["model", "target"],
    )
    chooses = wanted.form == "rope" and wanted.roles is None and wanted.max_distance is None
    if check.check and (not chooses or folder.from_original):
        raise UserError(
            "--check measures which limit of distances loses nothing: it is for --form rope "
            "without --roles, --max-distance and --from-original"
        )
    report = ""
    if check.check:
        measured = _check_limits(path, target, wanted, folder.dtype, check)
        wanted = replace(wanted, max_distance=measured.chosen.max_distance)
        report = measured.markdown()
    model = convert_folder(path, target, wanted, **vars(folder), report=report)
    note = "; another function than before: train it on"
    if not wanted.changes_function:
        limit = rotation(model.config.get_text_config()).max_distance
        note = f"; the same as before up to {limit:,} tokens"
    print(
        f"{target}: {model.config.model_type}, {wanted.form}, {model.num_parameters():,} parameters"
        f"{'' if folder.from_original else note}"
    )
    _print_training_length(model, wanted.length)


def _check_limits(
    path: str, target: str, wanted: Conversion, dtype: str, check: LimitCheckSettings
) -> LimitCheck:
    """Measure the model with some limits of distances, and print the table."""
    # What could be refused after the measurements is refused before.
    new_folder(path, target)
    planned = convert(model_without_weights(path, any_head=True), wanted)
    length = rotation(planned.config.get_text_config()).max_distance
    assert length is not None  # it is just limited
    model = open_model(path, "base", dtype=dtype).with_weights()
    with Progress() as progress:
        report = check_limits(model, check, Engine(progress=progress), length=length)
    print_table(*report.table())
    if report.warning:
        log.warning("%s", report.warning)
    return report


def _print_training_length(model: Any, given: int | None) -> None:
    """Which training length a conversion was for, and why; nothing if it was for none."""
    config = model.config.get_text_config()
    rope, length, original = rope_parameters(config), given, original_length(config)
    if "temperature" not in rope:
        return
    why = "--length"
    if length is None:
        length, why = training_length(config), "max_position_embeddings; --length sets another"
        if length != original:
            why = f"with {rope['rope_type']} scaling of {original:,}: {why}"
    print(f"Training length: {length:,} tokens ({why})")
