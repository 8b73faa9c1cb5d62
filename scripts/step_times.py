"""Time and memory of a training step of a recipe's model, in several ways.

.venv/bin/python scripts/step_times.py recipes/passkey-1m.yaml --compile
.venv/bin/python scripts/step_times.py recipes/passkey-1m.yaml --chunk 512 --data.vocab_size 32768

Every variant has its own model with the same weights. They take turns, one step each, after the
steps in which compilation happens. Instead, with --profile, the longest operations of a step; with
--loader, how fast blocks are read.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

from coca_lab.data import BlockDataset, Document, TaskBlocks, train_tokenizer
from coca_lab.data.passkey import vocabulary_text
from coca_lab.studies.timing import Variant, interleaved, peak_megabytes
from coca_lab.training import Recipe, load_recipe
from coca_lab.training.chunks import chunk_loss
from coca_lab.training.model import model_config
from coca_lab.training.throughput import training_flops


def make_step(
    recipe: Recipe, precision: str, compiled: bool = False, chunk: int | None = None
) -> Callable[[], None]:
    """A function that makes one optimizer step, called twice already."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    shape = (recipe.training.micro_batch_size, recipe.data.block_length + 1)
    ids = torch.randint(recipe.data.vocab_size, shape, device=device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    config = model_config(recipe, recipe.data.vocab_size)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    if chunk is not None:
        chunk_loss(model, chunk)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    forward = torch.compile(model) if compiled else model
    half = precision != "float32"

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

    run()
    run()
    return run


def show_profile(run: Callable[[], None]) -> None:
    """Print the operations that take most of a step."""
    from torch.profiler import profile

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with profile() as found:
        for _ in range(3):
            run()
    print(found.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=15))


def show_loader(recipe: Recipe) -> None:
    """Print how many tokens a second the blocks of a run come at, without a model."""
    length = recipe.data.block_length
    tokens = np.random.default_rng(0).integers(256, size=100_000 * length).astype(np.uint16)
    text = [Document("passkey", vocabulary_text())]
    tokenizer = train_tokenizer(text, 512, split_digits=True)
    kinds = {
        "blocks": BlockDataset(tokens, length),
        "separate documents": BlockDataset(tokens, length, end=0),
        "passkey texts": TaskBlocks("passkey", tokenizer, length, 100_000, 0),
    }
    for name, blocks in kinds.items():
        for workers in (0, 1, 2):
            loader = DataLoader(
                blocks, 16, shuffle=True, collate_fn=default_data_collator, num_workers=workers
            )
            batches, count = iter(loader), 0
            next(batches)
            started = time.perf_counter()
            while (seconds := time.perf_counter() - started) < 0.5:
                next(batches)
                count += 16 * length
            print(f"{name}, {workers} workers: {count / seconds:,.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--chunk", type=int, help="also with training.loss_chunk, and memory")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--loader", action="store_true")
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    recipe = load_recipe(options.recipe, overrides)
    if options.loader:
        show_loader(recipe)
        return
    if options.profile:
        show_profile(make_step(recipe, options.precisions[0], options.compile))
        return
    ways = [(False, None)]
    ways += [(True, None)] if options.compile else []
    ways += [(False, options.chunk)] if options.chunk else []
    variants = []
    for precision in options.precisions:
        for compiled, chunk in ways:
            before = time.perf_counter()
            run = make_step(recipe, precision, compiled, chunk)
            facts = {"first_two_steps_seconds": time.perf_counter() - before}
            if options.chunk:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                made = (recipe, precision, compiled, chunk)
                facts["peak_megabytes"] = peak_megabytes(make_step, *made, device=device)
            name = f"{precision}{', compiled' if compiled else ''}{', chunks' if chunk else ''}"
            variants.append(Variant(name, run, facts=facts))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = interleaved(variants, device, rounds=options.rounds, seconds=options.seconds)
    config = model_config(recipe, recipe.data.vocab_size)
    flops = training_flops(AutoModelForCausalLM.from_config(config), recipe.data.block_length)
    print(f"{flops:,.0f} floating-point operations per token")
    print(json.dumps({v.name: found[v.name] | v.facts for v in variants}, indent=1))


if __name__ == "__main__":
    main()
