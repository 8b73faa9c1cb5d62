"""Commands that turn models into others: convert and export."""

import logging
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from coca_attention.errors import UserError
from coca_attention.models.configuration import (
    made_for,
    rope_parameters,
    rotation,
    training_length,
)
from coca_attention.models.conversion import Conversion, convert
from coca_lab.cli.console import Progress, parse, print_table
from coca_lab.data import load_tokenizer
from coca_lab.engine import Engine
from coca_lab.evaluation.limit_check import LimitCheck, LimitCheckSettings, check_limits
from coca_lab.evaluation.perplexity import TextSettings, load_text
from coca_lab.evaluation.task import free_weights, open_model
from coca_lab.export import export_native
from coca_lab.folders import convert_folder, new_folder
from coca_lab.loading import model_without_weights

log = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass
class FolderSettings:
    """How the folders are read and written."""

    from_original: bool = False
    """MODEL is a checkpoint in the format of the paper's authors."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


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
    free_weights()  # which are converted now
    print_table(*report.table())
    if report.warning:
        log.warning("%s", report.warning)
    return report


def _print_training_length(model: Any, given: int | None) -> None:
    """Which training length a conversion was for, and why; nothing if it was for none."""
    config = model.config.get_text_config()
    if "temperature" not in rope_parameters(config):
        return
    length, why = made_for(config)
    length, why = (given, "--length") if given else (length, f"{why}; --length sets another")
    print(f"Training length: {length:,} tokens ({why})")


@dataclass
class ExportSettings:
    """What is written."""

    context: Annotated[int, Field(ge=1)] | None = None
    """N, the tokens among which the model is to find something: scores of global layers are
    multiplied by ln(N + 1) / ln(L + 1), for L the training length. By default they stay."""
    gguf: bool = False
    """Write NAME.gguf for llama.cpp into the folder, too, for NAME its name."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


@dataclass
class CostSettings(TextSettings):
    """Text on which to measure what a context costs within the training length."""

    source: str = ""
    """Text with the same values as in coca eval perplexity; by default nothing is measured."""
    max_documents: int | None = 20
    """Maximum number of documents."""
    skip_short: bool = True
    """Skip documents shorter than the training length instead of reporting an error."""


def run_export(words: list[str]) -> None:
    """Write a model with layers with roles as Transformers' GraniteSWA, for other engines."""
    path, target, wanted, text = parse(
        "coca export", run_export, words, [ExportSettings, CostSettings], ["model", "target"]
    )
    if text.source and wanted.context is None:
        raise UserError("--source is the text on which the cost of --context is measured")
    documents = []
    if text.source:
        length = training_length(model_without_weights(path).config) or 0
        documents = load_text(text, load_tokenizer(path), at_least=length + 1)
    model, cost = export_native(path, target, **vars(wanted), documents=documents)
    print(f"{target}: {model.config.model_type}, {model.num_parameters():,} parameters")
    if cost is not None:
        print(
            f"for {wanted.context:,} tokens: perplexity within {cost.length:,} {cost.before:.2f} "
            f"-> {cost.after:.2f} ({cost.after / cost.before - 1:+.1%}, {cost.tokens:,} tokens)"
        )
    elif wanted.context is not None:
        print("what the context costs within the training length was not measured: give --source")
