"""Does an answer fit its prompt? Perplexity read at once, and token by token behind a cache.

    python -m studies.smollm2.decoding MODEL BOOKS.jsonl RESULTS.json

Of every document the last 512 of 9,012 tokens are scored twice: in one pass over all, and one token
a pass behind the cache of the 8,500 before. A method whose frequencies depend on the text so far
gives the cache's keys other ones than the query has. Takes 5 minutes a method and document on a
core.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coca_attention.models.methods import applied
from coca_lab.environment import describe_environment
from coca_lab.files import read_json, write_json
from coca_lab.intervals import mean_interval

METHODS = ("dynamic", "yarn")
TO = 12_288
PROMPT = 8_500
ANSWER = 512


@torch.inference_mode()
def nats_at_once(model: PreTrainedModel, ids: Tensor) -> float:
    """Nats a token of the answer, read in one pass with the prompt; ``ids`` are (1, T + 1)."""
    logits = model(ids[:, :-1], logits_to_keep=ANSWER).logits[0]
    return cross_entropy(logits, ids[0, PROMPT + 1 :]).item()


@torch.inference_mode()
def nats_token_by_token(model: PreTrainedModel, ids: Tensor) -> float:
    """The same, read one token a pass behind the cache of the prompt, as `generate` does."""
    cache = model(ids[:, :PROMPT], logits_to_keep=1).past_key_values
    logits = [
        model(ids[:, [place]], past_key_values=cache).logits[0]
        for place in range(PROMPT, PROMPT + ANSWER)
    ]
    return cross_entropy(torch.cat(logits), ids[0, PROMPT + 1 :]).item()


def main() -> None:
    """Measure every method on every document; what the file has already is not measured again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="folder or name")
    parser.add_argument("books", type=Path, help="JSON lines with a field text")
    parser.add_argument("results", type=Path, help="file to write")
    parser.add_argument("--documents", type=int, default=3, help="long enough ones to read")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    texts = []
    for line in given.books.read_text("utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"]).input_ids[: PROMPT + ANSWER + 1]
        if len(ids) == PROMPT + ANSWER + 1:
            texts.append(torch.tensor([ids]))
    texts = texts[: given.documents]
    rows = read_json(given.results)["rows"] if given.results.exists() else []
    for method in METHODS:
        for number, ids in enumerate(texts):
            if any((row["method"], row["document"]) == (method, number) for row in rows):
                continue
            with applied(model, method, to=TO):
                at_once = nats_at_once(model, ids)
                token_by_token = nats_token_by_token(model, ids)
            rows.append(
                {
                    "method": method,
                    "document": number,
                    "perplexity_at_once": math.exp(at_once),
                    "perplexity_token_by_token": math.exp(token_by_token),
                }
            )
            write_json(given.results, {"rows": rows, "environment": describe_environment()})
        changes = [
            math.log(row["perplexity_token_by_token"] / row["perplexity_at_once"])
            for row in rows
            if row["method"] == method
        ]
        mean = math.expm1(sum(changes) / len(changes))
        interval = [math.expm1(end) for end in mean_interval(changes) or ()]
        print(f"{method}: {mean:.1%} more perplexity token by token; 95 % interval", interval)


if __name__ == "__main__":
    main()
