"""Peak memory of a process when several share one long sequence (context parallelism), on CPUs.

A training step, with activations recomputed, and the reading of a text by a small CoCA model of
random weights. For every number of processes, the largest peak of one above what it has before, in
MB (10^6 bytes).

.venv/bin/python scripts/context_memory.py [--tokens 32768] [--processes 1 2 4]
"""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from coca_attention.models import CoCALlamaConfig, CoCALlamaForCausalLM, split_sequences
from coca_lab.environment import reset_peak, resident_megabytes


def measure(rank: int, what: str, processes: int, store: str, tokens: int, form: str) -> None:
    """Print what a training step or a text needs; the first process speaks for all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = CoCALlamaConfig(
        coca_form=form, vocab_size=1024, hidden_size=256, intermediate_size=1024,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    model = CoCALlamaForCausalLM(config)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=processes)
    group = dist.group.WORLD
    assert group is not None
    if processes > 1:
        split_sequences(model, group)

    def step(ids: torch.Tensor) -> None:
        model.train()(input_ids=ids, labels=ids).loss.backward()

    @torch.inference_mode()
    def read(ids: torch.Tensor) -> None:
        model.eval()(input_ids=ids)

    run = {"training step": step, "reading": read}[what]
    run(torch.randint(1024, (1, 256)))  # buffers of the first pass, and gradients
    before = resident_megabytes("VmRSS" if reset_peak() else "VmHWM")
    started = time.perf_counter()
    run(torch.randint(1024, (1, tokens)))
    found = torch.tensor([resident_megabytes("VmHWM") - before, time.perf_counter() - started])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        peak, seconds = found.tolist()
        print(f"{what}, {processes} processes: {peak:,.0f} MB, {seconds:.0f} s", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--form", default="slack")
    options = parser.parse_args()
    # Large blocks go back to the system when they are freed, so that the peak is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    for what in ("training step", "reading"):
        for processes in options.processes:
            with tempfile.TemporaryDirectory() as folder:
                store = f"{folder}/store"
                spawn(measure, (what, processes, store, options.tokens, options.form), processes)


if __name__ == "__main__":
    main()
