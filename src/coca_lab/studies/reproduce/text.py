"""The tokenised text of a reproduction, made once and then independent of its sources."""

import json
import lzma
import math
from dataclasses import replace

import numpy as np

from coca_attention.errors import UserError
from coca_lab.data import (
    SourceSettings,
    held_out,
    load_or_train_tokenizer,
    load_tokenizer,
    tokenise,
)
from coca_lab.data.tokens import encode_documents
from coca_lab.files import read_json, write_json
from coca_lab.files import replace as move
from coca_lab.studies.reproduce.settings import ReproduceSettings

HELD_OUT = 0.05


def prepare_text(settings: ReproduceSettings) -> None:
    """Write the folder of tokenised text, unless it is there.

    ``tokenizer/``; ``train.npy``, the token ids; ``test.jsonl.xz``, documents long enough for the
    longest window, cut behind it; and ``text.json``, which is written last.

    Raises:
        UserError: If there is no text, too few tokens or no long document.
    """
    folder, shape = settings.text_folder, settings.shape
    about = folder / "text.json"
    if about.is_file():
        known = read_json(about)
        if settings.text and known["text"] != settings.text:
            raise UserError(
                f"{folder} has tokens of {known['text']}, not of {settings.text}: leave out "
                "--text, or choose another --tokenised"
            )
        for option, unit, asked in (
            ("longest", "tokens a window", settings.lengths[-1]),
            ("documents", "documents", shape.documents),
        ):
            if asked > known.get(option, asked):
                raise UserError(
                    f"the test text of {folder} was made for {known[option]:,} {unit}, not "
                    f"{asked:,}: choose a smaller --{option}, or make text anew with --text and "
                    "another --tokenised"
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
    made = {"longest": longest, "documents": shape.documents, "test_documents": len(lines)}
    write_json(about, {"text": settings.text, "tokens": count, **made})
