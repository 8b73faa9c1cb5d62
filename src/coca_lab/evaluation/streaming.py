"""Endless text in constant memory: perplexity, speed and memory by position."""

import hashlib
import math
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_attention.models.streaming import streaming
from coca_lab.data import SourceSettings, held_out, token_array
from coca_lab.engine import Item
from coca_lab.environment import resident_megabytes
from coca_lab.evaluation.task import Cell, Part, Session, Subject, Task, check_at_least
from coca_lab.generation import rotary_scaling_for
from coca_lab.settings import PIECE, check_sizes


@dataclass
class StreamingSettings(SourceSettings):
    """Which text to read, and what stays in sight."""

    held_out: float = 0.0
    """Read only this held-out share of the documents: the one that a recipe with the same value
    leaves out of training."""
    tokens: int = 100_000
    """Tokens to read; the documents follow one another, each with its end of text."""
    window: int | None = None
    """Last tokens in sight, the newest included; by default the training length without sinks."""
    sinks: int = 4
    """First tokens of the text that stay in sight."""
    piece: int = PIECE
    """Tokens of a pass, which does not change the perplexity; 1 is the speed of generating."""
    ranges: int = 10
    """Ranges of positions to report."""


def check_settings(settings: StreamingSettings) -> None:
    """Raise UserError unless the numbers are in range."""
    check_sizes(settings.window or 1, settings.sinks)
    check_at_least(settings, 1, "window", "piece", "ranges")
    check_at_least(settings, settings.ranges + 1, "tokens")
    if not 0 <= settings.held_out <= 1:
        raise UserError(f"held_out must lie between 0 and 1, got {settings.held_out}")


def load_stream(settings: StreamingSettings, subject: Subject) -> Tensor:
    """Token ids (tokens + 1,), int64: the first one is not scored.

    Raises:
        UserError: If the source has fewer.
    """
    documents, wanted = settings.documents(), settings.tokens + 1
    if settings.held_out:
        documents = (d for d in documents if held_out(d, settings.held_out))
    found = token_array(documents, subject.tokenizer, max_tokens=wanted)
    if len(found) < wanted:
        raise UserError(
            f"{settings.source} has {len(found)} tokens and --tokens {settings.tokens} needs "
            f"{wanted}: give more text, or read fewer"
        )
    return torch.from_numpy(found.astype("int64"))


def window_of(subject: Subject, settings: StreamingSettings) -> int:
    """The window of the settings, or the model's training length without the sinks.

    Raises:
        UserError: If the model does not say its training length.
    """
    if settings.window is not None:
        return settings.window
    trained = training_length(subject.model.config.get_text_config())
    if trained is None or trained <= settings.sinks:
        raise UserError("the model does not say its training length: set --window")
    return trained - settings.sinks


def evaluate_streaming(
    subject: Subject, tokens: Tensor, settings: StreamingSettings, session: Session
) -> Cell:
    """Read one text from beginning to end, in constant memory.

    Args:
        subject: The model.
        tokens: (tokens + 1,).
        settings: What stays in sight.
        session: Rotary scaling and engine. ``ntk`` computes the base from window and sinks
            together.

    Returns:
        One cell. ``by_position`` has nats, tokens, tokens per second and memory in MB (of the
        process, or on its GPU) by range.

    Raises:
        UserError: If the model cannot be streamed, or returns NaN or infinity.
    """
    (cell,) = session.finish([_part(subject, tokens, settings, session)])
    return cell


def _part(subject: Subject, tokens: Tensor, settings: StreamingSettings, session: Session) -> Part:
    """The work of `evaluate_streaming`, one item."""
    window, factor, total = window_of(subject, settings), session.applied_factor, len(tokens) - 1
    with streaming(subject.model, window=window, sinks=settings.sinks):
        pass  # UserError if it cannot be
    scaled = (session.scaling, session.factor, window + settings.sinks)
    key = {
        "task": "streaming",
        "model": subject.identity,
        "scaling": [session.scaling, factor],
        "settings": {**asdict(settings), "window": window},
        "text": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
    }

    def work(_: list[Any]) -> list[Cell]:
        model = subject.loaded()
        with rotary_scaling_for(model, *scaled) as rope:
            ranges, size = _read(model, tokens, settings, window)
        return [
            {
                "task": "streaming",
                **subject.facts,
                "scaling": session.scaling,
                "factor": factor,
                "rope_parameters": rope,
                **key["settings"],
                "perplexity": math.exp(sum(r["nats"] for r in ranges) / total),
                "cache_megabytes": size,
                "by_position": ranges,
            }
        ]

    label = f"{subject.name} {session.scaling} streaming"
    item = Item([key], work, [None], total, label=label, group=subject.name)
    return Part([item], lambda values, seconds: [{**values[0], **subject.facts}])


def _read(
    model: Any, tokens: Tensor, settings: StreamingSettings, window: int
) -> tuple[list[Cell], float]:
    """Nats, speed and memory by range of positions, and the size of the cache in MB."""
    total, device, ranges = len(tokens) - 1, model.device, []
    edges = [round(total * i / settings.ranges) for i in range(settings.ranges + 1)]
    with (
        streaming(model, window=window, sinks=settings.sinks) as cache,
        torch.inference_mode(),
    ):
        for first, last in pairwise(edges):
            started, nats = time.perf_counter(), 0.0
            for start in range(first, last, settings.piece):
                stop = min(start + settings.piece, last)
                ids = tokens[start:stop].unsqueeze(0).to(device)
                logits = model(input_ids=ids, past_key_values=cache).logits[0]
                targets = tokens[start + 1 : stop + 1].to(device)
                nats += F.cross_entropy(logits.float(), targets, reduction="sum").item()
            if not math.isfinite(nats):
                raise UserError(
                    f"the model returns NaN or infinity between tokens {first} and {last}: its "
                    "weights are damaged, or its precision overflows (try float32)"
                )
            seconds = time.perf_counter() - started
            gpu = device.type == "cuda"
            memory = torch.cuda.memory_reserved(device) / 1e6 if gpu else resident_megabytes()
            ranges.append(
                {
                    "first": first + 1,
                    "last": last,
                    "nats": nats,
                    "tokens": last - first,
                    "tokens_per_second": round((last - first) / seconds, 1),
                    "megabytes": round(memory, 1),
                }
            )
        return ranges, cache.nbytes / 1e6


def _parts(subject: Subject, settings: StreamingSettings, session: Session) -> list[Part]:
    tokens = subject.cached(f"stream {settings}", lambda: load_stream(settings, subject))
    return [_part(subject, tokens, settings, session)]


TASK = Task(
    "streaming",
    "Perplexity, speed and memory over one endless text, of which a window stays in sight.",
    StreamingSettings,
    check=check_settings,
    parts=_parts,
)
