"""Endless text in constant memory: perplexity, speed and memory by position."""

import hashlib
import math
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from coca_attention.errors import UserError
from coca_lab.data import SourceSettings, held_out
from coca_lab.environment import resident_megabytes
from coca_lab.evaluation.task import Cell, Session, Subject, Task, check_at_least
from coca_lab.settings import PIECE, check_sizes

if TYPE_CHECKING:
    from torch import Tensor


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


def load_stream(settings: StreamingSettings, subject: Subject) -> "Tensor":
    """Token ids (tokens + 1,), int64: the first one is not scored.

    Raises:
        UserError: If the source has fewer.
    """
    import torch

    from coca_lab.data import token_array

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
    from coca_attention.models import training_length

    if settings.window is not None:
        return settings.window
    trained = training_length(subject.model.config.get_text_config())
    if trained is None or trained <= settings.sinks:
        raise UserError("the model does not say its training length: set --window")
    return trained - settings.sinks


def evaluate_streaming(
    subject: Subject, tokens: "Tensor", settings: StreamingSettings, session: Session
) -> Cell:
    """Read one text from beginning to end, in constant memory.

    Args:
        subject: The model.
        tokens: (tokens + 1,).
        settings: What stays in sight.
        session: Rotary scaling, journal and progress. ``ntk`` computes the base from window and
            sinks together.

    Returns:
        One cell. ``by_position`` has nats, tokens, tokens per second and memory in MB (of the
        process, or on its GPU) by range.

    Raises:
        UserError: If the model cannot be streamed, or returns NaN or infinity.
    """
    import torch
    import torch.nn.functional as F

    from coca_attention.models.streaming import streaming
    from coca_lab.generation import rotary_scaling_for

    sinks, window = settings.sinks, window_of(subject, settings)
    factor, total = session.applied_factor, len(tokens) - 1
    label = f"{subject.name} {session.scaling} streaming"
    about = {**asdict(settings), "window": window}
    key = {
        "task": "streaming",
        "model": subject.identity,
        "scaling": [session.scaling, factor],
        "settings": about,
        "text": _hash(tokens),
    }
    stored = session.journal.get(key)
    if stored is not None:
        session.progress(label, total, total)
        return {**stored, **subject.facts}
    edges = [round(total * i / settings.ranges) for i in range(settings.ranges + 1)]
    ranges = []
    with (
        rotary_scaling_for(subject.model, session.scaling, session.factor, window + sinks) as rope,
        streaming(subject.model, window=window, sinks=sinks) as cache,
        torch.inference_mode(),
    ):
        device = subject.model.device
        for first, last in pairwise(edges):
            started, nats = time.perf_counter(), 0.0
            for start in range(first, last, settings.piece):
                stop = min(start + settings.piece, last)
                logits = subject.model(
                    input_ids=tokens[start:stop].unsqueeze(0).to(device), past_key_values=cache
                ).logits[0]
                targets = tokens[start + 1 : stop + 1].to(device)
                nats += F.cross_entropy(logits.float(), targets, reduction="sum").item()
                session.progress(label, stop, total)
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
    mean = sum(r["nats"] for r in ranges) / total
    cell = {
        "task": "streaming",
        **subject.facts,
        "scaling": session.scaling,
        "factor": factor,
        "rope_parameters": rope,
        **about,
        "perplexity": math.exp(mean),
        "cache_megabytes": cache.nbytes / 1e6,
        "by_position": ranges,
    }
    session.journal.put(key, cell)
    return cell


def _tokens(subject: Subject, settings: StreamingSettings) -> "Tensor":
    return subject.cached(f"stream {settings}", lambda: load_stream(settings, subject))


def _hash(tokens: "Tensor") -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _prepare(subject: Subject, settings: StreamingSettings) -> None:
    from coca_attention.models.streaming import streaming

    with streaming(subject.model, window=window_of(subject, settings), sinks=settings.sinks):
        _tokens(subject, settings)


def _evaluate(subject: Subject, settings: StreamingSettings, session: Session) -> list[Cell]:
    tokens = _tokens(subject, settings)
    return [evaluate_streaming(subject, tokens, settings, session)]


TASK = Task(
    "streaming",
    "Perplexity, speed and memory over one endless text, of which a window stays in sight.",
    StreamingSettings,
    _evaluate,
    check_settings,
    lambda settings: [settings.tokens],
    _prepare,
    depends=lambda subject, settings: _hash(_tokens(subject, settings)),
)
