"""Greedy answers to prompts of one length, and the statistics of right and wrong."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.evaluation.journal import Journal
from coca_attention.models import set_rotary_scaling, training_length


@dataclass
class GenerationSettings:
    """How prompts are answered."""

    max_new_tokens: int = 64
    """Tokens that the model may answer."""
    batch_tokens: int = 16384
    """Prompt tokens read at once, at least one prompt."""
    use_cache: bool = True
    """Whether keys and values are kept while answering; the result is the same."""


@contextmanager
def rotary_scaling_for(
    model: PreTrainedModel, kind: str, factor: float, length: int
) -> Iterator[dict[str, Any] | None]:
    """A model scaled for texts of a length, and as it was loaded afterwards.

    Args:
        model: The model.
        kind: ``none`` leaves it as it was loaded; ``ntk`` fixes the base from the length.
        factor: The scaling's factor.
        length: Tokens of the texts, generated ones included.

    Yields:
        The rotary parameters in force.
    """
    config = model.config.get_text_config()
    as_loaded = getattr(config, "rope_parameters", None)
    try:
        if kind != "none":
            target = max(length, training_length(config) or 0) if kind == "ntk" else None
            set_rotary_scaling(model, kind, factor=factor, length=target)  # pyright: ignore
        yield getattr(config, "rope_parameters", None)
    finally:
        if kind != "none":
            config.rope_parameters = as_loaded


@contextmanager
def naming_the_limit(model: Any, tokens: int) -> Iterator[None]:
    """Say so where a model's code cannot read so many tokens at once."""
    try:
        yield
    except IndexError as error:
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        raise UserError(
            f"the model cannot read {tokens} tokens at once ({error}); its configuration says "
            f"max_position_embeddings {limit}: use shorter texts"
        ) from error


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Tensor,
    *,
    max_new_tokens: int,
    use_cache: bool = True,
) -> list[str]:
    """The likeliest continuation of every prompt, up to the end of text.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: (B, T), without padding.
        max_new_tokens: Tokens of an answer at most.
        use_cache: Whether keys and values are kept.

    Returns:
        B texts, special tokens left out.

    Raises:
        UserError: If the model cannot read so many tokens.
    """
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = ends if ends is not None else tokenizer.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad if pad is not None else 0,
        use_cache=use_cache,
    )
    generate: Any = model.generate
    prompts = prompts.to(model.device)
    with torch.inference_mode(), naming_the_limit(model, prompts.shape[1] + max_new_tokens):
        output = generate(
            prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
        )
    return tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what its record says of it before it is answered.

    Attributes:
        ids: Token ids.
        facts: JSON values; ``index`` tells it from the other prompts of its kind and length.
    """

    ids: list[int]
    facts: dict[str, Any]


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    judge: Callable[[str, Prompt], dict[str, Any]],
    settings: GenerationSettings,
    *,
    about: dict[str, Any],
    journal: Journal,
    progress: Callable[[int, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Records of all prompts: facts, output and what the judge says; finished ones are not redone.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: Prompts of one length.
        judge: From an answer and its prompt to further fields of the record.
        settings: Answer length and batches.
        about: What the answers depend on besides the prompt's index.
        journal: Where records are kept.
        progress: Called with the prompts done and the prompts to do.
    """
    records = {p.facts["index"]: journal.get([about, p.facts["index"]]) for p in prompts}
    missing = [p for p in prompts if records[p.facts["index"]] is None]
    size = max(1, settings.batch_tokens // len(prompts[0].ids))
    for start in range(0, len(missing), size):
        batch = missing[start : start + size]
        answers = greedy_answers(
            model,
            tokenizer,
            torch.tensor([prompt.ids for prompt in batch]),
            max_new_tokens=settings.max_new_tokens,
            use_cache=settings.use_cache,
        )
        for prompt, answer in zip(batch, answers, strict=True):
            index = prompt.facts["index"]
            records[index] = {**prompt.facts, "output": answer, **judge(answer, prompt)}
            journal.put([about, index], records[index])
        if progress is not None:
            progress(len(prompts) - len(missing) + start + len(batch), len(prompts))
    if not missing and progress is not None:
        progress(len(prompts), len(prompts))
    return [records[prompt.facts["index"]] for prompt in prompts]


def answered_cell(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    judge: Callable[[str, Prompt], dict[str, Any]],
    settings: GenerationSettings,
    asked: dict[str, Any],
    *,
    scaling: str,
    factor: float,
    name: str,
    identity: str,
    journal: Journal | None,
    progress: Callable[[str, int, int], Any] | None,
) -> dict[str, Any]:
    """The cell of one model, scaling and kind of prompt, but for its statistics.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: Prompts of one length.
        judge: From an answer and its prompt to further fields of its record.
        settings: Answer length and batches.
        asked: What tells these prompts from others (task, length, seed, …): fields of the cell.
        scaling: Rotary scaling; ``ntk`` fixes the base from prompt and answer, ``none`` leaves
            the model as it was loaded.
        factor: The scaling's factor.
        name: What the results call the model.
        identity: What tells the model from others in the journal (`fingerprint`).
        journal: Where finished samples are kept, and found again.
        progress: Called with a label, the samples done and the samples to do.

    Returns:
        Plain JSON values, the record of every prompt under ``samples``.

    Raises:
        UserError: If the model cannot be scaled so or read so many tokens.
    """
    started = time.perf_counter()
    applied = float(factor) if scaling != "none" else None
    asked = {**asked, "max_new_tokens": settings.max_new_tokens}
    length = len(prompts[0].ids)
    label = f"{name} {scaling} {asked.get('kind', asked['task'])} {length}"
    with rotary_scaling_for(model, scaling, factor, length + settings.max_new_tokens) as rope:
        records = answer_prompts(
            model,
            tokenizer,
            prompts,
            judge,
            settings,
            about={**asked, "model": identity or name, "scaling": [scaling, applied]},
            journal=journal if journal is not None else Journal(),
            progress=partial(progress, label) if progress is not None else None,
        )
    return {
        **asked,
        "model": name,
        "training_length": training_length(model.config.get_text_config()),
        "scaling": scaling,
        "factor": applied,
        "rope_parameters": rope,
        "seconds": round(time.perf_counter() - started, 3),
        "samples": records,
    }


def wilson_interval(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float] | None:
    """Wilson's score interval of a share (95 % by default); None without trials.

    Unlike the normal interval it holds for shares near 0 and 1, and for few trials.
    """
    if trials == 0:
        return None
    share, square = hits / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    high = 1.0 if hits == trials else min(1.0, middle + half)
    return low, high
