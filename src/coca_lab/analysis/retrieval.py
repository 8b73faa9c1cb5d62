"""Where the attention of a retrieved answer goes: from a model and passkey prompts to JSON values.

Legend: H query heads, M queries (those that predict the key's digits), T length, n visible keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_lab.analysis.capture import LayerAttention, visit_attention
from coca_lab.data.passkey import (
    ANSWER,
    KEY_LINE,
    draw_key,
    encoder,
    leading_special_tokens,
    passkey_text,
)
from coca_lab.intervals import mean_interval

BY_DIGIT = ("peak_distance", "log_keys")
"""Statistics of which the values of single digits count."""


@dataclass
class RetrievalSettings:
    """Which passkey prompts to read."""

    passkeys: list[PositiveInt] = field(default_factory=list)
    """Lengths of passkey prompts in tokens: measures where the attention of their answers goes,
    instead of the angles on a text."""
    prompts: PositiveInt = 10
    """Passkey prompts per length, the same as those of coca eval passkey."""
    near: PositiveInt = 32
    """Nearest tokens, the query's own included, whose share of the attention is measured."""
    seed: NonNegativeInt = 0
    """Random seed."""


@dataclass(frozen=True)
class Retrieval:
    """A passkey prompt with its answer.

    Attributes:
        ids: Token ids of prompt and answer, (T,).
        rows: Positions whose next token is a digit of the key in the answer, (M,).
        fact: First and last position, exclusive, of the line that states the key.
        copies: For every row the positions in that line of the digit to predict, (M, 2).
        facts: ``index``, ``key``, ``depth``, ``distance``: the prompt's fields in JSON.
    """

    ids: Tensor
    rows: Tensor
    fact: tuple[int, int]
    copies: Tensor
    facts: dict[str, Any]


def retrievals(
    tokenizer: PreTrainedTokenizerBase, settings: RetrievalSettings, length: int
) -> list[Retrieval]:
    """The prompts of one length with their right answers; the seed determines them.

    Raises:
        UserError: If the length is too short, or the tokenizer splits the key differently in the
            text and in the answer.
    """
    encode, before = encoder(tokenizer), leading_special_tokens(tokenizer)

    def with_digits(ids: list[int]) -> list[int]:
        return [i for i, token in enumerate(ids) if any(map(str.isdigit, tokenizer.decode(token)))]

    found = []
    for index in range(settings.prompts):
        key, depth = draw_key(np.random.default_rng([settings.seed, length, index]))
        text = passkey_text(encode, key, length, depth, before=before)
        line, answer = encode(KEY_LINE.format(key=key)), encode(ANSWER.format(key=key))
        end, digits, answered = (
            length - text.facts["distance"],
            with_digits(line),
            with_digits(answer),
        )
        if [line[i] for i in digits] != 2 * [answer[i] for i in answered]:
            raise UserError(
                f"the tokenizer splits the key {key} differently in the text and in the answer, "
                "so its digits cannot be compared"
            )
        copies = torch.tensor(digits).view(2, -1).T + end - len(line)
        facts = {"index": index, "key": key, **text.facts}
        ids, rows = torch.tensor([*text.ids, *answer]), torch.tensor(answered) + length - 1
        found.append(Retrieval(ids, rows, (end - len(line), end), copies, facts))
    return found


def head_statistics(
    seen: LayerAttention, prompt: Retrieval, near: int, trained: int | None
) -> dict[str, Tensor]:
    """Statistics of every head and query, each (H, M); described in docs/analysis.md."""
    weights, rows = seen.weights, prompt.rows
    keys = torch.arange(weights.shape[-1])
    distances = rows.unsqueeze(-1) - keys
    inside = (keys >= prompt.fact[0]) & (keys < prompt.fact[1])
    peak, place = weights.masked_fill(inside, 0.0).max(-1)
    copies = prompt.copies.expand(weights.shape[0], -1, -1)
    found = {
        "fact": weights[..., inside].sum(-1),
        "digit": weights.gather(-1, copies).sum(-1),
        "before_digit": weights.gather(-1, copies - 1).sum(-1),
        "near": (weights * (distances < near)).sum(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "log_keys": seen.visible.double().log(),
        "peak": peak,
        "peak_distance": (rows - place).double(),
    }
    if trained is not None:
        found["trained"] = (weights * (distances < trained)).sum(-1)
    return found


def analyze_retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RetrievalSettings,
    progress: Callable[[str, int, int], Any] | None = None,
    *,
    name: str = "model",
) -> list[dict[str, Any]]:
    """Where the attention of the positions that predict a passkey's digits goes.

    docs/analysis.md describes what is measured. The right answer follows every prompt, so each
    prompt is read once; memory is linear in its length, beyond what the model itself needs.

    Args:
        model: A causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        settings: Lengths and number of prompts.
        progress: Called with a label, the tokens read so far and the tokens to read.
        name: Name of the model in the result.

    Returns:
        One cell per length: plain JSON values.

    Raises:
        UserError: If a prompt does not fit, or the model's attention cannot be read.
    """
    prompts = prompts_by_length(tokenizer, settings)
    total, done = sum(prompts) * settings.prompts, 0
    cells = []
    for length, asked in prompts.items():
        records = []
        for prompt in asked:
            records.append(read_prompt(model, prompt, settings))
            done += length
            if progress is not None:
                progress(f"{name} attention {length}", done, total)
        cells.append(retrieval_cell(model, settings, length, records, name))
    return cells


def prompts_by_length(
    tokenizer: PreTrainedTokenizerBase, settings: RetrievalSettings
) -> dict[int, list[Retrieval]]:
    """The prompts that `analyze_retrieval` reads; errors as `retrievals`."""
    return {length: retrievals(tokenizer, settings, length) for length in settings.passkeys}


def read_prompt(
    model: PreTrainedModel, prompt: Retrieval, settings: RetrievalSettings
) -> dict[str, Any]:
    """Read one prompt: the ``sample`` of the cell, and for each of its ``layers`` statistics.

    Each is (H,), the mean over the digits, which are not independent; but (H, M) `BY_DIGIT`.
    """
    trained = training_length(model.config.get_text_config())
    layers = []

    def visit(seen: LayerAttention) -> None:
        found = head_statistics(seen, prompt, settings.near, trained)
        means = {n: (x if n in BY_DIGIT else x.mean(-1)).tolist() for n, x in found.items()}
        about = {"layer": seen.layer, "attention": seen.attention, "window": seen.window}
        layers.append(about | {"statistics": means})

    ids, rows = prompt.ids.unsqueeze(0), prompt.rows
    output = visit_attention(model, ids, rows, visit, logits_to_keep=rows.to(model.device))
    right = output.logits[0].argmax(-1).cpu() == prompt.ids[rows + 1]
    sample = {**prompt.facts, "digits_right": right.double().mean().item()}
    return {"sample": sample, "layers": layers}


def retrieval_cell(
    model: PreTrainedModel,
    settings: RetrievalSettings,
    length: int,
    records: Sequence[dict[str, Any]],
    name: str,
) -> dict[str, Any]:
    """The result for one length, from what `read_prompt` found in every prompt, in order."""
    samples = [record["sample"] for record in records]
    by_layer = zip(*(record["layers"] for record in records), strict=True)
    layers = sorted(map(_layer_values, by_layer), key=lambda layer: layer["layer"])
    return {
        "task": "attention",
        "model": name,
        "training_length": training_length(model.config.get_text_config()),
        "length": length,
        "prompts": settings.prompts,
        "near": settings.near,
        "seed": settings.seed,
        "digits_right": _mean([sample["digits_right"] for sample in samples]),
        "layers": layers,
        "samples": samples,
    }


def _layer_values(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A layer's part of the result, from its part of the records."""
    facts, statistics = dict(records[0]), [record["statistics"] for record in records]
    del facts["statistics"]
    means = {name: [x[name] for x in statistics] for name in statistics[0] if name not in BY_DIGIT}
    # (H, digits): a tokenizer may split keys into different numbers of tokens.
    distances, log_keys = (np.concatenate([x[name] for x in statistics], -1) for name in BY_DIGIT)
    heads = [
        {
            name: _mean([x[head] for x in rows], is_share=name != "entropy")
            for name, rows in means.items()
        }
        | {"peak_distance": float(np.median(distances[head]))}
        for head in range(len(distances))
    ]
    return {**facts, "log_keys": float(log_keys.mean()), "heads": heads}


def _mean(values: list[float], *, is_share: bool = True) -> dict[str, Any]:
    """Mean over prompts with its interval; that of shares ends where shares do."""
    interval = mean_interval(values)
    if interval is not None and is_share:
        interval = max(0.0, interval[0]), min(1.0, interval[1])
    return {"mean": sum(values) / len(values), "interval95": interval}
