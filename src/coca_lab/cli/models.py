"""Commands that turn models into others: extend, convert and export."""

import logging
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.method_names import MethodName
from coca_attention.models.configuration import (
    extension_of,
    made_for,
    rope_parameters,
    rotation,
)
from coca_attention.models.conversion import Conversion
from coca_attention.models.methods import (
    DEFAULTS,
    METHODS,
    extend_by_default,
    extend_context,
    extended_lengths,
)
from coca_lab.cells import CheckRecord
from coca_lab.cli.console import ProgressBar, markdown_table, print_table
from coca_lab.cli.generate import generate_words
from coca_lab.cli.parsing import as_typed_in
from coca_lab.cli.serve import serve_words
from coca_lab.engine import Engine
from coca_lab.environment import describe_environment
from coca_lab.evaluation.check import (
    check_of_cells,
    check_table,
    engines_of,
    measurements_of_check,
    verdicts,
)
from coca_lab.evaluation.choice import RULE, in_words
from coca_lab.evaluation.task import finish, free_weights, open_model
from coca_lab.export import export_native
from coca_lab.files import cache_folder, write_json
from coca_lab.fingerprints import fingerprint
from coca_lab.folders import convert_folder, extend_folder, made_from, new_folder
from coca_lab.loading import model_without_weights
from coca_lab.report.task_sections import printed_tables
from coca_lab.settings.commands import (
    CheckSettings,
    ExportSettings,
    ExtendSettings,
    FolderSettings,
)
from coca_lab.settings.studies import MethodSettings
from coca_lab.store import Store
from coca_lab.weights import quantised_by

log = logging.getLogger(__name__)

MEASURED = {"distances": 16, "frequencies": 16, "weights": 64}
"""T / L up to which methods of a kind were measured: 4,096 tokens of models made for 256
(results/extension), and a temperature in their queries 16,384 (results/retrieval)."""

LONGEST_FILE = 32_768
"""Tokens that the longest files of Python's library surely have (61,005 by SmolLM2's tokenizer)."""


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
    holders = ", ".join(each.name for each in METHODS.values() if "near" in each.options)
    if wanted.near and wanted.method != "auto" and "near" not in METHODS[wanted.method].options:
        raise UserError(f"method {wanted.method} has no --near, which is for {holders}")
    model = model_without_weights(path)
    config = model.config
    extended = extension_of(config.get_text_config())
    original = made_from(path) if extended else None
    if extended and original:
        to_typed = f" --to {wanted.to}" if wanted.to else ""
        if "/" not in original and not Path(original).exists():
            original = f"PATH/{original}"  # cards have no folders of a machine
        raise UserError(
            f"{path} was extended by {extended['method']} already, and a second method would act "
            "on top of the first: start from the original, which its card names: "
            f"coca extend {original} {target}{to_typed}"
        )
    length, to = extended_lengths(config, wanted.to, wanted.length, METHODS.get(wanted.method))
    report = ""
    measured = dict[str, Any]()
    if check.check:
        chosen, report, measured = _compare(path, target, model, wanted, check, length, to)
    else:
        method = wanted.method
        refused = None
        if method == "auto":
            refused = extend_by_default(deepcopy(model), to=to, length=length)
            method = DEFAULTS[len(refused)]  # the first that is not refused
        _print_training_length(config, wanted.length)
        if refused is not None:
            _say_what_is_taken(method, refused, length)
        _warn_of_unmeasured(method, length, to)
        chosen = MethodSettings(method, to / length, _options(wanted, method), wanted.length)
    model = extend_folder(
        path,
        target,
        chosen.method,
        to=to,
        length=length,
        dtype=wanted.dtype,
        report=report,
        **chosen.options,
    )
    if measured:  # for coca report
        results = Path(target) / "results.json"
        write_json(results, {**measured, "environment": describe_environment()})
        print(f"Results: {results}, drawn by coca report {target}")
    engines = in_words(engines_of(chosen.method, quantised_by(path, config)))
    if type(model.config).__module__.startswith("coca_attention"):  # which Python has to know
        engines = "Transformers after import coca_attention.models"
    size = sum(file.stat().st_size for file in Path(target).rglob("*") if file.is_file())
    log.info("%s: %s MB", target, f"{size / 1e6:,.1f}")
    print(
        f"{target}: {model.config.model_type}, {chosen.name}, for texts of {to:,} tokens; runs in "
        f"{engines}"
    )
    if cost := METHODS[chosen.method].cost(length):
        print(cost)
    print(f"Next: {generate_words(target)}, {serve_words(target)}")
    source = "" if to <= LONGEST_FILE else "--source TEXT "
    print(f"What it finds: coca eval needles {target} {source}--max-documents 1 --lengths {to}")
    if not check.check and wanted.method == "auto":
        elsewhere = in_words(METHODS["yarn"].engines)
        print(f"Other methods: --check TEXT compares them; --method yarn runs in {elsewhere}")


def _say_what_is_taken(
    method: MethodName, refused: Mapping[MethodName, UserError], length: int
) -> None:
    """Say which method is taken unmeasured, why not the preferred one, and what it does."""
    does = ""
    if METHODS[method].within == "exact":
        does = f"; texts of up to {length:,} tokens are computed as before"
    print(f"Method: {method}, the default{does}")
    preferred = DEFAULTS[0]
    if method == "limited":
        log.warning(
            f"limited finds little farther back than {length:,} tokens, and {preferred} is not "
            f"possible: {refused[preferred]}"
        )
    elif preferred in refused:  # the others for much the same reason, if at all
        why = as_typed_in("extend", str(refused[preferred]))
        print(f"Not possible: {preferred} ({why})")


def _warn_of_unmeasured(method: MethodName, length: int, to: int) -> None:
    """Warn of lengths at which nobody has measured how well a method reads."""
    farthest = MEASURED[METHODS[method].changes]
    if to > farthest * length:
        log.warning(
            f"{to:,} tokens are {to / length:,.0f} times the training length; {method} was "
            f"measured up to {farthest} times, so how well the model reads there is unknown: "
            "--check TEXT measures it"
        )


def _options(wanted: ExtendSettings, method: MethodName) -> dict[str, Any]:
    """The options of a method; ``near`` is for every one that has it."""
    if wanted.near is not None and "near" in METHODS[method].options:
        return {**wanted.options, "near": wanted.near}
    return wanted.options


def _compare(
    path: str,
    target: str,
    plain: PreTrainedModel,
    wanted: ExtendSettings,
    check: CheckSettings,
    length: int,
    to: int,
) -> tuple[MethodSettings, str, dict[str, Any]]:
    """Measure the methods that are possible: the one to take, why as Markdown, and in a file."""
    methods = list[MethodSettings]()
    refused = dict[str, str]()
    tried: list[MethodName] = [each.name for each in METHODS.values() if each.compared]
    if wanted.method != "auto":
        tried = [wanted.method]
    for method in tried:
        options = _options(wanted, method)
        try:
            extend_context(deepcopy(plain), method, to=to, length=length, **options)
        except UserError as error:
            refused[method] = as_typed_in("extend", str(error))
        else:
            methods.append(MethodSettings(method, to / length, options, wanted.length))
    if not methods:
        each = "; ".join(f"{method}: {why}" for method, why in refused.items())
        raise UserError(f"no method can extend {path}: {each}")
    model = open_model(path, dtype=wanted.dtype, device=check.device)
    # Before anything is printed or the store is opened, the text is read, which may be refused.
    measurements = measurements_of_check(
        model, methods, check, length=length, to=to, decides=wanted.method == "auto"
    )
    _print_training_length(plain.config, wanted.length)
    # Methods that compute the same share their readings.
    count = len({str(item.keys) for each in measurements for item in each.items})
    names = ", ".join(each.method for each in methods)
    print(f"Measuring {names}: {count:,} readings of up to {to:,} tokens")
    left_out = list[str]()
    if wanted.method == "auto":
        left_out += [f"Not measured: {method} ({error})" for method, error in refused.items()]
        named = [f"{row.name} ({row.left_out})" for row in METHODS.values() if row.left_out]
        left_out.append(f"Not measured unless named with --method: {', '.join(named)}")
    for line in left_out:
        print(line)
    sys.stdout.flush()  # into files, too: what follows takes hours
    # One process writes a store; checks on other texts have theirs.
    text = str(Path(check.check).resolve()) if Path(check.check).exists() else check.check
    about = [model.identity, text]
    values = cache_folder() / "extend" / f"{fingerprint(about)[:24]}.sqlite"
    try:
        with Store(values) as store, ProgressBar() as progress:
            measured = finish(measurements, Engine(store, progress))
    finally:
        free_weights()
    # Tables and the report have multiples of L, which --length may have set.
    cells = [{**cell, "training_length": length} for cell in measured]
    found = check_of_cells(model, methods, check, cells, length=length)
    choice = found.choice
    taken = found.taken
    reason = choice.reason
    if taken is None and wanted.method != "auto":
        (taken,) = methods
        (read,) = choice.others
        said = read.verdict(choice.base, choice.margins)
        reason = f"{taken.method} is written because it was named; the check says: {said}."
    for line in (reason, *choice.warnings):
        print(line)
    longest = max(choice.base.perplexity)
    columns = (
        f"Perplexity of {longest:,} tokens, and the probability of the digits of numbers hidden "
        f"up to L = {length:,} tokens back, and farther:"
    )
    readings = found.readings
    header, rows = check_table(readings)
    print_table(columns, header, rows)
    lost = verdicts(readings)
    for line in lost:
        print(line)
    record = CheckRecord(
        decision=" ".join([reason, *choice.warnings]),
        training_length=length,
        readings=readings,
        left_out=left_out,
    )
    content = {"check": record.model_dump(), "results": cells}
    if taken is None:
        print(RULE)  # there is no card
        results = Path(f"{Path(target)}.results.json")
        write_json(results, {**content, "environment": describe_environment()})
        print(f"Results: {results}, drawn by coca report {results}")
        raise UserError(
            "no method is taken, so no model is written: name one with --method, or let more "
            "documents decide (--check-documents)"
        )
    print("The rule and all tables are in the model card, README.md.")
    shown = [markdown_table(*table) for table in printed_tables(cells)]
    compared = markdown_table(columns, header, rows)
    report = [reason, *choice.warnings, compared, *lost, *left_out, RULE]
    return taken, "\n\n".join([*report, *shown]), content


def export_command(path: str, target: str, wanted: ExportSettings) -> None:
    """Write a model with layers with roles as Transformers' own class, for other engines."""
    model = export_native(path, target, **vars(wanted))
    print(f"{target}: {model.config.model_type}, {model.num_parameters():,} parameters")
    if wanted.gguf:
        folder = Path(target)
        print(f"for llama.cpp: {folder / folder.resolve().name}.gguf")
    print(f"Next: coca eval passkey {target}, {serve_words(target)}")
