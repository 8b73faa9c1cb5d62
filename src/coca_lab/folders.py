"""Converting a model from folder to folder, atomically."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from coca_attention.errors import UserError, known_problem
from coca_attention.models.conversion import Conversion, convert, load_original
from coca_lab.cards import write_card
from coca_lab.files import check_can_be_written, writing
from coca_lab.loading import load_model, no_progress_bars

UNTRAINED = "The conversion changed what the model computes: train it further before you use it."


def convert_folder(
    source: str | Path,
    target: str | Path,
    form: str | Conversion = "slack",
    *,
    from_original: bool = False,
    dtype: str = "auto",
    report: str = "",
    **settings: Any,
) -> PreTrainedModel:
    """`convert` or `load_original` from folder to folder, including tokenizer and model card.

    The target, which must not exist or be empty, is written whole or not at all.

    Args:
        source: Folder of a Transformers model (or its name), or of an original checkpoint.
        target: Folder to write.
        form: Name of the score form, or a `Conversion`.
        from_original: Whether the source is in the format of the paper's authors.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for that of the files.
        report: What the model card says of how the limit of distances was chosen, in Markdown.
        **settings: Fields of `Conversion`.

    Raises:
        UserError: If the source cannot be loaded or converted, or the target cannot be written.
    """
    target = new_folder(source, target)
    wanted = replace(form if isinstance(form, Conversion) else Conversion(form), **settings)
    if from_original:
        if wanted != Conversion(kv_cache=wanted.kv_cache):
            raise UserError(
                "an original checkpoint has the slack form and its own T projection: omit --form, "
                "--free-pairs, --roles, --max-distance and --length"
            )
        model = load_original(source, dtype=None if dtype == "auto" else getattr(torch, dtype))
        model.config.kv_cache = wanted.kv_cache
    else:
        model = load_model(source, dtype=dtype, device="cpu", any_head=True)
        model = convert(model, wanted)
    sections = {"Limit of distances": report}
    if wanted.changes_function and not from_original:
        sections["Training"] = UNTRAINED
    with writing_model(model, source, target) as folder:
        write_card(folder, model.config, name=target.name, source=source, sections=sections)
    return model


def new_folder(source: str | Path, target: str | Path) -> Path:
    """The full path of a folder to write; UserError unless it may be written."""
    target = Path(target).resolve()
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UserError(f"{target} is or contains the current folder: name a new folder")
    if Path(source).is_dir() and Path(source).resolve() in target.parents:
        raise UserError(
            f"{target} is inside the source, which must not change: name another folder"
        )
    check_can_be_written(target)
    return target


@contextmanager
def writing_model(model: Any, source: str | Path, target: Path) -> Iterator[Path]:
    """A temporary folder with the model and its tokenizer, which becomes the target on leaving."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise UserError(f"{source}: {name} has values that are not finite: it is damaged")
    try:
        with writing(target) as partial:
            with no_progress_bars():
                model.save_pretrained(partial)
            try:
                tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
            except (OSError, ValueError, KeyError):
                tokenizer = None  # a model without a tokenizer
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            yield partial
    except UserError:
        raise
    except Exception as error:
        problem = known_problem(error)
        if problem is None:
            raise
        raise UserError(f"{target} cannot be written: {problem}") from error
