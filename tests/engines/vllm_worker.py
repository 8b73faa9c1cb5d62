"""vLLM as a process that answers requests, a line of JSON each; run in vLLM's own environment.

A request has the options of a model, rounds of prompts, and how many tokens to generate.
"""

import gc
import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # errors reach this process as they were raised
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)
sys.stdout.flush()
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM writes to standard output

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


def read(options, rounds, tokens, prompt_scores, adapter=None):
    """Greedy tokens, log probabilities, and the number of tokens that were in the cache."""
    model = LLM(**options, seed=0, skip_tokenizer_init=True)
    greedy = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if prompt_scores else None,
    )
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    found = []
    for prompts in rounds:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = model.generate(asked, greedy, use_tqdm=False, lora_request=lora)
        found.append([described(output) for output in outputs])
    model.llm_engine.engine_core.shutdown()
    return found


def described(output):
    """An output of vLLM as JSON; the first token of a prompt has no score."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    pairs = [*zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)][1:]
    pairs += zip(tokens, completion.logprobs, strict=True)
    scores = [each[token].logprob for token, each in pairs]
    return {"tokens": tokens, "scores": scores, "cached": output.num_cached_tokens}


for line in sys.stdin:
    try:
        answer = {"rounds": read(**json.loads(line))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
    gc.collect()
