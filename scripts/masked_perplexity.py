"""Perplexity of masked bytes by length: ModernBERT with rotary attention and with CoCA.

Trains one small encoder per attention on texts of 128 bytes (Python's standard library), with the
same seed and order, and reads longer held-out texts with each.

.venv/bin/python scripts/masked_perplexity.py [--steps 300] [--seeds 1]
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from coca_attention import convert
from coca_attention.models.projections import FoldedLinear

LENGTH, LENGTHS, TOKENS, MASK, SHARE = 128, (128, 256, 512, 1024, 2048), 1 << 15, 256, 0.3
ATTENTIONS = {
    "rotary": None,
    "slack": {"form": "slack"},
    "strict": {"form": "strict"},
    "strict, 12 of 16 pairs free": {"form": "strict", "free_pairs": 12},
}


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and, of every tenth file, to read."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(f.read_bytes() for f in files if f not in files[::10])]
    parts.append(b"".join(f.read_bytes() for f in files[::10]))
    train, held_out = (torch.frombuffer(bytearray(x), dtype=torch.uint8).long() for x in parts)
    return train, held_out


def masked(ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.rand(ids.shape, generator=generator) < SHARE
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)


def trained(attention: dict | None, train: torch.Tensor, steps: int, seed: int):
    torch.manual_seed(seed)
    config = ModernBertConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=2, max_position_embeddings=LENGTH, local_attention=32,
        pad_token_id=257, bos_token_id=258, eos_token_id=259, cls_token_id=258, sep_token_id=259,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    )  # fmt: skip
    model = ModernBertForMaskedLM(config)
    if attention is not None:
        for module in convert(model, **attention).modules():
            if isinstance(module, FoldedLinear):
                module.init_folded(config.initializer_range)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for _ in range(steps):
        starts = torch.randint(len(train) - LENGTH, (16, 1), generator=generator)
        ids, labels = masked(train[starts + torch.arange(LENGTH)], generator)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def perplexity(model, text: torch.Tensor, length: int) -> float:
    """Of the same masked bytes at every length."""
    ids, labels = masked(text[:TOKENS], torch.Generator().manual_seed(0))
    rows = zip(ids.view(-1, length).split(4), labels.view(-1, length).split(4), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=x).logits.flatten(0, 1), y.flatten(), reduction="sum"
        )
        for x, y in rows
    ]
    return math.exp(torch.stack(losses).sum() / (labels >= 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    train, held_out = texts()
    print("| attention | seed | " + " | ".join(map(str, LENGTHS)) + " |", flush=True)
    for seed in range(arguments.seeds):
        for name, attention in ATTENTIONS.items():
            model = trained(attention, train, arguments.steps, seed)
            found = [perplexity(model, held_out, length) for length in LENGTHS]
            cells = " | ".join(f"{x:.2f}" for x in found)
            print(f"| {name} | {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
