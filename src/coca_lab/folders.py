"""Model folders that commands write whole or not at all: model, tokenizer and card, README.md."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from coca_attention import __version__
from coca_attention.errors import UserError, install, published_at
from coca_attention.method_names import MethodName
from coca_attention.models.configuration import (
    EXTENSION,
    GLOBAL,
    LOCAL,
    attention_of,
    extension_of,
    head_width,
    made_for,
    rope_parameters,
)
from coca_attention.models.conversion import Conversion, convert, load_original
from coca_attention.models.methods import METHODS, extend_context
from coca_attention.ops import DistanceMap
from coca_lab.data import load_tokenizer
from coca_lab.data.text import TOKENIZER_FILES
from coca_lab.files import belongs_to, check_can_be_written, find_model, known_problem, writing
from coca_lab.loading import (
    check_no_adapter,
    check_safetensors,
    load_model,
    model_without_weights,
    no_progress_bars,
)
from coca_lab.weights import (
    MODELOPT,
    check_belongs,
    check_finite,
    checked_pieces,
    model_file,
    quantised_by,
    weight_files,
)

log = logging.getLogger(__name__)

UNTRAINED = "The conversion changed what the model computes: train it further before you use it."
CARD = "README.md"
LICENSES = ("LICENSE*", "LICENSES/*", "NOTICE*", "USE_POLICY*")
READ = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*_templates/*")
"""Patterns of the files of a model that get into a new folder, as they are or as part of others."""
PIPELINES = {
    "CausalLM": "text-generation",
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}
COCA = "[CoCA](https://arxiv.org/abs/2309.08646)"
ORIGINS = {
    "slack": COCA,
    "strict": COCA,
    "magnitude": "[PoPE](https://arxiv.org/abs/2509.10534)",
    "turning_pairs": "[HWFA](https://kexue.fm/archives/9603)",
    "temperature": "[log n scaling](https://kexue.fm/archives/8823)",
    "decay": "[KERPLE](https://arxiv.org/abs/2205.09921)",
    "distance_map": "[ReRoPE](https://github.com/bojone/rerope)",
    "yarn": "[YaRN](https://arxiv.org/abs/2309.00071)",
}
"""By score form or rotary parameter, where its idea is from (docs/related-work.md). `METHODS` says
it of the methods that extend a model."""


def convert_folder(
    source: str | Path,
    target: str | Path,
    form: str | Conversion = "slack",
    *,
    from_original: bool = False,
    dtype: str = "auto",
    **settings: Any,
) -> PreTrainedModel:
    """`convert` or `load_original` from folder to folder, with tokenizer and card.

    ``settings`` are fields of `Conversion`.
    """
    target = new_folder(source, target)
    wanted = replace(form if isinstance(form, Conversion) else Conversion(form), **settings)
    if from_original:
        if wanted != Conversion(kv_cache=wanted.kv_cache):
            raise UserError(
                "an original checkpoint has the slack form and its own T projection: omit --form, "
                "--free-pairs, --roles, --near and --length"
            )
        check_no_adapter(source)
        model = load_original(source, dtype=None if dtype == "auto" else getattr(torch, dtype))
        model.config.kv_cache = wanted.kv_cache
    else:
        # What is refused is refused before its weights are read.
        convert(model_without_weights(source, any_head=True), wanted)
        model = convert(load_model(source, dtype=dtype, device="cpu", any_head=True), wanted)
    changed = wanted.changes_function and not from_original
    sections = {"Training": UNTRAINED} if changed else {}
    with writing_model(model, source, target) as folder:
        write_card(folder, model.config, name=target.name, source=source, sections=sections)
    return model


def extend_folder(
    source: str | Path,
    target: str | Path,
    method: MethodName,
    *,
    dtype: str = "auto",
    report: str = "",
    to: int | None = None,
    length: int | None = None,
    **options: Any,
) -> PreTrainedModel:
    """`extend_context` from folder to folder, with tokenizer and card.

    ``options`` are those of the method; ``report`` says in Markdown how it was chosen. Methods that
    change frequencies copy the files of the weights, so any quantisation is kept.
    """
    target = new_folder(source, target)

    def extended(plain: PreTrainedModel) -> PreTrainedModel:
        return extend_context(plain, method, to=to, length=length, **options)

    # What is refused is refused before its weights are read.
    model = extended(model_without_weights(source, "auto", any_head=True))
    keep_weights = METHODS[method].changes == "frequencies" and dtype == "auto"
    if keep_weights and quantised_by(source, model.config) is None:
        # Where a head is separate that config.json calls tied, only values say which is right.
        tied = model.all_tied_weights_keys.items()
        keep_weights = all(model.get_parameter(a) is model.get_parameter(b) for a, b in tied)
    if not keep_weights:
        model = extended(load_model(source, dtype=dtype, device="cpu", any_head=True))
    done = getattr(model.config.get_text_config(), EXTENSION)
    said = (
        f"By method {method} ({METHODS[method].source}), without training, for texts of "
        f"{done['to']:,} tokens; L = {done['length']:,}. "
        f"{METHODS[method].cost(done['length'])}"
    )
    sections = {"Context extension": f"{said.strip()}\n\n{report}".strip()}
    sections |= served_by_vllm(model.config, target.name)
    with writing_model(
        model, source, target, longest=done["to"], keep_weights=keep_weights
    ) as folder:
        write_card(folder, model.config, name=target.name, source=source, sections=sections)
    return model


def served_by_vllm(config: PreTrainedConfig, name: str) -> dict[str, str]:
    """What a card says of vLLM: for a Cohere2, that its windows are one token longer there."""
    if config.model_type != "cohere2":
        return {}
    shorter = json.dumps({"sliding_window": config.sliding_window - 1})
    text = (
        "In vLLM's Cohere2 a window has one token more than in Transformers':\n\n"
        f"```sh\nvllm serve {name} --hf-overrides '{shorter}'\n```"
    )
    return {"vLLM": text}


def new_folder(source: str | Path, target: str | Path) -> Path:
    """The full path of a folder to write.

    Raises:
        UserError: Unless it may be written, and the source has all files itself that it gets.
    """
    target = Path(target).resolve()
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UserError(f"{target} is or contains the current folder: name a new folder")
    if Path(source).is_dir() and Path(source).resolve() in target.parents:
        raise UserError(
            f"{target} is inside the source, which must not change: name another folder"
        )
    # The new folder may be published, and what a link leads to elsewhere with it.
    folder = Path(source).expanduser()
    licenses = {file for pattern in LICENSES for file in folder.glob(pattern)}  # `copy_licenses`
    for pattern in READ:
        for file in sorted({*folder.glob(pattern)} - licenses):
            check_belongs(folder, file)
    check_can_be_written(target)
    return target


@contextmanager
def writing_model(
    model: PreTrainedModel,
    source: str | Path,
    target: Path,
    longest: int = 0,
    keep_weights: bool = False,
) -> Iterator[Path]:
    """A temporary folder with the model and its tokenizer, which becomes the target on leaving.

    The tokenizer is said to take texts of ``longest`` tokens, if it said fewer. Weights that are
    kept are copied from the source, and the model may have none.
    """
    if not keep_weights:
        check_finite(source, model)
    try:
        with writing(target) as partial:
            if keep_weights:
                _copy_model(model.config, source, partial)
            else:
                with no_progress_bars():
                    model.save_pretrained(partial)
            _write_tokenizer(source, partial, longest)
            yield partial
    except UserError:
        raise
    except Exception as error:
        problem = known_problem(error)
        if problem is None:
            raise
        # A file of the partial folder, which is gone, by the name that it would have had.
        problem = problem.replace(f".{target.name}.coca-partial", target.name)
        raise UserError(f"{target} cannot be written: {problem}") from error


def _copy_model(config: PreTrainedConfig, source: str | Path, folder: Path) -> None:
    """Write a configuration beside the weights and settings of its source."""
    config.save_pretrained(folder)
    place = find_model(source)
    check_safetensors(place.path)
    for name, file in weight_files(place).items():
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        with open(copied, "wb") as sink:
            sink.writelines(checked_pieces(file))
    for name in (GENERATION_CONFIG_NAME, MODELOPT):
        found = model_file(place, name)
        if found is not None:
            shutil.copyfile(found, folder / name)


def _write_tokenizer(source: str | Path, folder: Path, longest: int) -> None:
    """Write the source's tokenizer for texts of a length in tokens; unread, as it is."""
    try:
        tokenizer = load_tokenizer(source)
    except UserError as error:
        theirs = Path(find_model(source).path)
        patterns = (*TOKENIZER_FILES, "*.jinja")
        files = [file for pattern in patterns for file in theirs.glob(pattern)]
        copied = [file for file in files if file.is_file()]
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        done = "its files are copied as they are" if copied else "the new folder has none, too"
        log.warning("%s; %s", error, done)
        return
    tokenizer.model_max_length = max(tokenizer.model_max_length, longest)
    tokenizer.save_pretrained(folder)


def write_card(
    folder: str | Path,
    config: PreTrainedConfig,
    *,
    name: str | None = None,
    source: str | Path | None = None,
    sections: Mapping[str, str] | None = None,
) -> None:
    """Write the card of a model, with sections by heading, and copy the licenses of its source."""
    folder, theirs = Path(folder), _folder(source)
    ours = type(config).__module__.startswith("coca_attention")
    head = (config.architectures or ["ForCausalLM"])[0].partition("For")[2]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES.get(head),
        tags=["coca-attention"] if ours else None,
        **_inherited(source, theirs),
    )
    licenses = copy_licenses(theirs, folder) if theirs else []
    rope = rope_parameters(config)
    used = {name for name, value in rope.items() if value is not None}
    used |= {attention_of(config), rope.get("rope_type")}
    extended = extension_of(config)
    if extended:  # what sets these is named by its method
        used -= {"distance_map", "yarn"}
    methods = [origin for name, origin in ORIGINS.items() if name in used]
    if extended and extended["method"] in METHODS:
        methods.append(METHODS[extended["method"]].source)
    made_of = ""
    if source is not None:  # a path of this machine tells others nothing, a name on the Hub all
        made_of = str(source) if _is_of_hub(source) else Path(source).name
    ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=name or folder.resolve().name,
        model_type=config.model_type,
        source=made_of,
        facts={**facts(config), "methods": ", ".join(methods)},
        ours=ours,
        auto=f"AutoModelFor{head}" if head in PIPELINES else "AutoModel",
        install=install(),
        source_code=published_at(),
        version=__version__,
        sections=sections or {},
        licenses=licenses,
    ).save(folder / CARD)


def made_from(source: str | Path) -> str | None:
    """The model that the card of `write_card` says this one was made from."""
    theirs = _folder(source)
    if theirs is None or not (theirs / CARD).is_file():
        return None
    text = (theirs / CARD).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^A `.+` model, made from `(.+)`\.$", text, re.MULTILINE)
    return found and found[1]


def copy_licenses(source: Path, folder: Path) -> list[str]:
    """Copy the terms of a model into another folder; the names of the copies.

    What cannot be read, and what a link brings in from elsewhere on the machine, is left out with a
    warning: the folder may be published.
    """
    found = {path for pattern in LICENSES for path in source.glob(pattern) if not path.is_dir()}
    names = []
    for path in sorted(found):
        name = path.relative_to(source).as_posix()
        try:
            name.encode()  # which the card could not say
            if not belongs_to(source, path):
                raise UserError("a link out of the model's folder")
            if not path.is_file():
                raise UserError("not a file")
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        except (UserError, OSError, UnicodeEncodeError) as error:
            shown = os.fsencode(path).decode(errors="backslashreplace")  # any log can write it
            log.warning("%s is not copied: %s", shown, known_problem(error) or error)
            continue
        names.append(name)
    return names


def facts(config: PreTrainedConfig) -> dict[str, str]:
    """What a configuration says about attention and positions, by name; empty where nothing."""
    form, heads = attention_of(config), config.num_attention_heads
    names = {None: "unknown", "rope": "rotary", "alibi": "ALiBi"}
    attention = names.get(form, f"CoCA, {form}")
    if hasattr(config, "coca_form"):
        attention += f", {config.kv_cache} cache"
    groups = getattr(config, "num_key_value_heads", None) or heads
    kinds = getattr(config, "layer_types", None) or [GLOBAL] * config.num_hidden_layers
    layers = f"{len(kinds)} of width {config.hidden_size:,}"
    if LOCAL in kinds:
        letters = "".join("l" if kind == LOCAL else "g" for kind in kinds)
        layers += f": {letters} (l sees the last {config.sliding_window:,} tokens, g all)"
    ropes = [] if form == "alibi" else [rope_parameters(config, kind) for kind in kinds]
    rotations = []
    for rope in ropes:
        parts = [f"{n} {x}" for n, x in rope.items() if isinstance(x, str | int | float)]
        if rope.get("distance_map"):
            parts.append(str(DistanceMap(**rope["distance_map"])))
        rotations.append(", ".join(parts))
    length, _ = made_for(config)
    context = f"{length:,} tokens" if length else ""
    extended = extension_of(config)
    if extended:
        context = f"{extended['to']:,} tokens, extended from {length:,} by {extended['method']}"
    return {
        "attention": f"{attention}; {heads} heads of {head_width(config)}, {groups} for keys and "
        "values",
        "layers": layers,
        "rotation": "; ".join(dict.fromkeys(rotations)),
        "context": context,
    }


def _inherited(source: str | Path | None, theirs: Path | None) -> dict[str, Any]:
    """Metadata from the card of the source; its name if it is one of the Hub."""
    data: dict[str, Any] = {}
    if theirs and (theirs / CARD).is_file() and belongs_to(theirs, theirs / CARD):
        with suppress(OSError, ValueError, TypeError, yaml.YAMLError):  # none to be read
            text = (theirs / CARD).read_text(encoding="utf-8", errors="replace")
            data = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    names = ("license", "license_name", "license_link", "language", "base_model")
    kept = {name: data[name] for name in names if name in data}
    if source is not None and _is_of_hub(source):
        kept["base_model"] = str(source).partition("@")[0]
    return kept


def _is_of_hub(source: str | Path) -> bool:
    """Whether it is the NAME, or NAME@REVISION, of a model on the Hub."""
    if Path(source).exists():
        return False
    with suppress(HFValidationError):
        validate_repo_id(str(source).partition("@")[0])
        return True
    return False


def _folder(source: str | Path | None) -> Path | None:
    """A folder with the card and the licenses of a model, None if there is none to be had."""
    if source is None:
        return None
    with suppress(OSError, ValueError, UserError):
        place = find_model(source)
        if Path(place.path).is_dir():
            return Path(place.path)
        terms = [CARD, *LICENSES]
        return Path(snapshot_download(place.path, revision=place.revision, allow_patterns=terms))
    return None
