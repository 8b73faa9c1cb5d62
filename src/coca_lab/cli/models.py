"""Commands that make models and let them speak."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from coca_attention.errors import UserError, did_you_mean
from coca_attention.models.hub import check_name
from coca_lab.arguments import SettingsParser
from coca_lab.cli.console import (
    Progress,
    duration,
    megabytes,
    parse,
    parse_file,
    print_table,
)
from coca_lab.data import SourceSettings
from coca_lab.evaluation.limit_check import LimitCheck, LimitCheckSettings
from coca_lab.evaluation.pieces import launch_group, rank
from coca_lab.settings import PIECE, check_letters, check_scaling, check_sizes, form_names

if TYPE_CHECKING:
    from coca_lab.training.dry_run import RunCost, StageCost


@dataclass
class GenerateSettings:
    """How text is generated."""

    max_new_tokens: int = 64
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 takes the likeliest token every time; above, tokens are drawn."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; by default as the model's
    generation_config.json says."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; by default as generation_config.json says."""
    seed: int = 0
    """Seed of the draws."""
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    """Rotary scaling; ntk fixes the base from the prompt's length plus max_new_tokens."""
    factor: float = 4.0
    """Factor of the scaling."""
    window: int | None = None
    """Keep only the last this many tokens and the sinks, in constant memory, for endless text; with
    the sinks at most the training length, unless there is a scaling."""
    sinks: int = 4
    """First tokens of the text that stay in sight, with a window."""
    chat: bool = False
    """Put the prompt into the tokenizer's chat template, as a user's message, and print the answer
    alone."""
    stream: bool = False
    """Print the text as it is made also where the output is not a terminal."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator where there is one."""


@dataclass
class ConversionSettings:
    """What the converted model is like."""

    form: str = "slack"
    """Score form: slack (the paper's Eq. 10), strict (Eq. 9) or magnitude (cf. PoPE); with layers,
    that of the local layers. rope keeps rotary attention; without layers it limits distances, which
    changes nothing in texts of up to max_distance tokens."""
    init: Literal["fold", "calibrated", "random"] = "fold"
    """T projections: the pair means of the key projections, fitted to the scores of the model on
    some text, or drawn."""
    free_pairs: int = 0
    """The last rotary pairs of every head, which keep their ordinary keys and scores."""
    layers: str = ""
    """Roles of the layers, l (local) and g (global), repeated over all layers, such as llg; by
    default the roles that the model has."""
    window: int | None = None
    """Tokens that a local layer sees; by default an eighth of the training length."""
    max_distance: int | None = None
    """Keys farther back than this many tokens are scored as if this far back; by default the
    training length for rope without layers, and no limit for other forms. Less may find more in
    longer texts, and may lose what is found within the training length: see --check."""
    length: int | None = None
    """The training length in tokens, for layers and limits; by default max_position_embeddings in
    the model's config.json."""
    kv_cache: Literal["full", "half"] = "full"
    """What is kept of earlier tokens: whole keys, or coefficients of half their width."""
    from_original: bool = False
    """MODEL is a checkpoint in the format of the paper's authors."""
    portable: bool = False
    """Add a file by which Transformers, with trust_remote_code=True, imports this package itself;
    the package must be installed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto keeps it."""
    dry_run: bool = False
    """Check everything, say what would be written, and write nothing."""


@dataclass
class CalibrationSettings(SourceSettings):
    """Which text `calibrated` fits T projections on."""

    source: str = ""
    """Text for init calibrated: stdlib; a file, folder or glob of .txt, .jsonl, .parquet (or .gz,
    .xz, .zst); or hf:NAME."""
    calibration_tokens: int = 8192
    """Tokens of it to read, from its beginning."""


def run_train(words: list[str]) -> None:
    """Train a model from a recipe (YAML); resumes when run again."""
    from coca_lab.training import load_recipe, recipe_parser

    usage = "coca train RECIPE.yaml [--training.steps 100 …]"

    def parser() -> SettingsParser:
        parser = recipe_parser()
        parser.add_argument(
            "--extend",
            action="store_true",
            help="Train the run in the output folder further, to more training.steps.",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="Say what would be trained, and the memory and time it takes, from a few steps on "
            "random tokens; write nothing.",
        )
        return parser

    others = [word for word in words if word not in ("--extend", "--dry-run")]
    recipe, overrides, folder = parse_file(others, run_train, parser, "recipe", usage)
    settings = load_recipe(recipe, overrides)
    from accelerate import PartialState

    if "--dry-run" in words:
        from coca_lab.training.dry_run import dry_run

        cost = dry_run(settings)
        if PartialState().is_main_process:
            _print_cost(cost)
        return

    from coca_lab.training import read_summary, train
    from coca_lab.training.run import what_was_kept

    summary = read_summary(train(settings, folder, extend="--extend" in words))
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


def _print_cost(cost: "RunCost") -> None:
    """What `dry_run` found out: a row per quantity, a column per stage."""
    stages = cost.stages

    def row(label: str, show: Callable[["StageCost"], str], whole: str = "") -> list[str]:
        return [label, *map(show, stages), *([whole] if len(stages) > 1 else [])]

    def total(name: str) -> str:
        return f"{sum(getattr(stage, name) for stage in stages):,}"

    seconds = cost.seconds
    where = "on the GPU" if cost.device.startswith("cuda") else "of the process"
    rows = [
        row("trains", lambda s: s.train),
        row("objective", lambda s: s.objective),
        row("parameters", lambda s: f"{s.parameters:,}"),
        row("that learn", lambda s: f"{s.trained:,}"),
        row("steps", lambda s: f"{s.steps:,}", total("steps")),
        row("tokens a step", lambda s: f"{s.tokens_per_step:,}"),
        row("tokens", lambda s: f"{s.tokens:,}", total("tokens")),
        row("weights", lambda s: megabytes(s.weights)),
        row("gradients", lambda s: megabytes(s.gradients)),
        row("AdamW's state", lambda s: megabytes(s.optimizer)),
        row("teacher", lambda s: megabytes(s.teacher) if s.teacher else "–"),
        row("together", lambda s: megabytes(s.memory)),
        row(f"peak {where}", lambda s: megabytes(s.peak) if s.peak else "–"),
        row("time of a step", lambda s: f"{s.step_seconds:.3g} seconds" if s.step_seconds else "–"),
        row(
            "time",
            lambda s: duration(s.seconds) if s.seconds else "–",
            duration(seconds) if seconds else "–",
        ),
    ]
    print_table(
        ["", *(s.name or "run" for s in stages), *(["run"] if len(stages) > 1 else [])], rows
    )
    each = " each" if cost.processes > 1 else ""
    shared = ", which share the model" if cost.is_sharded and cost.processes > 1 else ""
    print(
        f"{cost.processes} process{'es' * (cost.processes > 1)}{shared}, {cost.device}, "
        f"{megabytes(cost.device_memory)}{each}. "
        + (
            f"Time and peak memory were not measured: {cost.why_not}. "
            if cost.why_not
            else "Time without the text, validation and checkpoints. "
        )
        + "Nothing was written."
    )


def run_generate(words: list[str]) -> None:
    """Continue a prompt with a Transformers causal language model."""
    path, prompt, settings = parse(
        "coca generate",
        run_generate,
        words,
        [GenerateSettings],
        positionals=["model", "prompt"],
    )
    _check_generation(settings)
    check_name(path)
    if prompt == "-":
        prompt = _standard_input()
    if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError("the prompt is not valid UTF-8 text")
    from transformers import TextStreamer, set_seed

    from coca_attention.models import set_rotary_scaling, training_length
    from coca_attention.models.fields import original_length
    from coca_attention.models.streaming import streaming
    from coca_lab.data import load_tokenizer
    from coca_lab.generation import FiniteScores
    from coca_lab.loading import check_vocabulary, load_model

    model: Any = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer: Any = load_tokenizer(path)
    check_vocabulary(model, tokenizer)
    if settings.chat and tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {path} has no chat template: leave out --chat")
    if settings.chat:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not settings.chat)
    inputs = inputs.to(model.device)
    trained = training_length(model.config.get_text_config())
    sight = None if settings.window is None else settings.window + settings.sinks
    if settings.scaling == "none" and sight and trained and sight > trained:
        raise UserError(
            f"window and sinks are {sight:,} tokens and the model was trained on {trained:,}: "
            "choose a smaller --window, or set --scaling"
        )
    before = inputs["input_ids"].shape[-1]
    if before == 0:
        raise UserError("the prompt has no tokens; give some text to continue")
    if settings.scaling != "none":
        total = before + settings.max_new_tokens
        original = original_length(model.config.get_text_config())
        length = max(min(total, sight or total), original or 0)
        set_rotary_scaling(
            model,
            settings.scaling,
            factor=settings.factor,
            length=length if settings.scaling == "ntk" else None,
        )
    set_seed(settings.seed)
    options: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        options = {"do_sample": True, "temperature": settings.temperature}
    given = {"top_p": settings.top_p, "top_k": settings.top_k}
    options |= {name: value for name, value in given.items() if value is not None}
    streams = settings.stream or sys.stdout.isatty()
    if streams:
        options["streamer"] = TextStreamer(
            tokenizer, skip_prompt=settings.chat, skip_special_tokens=True
        )
    with ExitStack() as stack:
        if settings.window is not None:
            sizes = {"window": settings.window, "sinks": settings.sinks}
            options["past_key_values"] = stack.enter_context(streaming(model, **sizes))
            options["prefill_chunk_size"] = PIECE
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


def _check_generation(settings: GenerateSettings) -> None:
    """Raise UserError unless the settings are in range."""
    if settings.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {settings.max_new_tokens}")
    if settings.temperature != 0 and not 1e-3 <= settings.temperature <= 1e3:
        raise UserError(
            f"temperature must be 0, or between 0.001 and 1000, got {settings.temperature}"
        )
    if not 0 <= settings.seed < 2**32:
        raise UserError(f"seed must be between 0 and {2**32 - 1}, got {settings.seed}")
    check_scaling(settings.scaling, settings.factor)
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {settings.top_p}")
    if settings.top_k is not None and settings.top_k < 1:
        raise UserError(f"top_k must be at least 1, got {settings.top_k}")
    if not settings.temperature and (settings.top_p, settings.top_k) != (None, None):
        raise UserError("top_p and top_k are for draws: set --temperature, for example to 1")
    if settings.window is not None:
        check_sizes(settings.window, settings.sinks)


def _standard_input() -> str:
    """The prompt from standard input, without the end of its last line."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not text in {error.encoding}: {error.reason}") from error


def run_convert(words: list[str]) -> None:
    """Turn a vanilla model's folder into the CoCA model of its family, to be trained on."""
    path, target, settings, check, text = parse(
        "coca convert",
        run_convert,
        words,
        [ConversionSettings, LimitCheckSettings, CalibrationSettings],
        positionals=["model", "target"],
    )
    options = vars(settings)
    layers, window = options.pop("layers"), options.pop("window")
    if window is not None and (not layers or window < 1):
        raise UserError(f"window must be at least 1 and requires layers, got {window}")
    if layers:
        check_letters(layers)
    forms = (*form_names(), "rope")
    if settings.form not in forms:
        hint = did_you_mean(settings.form, forms)
        raise UserError(f"form must be one of {', '.join(forms)}, got {settings.form!r}{hint}")
    if check.check and (
        settings.form != "rope" or layers or settings.max_distance or settings.dry_run
    ):
        raise UserError(
            "--check measures which limit of distances loses nothing: it is for --form rope "
            "without --layers, --max-distance and --dry-run"
        )
    check_name(path)
    calibrated = settings.init == "calibrated" and not settings.dry_run
    if rank() > 0 and not calibrated:
        return  # nothing can be shared: the first process does it
    tokens = _calibration_tokens(path, settings.init, text)
    from coca_attention.models import Roles
    from coca_lab.folders import convert_folder

    roles = Roles(layers, window) if layers else None
    report = None
    if check.check:
        report = _check_limits(path, target, options, check, text)
        options["max_distance"] = report.chosen.max_distance
    with ExitStack() as stack:
        progress = stack.enter_context(Progress()) if rank() == 0 else None
        model = convert_folder(
            path,
            target,
            **options,
            roles=roles,
            report=report.markdown() if report else "",
            calibration=tokens,
            progress=progress,
            group=launch_group() if calibrated else None,
        )
    if rank() > 0:
        return
    if settings.dry_run:
        _print_conversion(path, settings, model)
        return
    parameters = sum(p.numel() for p in model.parameters())
    note = "; another function than before: train it on"
    if settings.form == "rope" and not layers:
        note = f"; the same as before up to {_max_distance(model):,} tokens"
    if settings.from_original:
        note = ""
    print(f"{target}: {model.config.model_type}, {settings.form}, {parameters:,} parameters{note}")
    _print_training_length(model, settings.length)


def _max_distance(model: Any) -> int:
    """W of a model with limited distances."""
    from coca_attention.models.configuration import rotation

    found = rotation(model.config.get_text_config()).max_distance
    assert found is not None  # it was just limited
    return found


def _print_training_length(model: Any, given: int | None) -> None:
    """Which training length a conversion was for, and why; nothing if it was for none."""
    from coca_attention.models.fields import original_length, rope_parameters, training_length

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


def _check_limits(
    path: str, target: str, options: dict[str, Any], check: LimitCheckSettings, text: SourceSettings
) -> LimitCheck:
    """Measure the model with some limits of distances, and print the table."""
    from coca_lab.evaluation.limit_check import check_limits
    from coca_lab.evaluation.task import Session, load_subject
    from coca_lab.folders import convert_folder

    # What could be refused after the measurements is refused before.
    planned = convert_folder(path, target, **{**options, "dry_run": True})
    subject = load_subject(path, "base", dtype=options["dtype"])
    length = _max_distance(planned)
    with Progress() as progress:
        report = check_limits(subject, text, check, Session(progress=progress), length=length)
    print_table(*report.table())
    return report


def _print_conversion(path: str, settings: ConversionSettings, model: Any) -> None:
    """What `convert_folder` would have written."""
    from coca_attention.models.attention import CollinearAttention
    from coca_lab.loading import model_without_weights

    kinds, counts = [model.config.model_type], [f"{model.num_parameters():,}"]
    if not settings.from_original:
        before = model_without_weights(path, any_head=True)
        kinds.insert(0, before.config.model_type)
        counts.insert(0, f"{before.num_parameters():,}")
    layers = sum(isinstance(module, CollinearAttention) for module in model.modules())
    size = model.get_memory_footprint(return_buffers=False)
    rows = [
        ["model", " → ".join(kinds)],
        ["form", settings.form],
        ["attention layers replaced", f"{layers:,}"],
        ["parameters", " → ".join(counts)],
        ["weights to write", f"{megabytes(size)}, {str(model.dtype).removeprefix('torch.')}"],
    ]
    print_table(["", "conversion"], rows)
    _print_training_length(model, settings.length)
    print("Nothing was written.")


@dataclass
class ExportSettings:
    """How the folder is written."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto keeps it."""
    gguf: bool = False
    """Write a file for llama.cpp instead, TARGET, of the architecture that docs/llama-cpp.md
    describes; for the Llama family."""


def run_export(words: list[str]) -> None:
    """Write a folder for which Transformers imports this package by itself, or a GGUF file."""
    path, target, settings = parse(
        "coca export", run_export, words, [ExportSettings], positionals=["model", "target"]
    )
    check_name(path)
    if settings.gguf:
        from coca_lab.llama_cpp import ARCHITECTURE, export_gguf

        known = export_gguf(path, target, dtype=settings.dtype)
        note = "" if known else "; without a tokenizer: only byte-level BPE ones are supported"
        print(f"{target}: architecture {ARCHITECTURE}, for llama.cpp with the patch in docs{note}")
        return
    from coca_lab.folders import export_folder

    export_folder(path, target, dtype=settings.dtype)
    print(
        f"{target}: with trust_remote_code=True, Transformers imports coca-attention by itself, "
        "which must be installed; the code in the folder imports that package and nothing else"
    )


def _calibration_tokens(path: str, init: str, text: CalibrationSettings) -> Any:
    """Token ids (calibration_tokens,) for init calibrated, None for the others."""
    if init != "calibrated":
        if text.source:
            raise UserError(f"--source is the text of --init calibrated; got it with init {init}")
        return None
    wanted = text.calibration_tokens
    if not text.source:
        raise UserError("--init calibrated needs text to fit on: name it by --source")
    if wanted < 2:
        raise UserError(f"calibration_tokens must be at least 2, got {wanted}")
    import torch

    from coca_lab.data import load_tokenizer, token_array

    found = token_array(text.documents(), load_tokenizer(path), max_tokens=wanted)
    if len(found) < wanted:
        raise UserError(
            f"{text.source} has {len(found)} tokens and --calibration-tokens asks for {wanted}: "
            "give more text, or ask for fewer"
        )
    return torch.from_numpy(found.astype("int64"))
