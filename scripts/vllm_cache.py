"""What layers with windows save in vLLM: tokens per second, and requests that fit in its cache.

A random model of 12 layers (8 with a window of 256 and 4 without, or all without) reads prompts on
a CPU; run it in the environment of `make test-engines`, which has this package's dependencies.

build/engines/bin/python scripts/vllm_cache.py granite_swa --length 8192 --requests 4
build/engines/bin/python scripts/vllm_cache.py llama --length 8192 --requests 4
"""

import argparse
import os
import tempfile

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

LAYERS, WINDOW, ANSWER = 12, 256, 200
SIZES = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 65536,
}  # fmt: skip
WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
    "layer_rope_theta": [10000.0, 10000.0, 0] * 4,
}


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("body", choices=["granite_swa", "llama"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--capacity", action="store_true", help="measure no time")
    options = parser.parse_args()
    extra = WINDOWS if options.body == "granite_swa" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.body, **SIZES, **extra)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=options.length + ANSWER,
            max_num_seqs=options.requests,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
    engine = model.llm_engine
    core = engine.engine_core.engine_core
    fits = get_max_concurrency_for_kv_cache_config(
        engine.vllm_config, core.scheduler.kv_cache_config
    )
    print(
        f"{options.body}: {fits:.1f} requests of {options.length:,} + {ANSWER} tokens fit in 1 GiB",
        flush=True,
    )
    if options.capacity:
        return
    generator = torch.Generator().manual_seed(0)
    shape = options.requests, options.length
    prompts = torch.randint(3, 1024, shape, generator=generator).tolist()
    outputs = model.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    times = [output.metrics for output in outputs]
    begun = min(each.scheduled_ts for each in times)
    read = max(each.first_token_ts for each in times)
    done = max(each.last_token_ts for each in times)
    tokens = options.requests * options.length
    written = options.requests * ANSWER
    print(
        f"{options.requests} at once: read {tokens / (read - begun):,.0f} tokens per second, all "
        f"{(tokens + written) / (done - begun):,.0f}, then wrote "
        f"{written / (done - read):,.0f}"
    )


if __name__ == "__main__":
    main()
