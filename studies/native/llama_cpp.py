"""An exported model in llama.cpp as its authors publish it, beside Transformers.

    coca export runs/native-1m native --context 16384 --gguf
    PYTHONPATH=. python -m studies.native.llama_cpp native

Prints greedy text of 20 prompts, log-probabilities at 4,096 tokens, and 20 passkeys of every
length.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_lab.data.tasks import ask_for_passkeys, is_hit

PROMPTS = 20
COMPARED, READ = 256, 4096
"""Tokens of the prompts whose text, and whose probabilities, are compared."""
LENGTHS = (256, 1024, 4096, 16384 - 34)
"""Tokens of prompts that ask for a passkey; the last leaves room for the answer."""
ANSWER = 32
GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}


def serve(file: Path, context: int) -> Any:
    """A running server of llama.cpp on one core, as exact as it can be made."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = context, 1, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    # Its flash attention is less exact on a CPU (docs/integrations.md).
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type(0)
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(parameters)


def complete(server: Any, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens after a prompt; never the end of the text."""
    asked = GREEDY | {"prompt": ids, "n_predict": tokens, "return_tokens": True}
    request = Request(
        f"{server.listening_address}/completion",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as answer:
        return json.load(answer)["tokens"]


def log_probabilities(server: Any, ids: list[int], vocabulary: int) -> torch.Tensor | None:
    """Of the token after a prompt, (vocabulary,), NaN where llama.cpp says none.

    None where the greedy token ends within a character, for which llama.cpp says nothing.
    """
    asked = GREEDY | {"prompt": ids, "n_predict": 1, "n_probs": vocabulary}
    answer = server.handle_completions(asked)
    found = (answer["choices"][0]["logprobs"] or {}).get("content", [])
    if not found:
        return None
    values = torch.full((vocabulary,), torch.nan)
    for each in found[0]["top_logprobs"]:
        values[each["id"]] = each["logprob"]
    return values


@torch.no_grad()
def compare(folder: Path) -> Iterable[str]:
    """A line per measure."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    server = serve(folder / "native.gguf", LENGTHS[-1] + ANSWER)

    equal = 0
    for prompt in ask_for_passkeys(tokenizer, COMPARED, range(PROMPTS), seed=1):
        answer = complete(server, prompt.ids, 20)
        logits = model(torch.tensor([prompt.ids + answer])).logits[0, len(prompt.ids) - 1 : -1]
        logits[:, tokenizer.eos_token_id] = -torch.inf
        equal += answer == logits.argmax(-1).tolist()
    yield f"greedy text equal: {equal} of {PROMPTS}"

    (prompt,) = ask_for_passkeys(tokenizer, READ, [0], seed=1)
    logits = model(torch.tensor([prompt.ids])).logits[0, -1]
    found = log_probabilities(server, prompt.ids, len(tokenizer))
    if found is None:
        yield f"no log-probabilities at {READ:,} tokens: the next one ends within a character"
    else:
        said = ~found.isnan()
        error = (found - logits.log_softmax(-1))[said].abs().max() / logits.abs().max()
        what = f"{int(said.sum()):,} log-probabilities at {READ:,} tokens"
        yield f"{what}: within {error:.1e} of the largest logit"

    for length in LENGTHS:
        prompts = ask_for_passkeys(tokenizer, length, range(PROMPTS), seed=0)
        answers = (tokenizer.decode(complete(server, x.ids, ANSWER)) for x in prompts)
        hits = sum(is_hit(a, x.facts["key"]) for a, x in zip(answers, prompts, strict=True))
        yield f"passkeys at {length:,} tokens: {hits} of {PROMPTS}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in compare(Path(sys.argv[1])):
        print(line, flush=True)
