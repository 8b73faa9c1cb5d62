"""Times a training step of a recipe's model, with and without torch.compile, in each precision.

.venv/bin/python scripts/step_times.py recipes/passkey-1m.yaml

Every variant has its own model with the same weights. They take turns, one step each, after the
steps in which compilation happens.
"""

import argparse
import json
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM

from coca_attention.benchmarks.timing import Variant, interleaved
from coca_attention.training import load_recipe
from coca_attention.training.model import model_config


def step(recipe, ids, *, compiled: bool, precision: str):
    """A function that makes one optimizer step, and the seconds that the first two took."""
    device = ids.device
    torch.manual_seed(0)
    config = model_config(recipe, recipe.data.vocab_size)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    forward = torch.compile(model) if compiled else model
    half = precision != "float32"
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run() -> None:
        autocast = torch.autocast(device.type, getattr(torch, precision)) if half else nullcontext()
        with autocast:
            loss = forward(
                input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    before = time.perf_counter()
    run()
    run()
    return run, time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"])
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    recipe = load_recipe(options.recipe, overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (recipe.training.micro_batch_size, recipe.data.block_length + 1)
    ids = torch.randint(recipe.data.vocab_size, shape, device=device)
    variants = []
    for precision in options.precisions:
        for compiled in (False, True):
            run, first = step(recipe, ids, compiled=compiled, precision=precision)
            name = f"{precision}{', compiled' if compiled else ''}"
            variants.append(Variant(name, run, facts={"first_two_steps_seconds": first}))
    found = interleaved(variants, device, rounds=options.rounds, seconds=options.seconds)
    print(json.dumps({v.name: found[v.name] | v.facts for v in variants}, indent=1))


if __name__ == "__main__":
    main()
