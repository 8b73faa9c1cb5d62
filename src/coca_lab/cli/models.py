"""Commands that turn models into others: extend, convert and export."""

import logging
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import PositiveInt
from transformers import PreTrainedConfig

from coca_attention.errors import UserError
from coca_attention.method_names import MethodName
from coca_attention.models.configuration import (
    made_for,
    rope_parameters,
    rotation,
)
from coca_attention.models.conversion import Conversion
from coca_attention.models.methods import METHODS, extend_context, extended_lengths
from coca_attention.ops import FORMS
from coca_lab.cli.console import ProgressBar, parse, print_table
from coca_lab.engine import Engine
from coca_lab.evaluation.extension import (
    Candidate,
    CheckSettings,
    ExtensionCheck,
    check_extensions,
)
from coca_lab.evaluation.task import free_weights, open_model
from coca_lab.export import export_native
from coca_lab.files import cache_folder
from coca_lab.fingerprints import fingerprint
from coca_lab.folders import convert_folder, extend_folder, new_folder
from coca_lab.loading import model_without_weights
from coca_lab.store import Store
from coca_lab.weights import quantised_by

log = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass
class FolderSettings:
    """How the folders are read and written."""

    from_original: bool = False
    """MODEL is a checkpoint in the format of the paper's authors."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


def convert_command(words: list[str]) -> None:
    """Turn a vanilla model's folder into the CoCA model of its family, to be trained on."""
    path, target, wanted, folder = parse(
        "coca convert", convert_command, words, [Conversion, FolderSettings], ["model", "target"]
    )
    if not folder.from_original and not any(re.match("--form(=|$)", word) for word in words):
        raise UserError(
            f"--form is missing: one of {', '.join(FORMS)}, or with --roles.layers rope; to extend "
            "a model's context without training use coca extend MODEL TARGET"
        )
    model = convert_folder(path, target, wanted, **vars(folder))
    note = "; it predicts poorly until it is trained"
    if not wanted.changes_function:
        found = rotation(model.config.get_text_config()).distance_map
        note = f"; the same as before up to {found.near:,} tokens" if found else ""
        log.warning("coca convert --form rope is deprecated: use coca extend")
    print(
        f"{target}: {model.config.model_type}, {wanted.form}, {model.num_parameters():,} parameters"
        f"{'' if folder.from_original else note}"
    )
    if "temperature" in rope_parameters(model.config.get_text_config()):
        _print_training_length(model_without_weights(path, any_head=True).config, wanted.length)


def _print_training_length(config: PreTrainedConfig, given: int | None) -> None:
    """Which training length a command assumed, and why."""
    length, why = made_for(config.get_text_config())
    length, why = (given, "--length") if given else (length, f"{why}; --length sets another")
    print(f"Training length: {length:,} tokens ({why})")


@dataclass
class ExtendSettings:
    """How the context is extended."""

    to: PositiveInt | None = None
    """The longest text in tokens that the model is to read; by default four times L."""
    method: Literal["auto", MethodName] = "auto"
    """limited: distances beyond W score as if W (ReRoPE with log n), which changes nothing in texts
    of up to W tokens; leaky: beyond L/2 they grow so slowly that none reaches L (Leaky ReRoPE);
    yarn, dynamic, ntk, linear, llama3 and longrope change rotations; temperature is for models
    with layers without positions. auto takes the best by --check, and without it limited."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of the method by name (docs/conversion.md lists them)."""
    near: PositiveInt | None = None
    """W, for limited; by default L, or with --check the best of L, L/2 and L/4. S, for shifted."""
    length: PositiveInt | None = None
    """L, the length that the model was made for; by default what its configuration says."""
    dtype: Dtype = "auto"
    """Precision of the weights, to measure and to write; auto keeps it."""


def extend_command(words: list[str]) -> None:
    """Let a model read longer texts, without training, by the method that its text shows best."""
    path, target, wanted, check = parse(
        "coca extend", extend_command, words, [ExtendSettings, CheckSettings], ["model", "target"]
    )
    new_folder(path, target)
    if wanted.near and wanted.method != "auto" and "near" not in METHODS[wanted.method].options:
        raise UserError(f"method {wanted.method} has no --near")
    if wanted.options and wanted.method == "auto":
        raise UserError("--options are those of one method: name it by --method")
    if not check.check and check != CheckSettings():
        raise UserError(
            "what is measured, and on what, is said beside --check TEXT, which is missing"
        )
    config = model_without_weights(path).config
    length, to = extended_lengths(config, wanted.to, wanted.length, METHODS.get(wanted.method))
    _print_training_length(config, wanted.length)
    method = "limited" if wanted.method == "auto" else wanted.method
    given = tuple(sorted(wanted.options.items()))
    quantised = quantised_by(path, config) or ""
    chosen, report = Candidate(method, wanted.near, length, to, given, quantised), ""
    if check.check:
        measured = _compare(path, wanted, check, length, to)
        chosen, report = measured.chosen.candidate, measured.markdown()
    model = extend_folder(
        path,
        target,
        chosen.method,
        to=to,
        length=length,
        dtype=wanted.dtype,
        report=report,
        **chosen.settings,
    )
    print(
        f"{target}: {model.config.model_type}, {chosen.label}, for texts of {to:,} tokens; runs in "
        f"{', '.join(chosen.engines)}"
    )


def _compare(
    path: str, wanted: ExtendSettings, check: CheckSettings, length: int, to: int
) -> ExtensionCheck:
    """Measure the methods that are possible, and print the tables."""
    methods = list[MethodName]()
    tried = [each.name for each in METHODS.values() if each.compared]
    if wanted.method != "auto":
        tried = [wanted.method]
    for method in tried:
        try:
            extend_context(
                model_without_weights(path), method, to=to, length=length, **wanted.options
            )
            methods.append(method)
        except UserError as error:
            if wanted.method != "auto":
                raise
            # Few models have layers without positions, and nobody misses what is for them.
            level = logging.INFO if METHODS[method].changes == "weights" else logging.WARNING
            log.log(level, "%s is left out: %s", method, error)
    model = open_model(path, dtype=wanted.dtype)
    values = cache_folder() / "extend" / f"{fingerprint(model.identity)[:24]}.sqlite"
    with Store(values) as store, ProgressBar() as progress:
        found = check_extensions(
            model,
            check,
            Engine(store, progress),
            methods=methods,
            length=length,
            to=to,
            near=wanted.near,
            options=wanted.options,
        )
    free_weights()
    for table in found.tables():
        print_table(*table)
    print(found.reason)
    for warning in found.warnings:
        log.warning("%s", warning)
    return found


@dataclass
class ExportSettings:
    """What is written."""

    context: PositiveInt | None = None
    """N, the tokens among which the model is to find something: scores of global layers are
    multiplied by ln(N + 1) / ln(L + 1), for L the training length. By default they stay. What that
    costs within L, coca eval perplexity --method temperature --factor N/L measures."""
    gguf: bool = False
    """Write NAME.gguf for llama.cpp into the folder, too, for NAME its name."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


def export_command(words: list[str]) -> None:
    """Write a model with layers with roles as Transformers' own class, for other engines."""
    path, target, wanted = parse(
        "coca export", export_command, words, [ExportSettings], ["model", "target"]
    )
    model = export_native(path, target, **vars(wanted))
    print(f"{target}: {model.config.model_type}, {model.num_parameters():,} parameters")
