"""Commands that turn models into others: extend, convert and export."""

import logging

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
from coca_lab.cli.console import ProgressBar, print_table
from coca_lab.engine import Engine
from coca_lab.evaluation.extension import (
    Candidate,
    ExtensionCheck,
    check_extensions,
)
from coca_lab.evaluation.task import free_weights, open_model
from coca_lab.export import export_native
from coca_lab.files import cache_folder
from coca_lab.fingerprints import fingerprint
from coca_lab.folders import convert_folder, extend_folder, new_folder
from coca_lab.loading import model_without_weights
from coca_lab.settings.commands import (
    CheckSettings,
    ExportSettings,
    ExtendSettings,
    FolderSettings,
)
from coca_lab.store import Store
from coca_lab.weights import quantised_by

log = logging.getLogger(__name__)


def convert_command(path: str, target: str, wanted: Conversion, folder: FolderSettings) -> None:
    """Turn a vanilla model's folder into the CoCA model of its family, to be trained on."""
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


def extend_command(path: str, target: str, wanted: ExtendSettings, check: CheckSettings) -> None:
    """Let a model read longer texts, without training, by the method that its text shows best."""
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


def export_command(path: str, target: str, wanted: ExportSettings) -> None:
    """Write a model with layers with roles as Transformers' own class, for other engines."""
    model = export_native(path, target, **vars(wanted))
    print(f"{target}: {model.config.model_type}, {model.num_parameters():,} parameters")
