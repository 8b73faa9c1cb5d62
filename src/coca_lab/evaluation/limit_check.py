"""Which limit of distances a model bears: what ``coca convert --form rope --check`` measures.

A limit W below the training length L may help beyond L, and may lose what a model finds by rotary
distance within L. So both are measured, for the model as it is and for a few W.
"""

import math
from dataclasses import dataclass, field, replace

from pydantic import PositiveInt

from coca_attention.errors import UserError
from coca_attention.models.configuration import rope_parameters
from coca_attention.models.conversion import convert
from coca_lab.data.documents import BadLines
from coca_lab.engine import Engine
from coca_lab.evaluation.perplexity import (
    TextSettings,
    WindowSettings,
    load_text,
    measure_windows,
    tokens_needed,
)
from coca_lab.evaluation.retrieval import PasskeySettings, measure_passkeys
from coca_lab.evaluation.task import Model, RotaryScaling, finish
from coca_lab.intervals import DocumentScore, paired_ratio_interval, perplexity

SHARES = (1.0, 0.75, 0.5, 0.25)
"""The limits that are tried, as shares of L."""
DOCUMENTS = 20
ANSWER = 32
"""Tokens of an answer at most; prompt and answer together have the length that is asked for."""
RULE = (
    "A limit loses perplexity within L if the 95 % interval of its ratio to the base's, paired by "
    "document, lies above 1, and passkeys if it finds fewer than the base at a length of up to L."
)


@dataclass
class LimitCheckSettings:
    """How form rope chooses its limit of distances by measuring."""

    check: str = ""
    """Text on which to measure perplexity, and passkeys found, before and after limiting distances
    to L, 3L/4, L/2 and L/4, for L the training length: stdlib; a file, folder or glob of .txt,
    .jsonl or .parquet; or hf:NAME. Of the limits that lose nothing within L, the one that finds
    most beyond it is taken."""
    check_lengths: list[int] = field(default_factory=list)
    """Lengths of text to measure at beside L; by default 2L and 4L."""
    check_samples: PositiveInt = 50
    """Passkey prompts of every length."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""


@dataclass(frozen=True)
class Measured:
    """What a model does with one limit W, None for the model as it was, by length in tokens."""

    max_distance: int | None
    scores: dict[int, list[DocumentScore]]
    """Nats are infinite where they overflow."""
    hits: dict[int, int]
    """Passkeys found."""

    def lost(self, base: "Measured", length: int) -> list[str]:
        """What is lost in texts of up to L tokens (`RULE`): perplexity, passkeys, or nothing."""
        if self.max_distance == length:
            return []  # the same function there: what differs is rounding
        within = [n for n in base.hits if n <= length]
        worse = any(_is_worse(self.scores[n], base.scores[n]) for n in within)
        fewer = any(self.hits[n] < base.hits[n] for n in within)
        return [*["perplexity"] * worse, *["passkeys"] * fewer]


def _is_worse(scores: list[DocumentScore], base: list[DocumentScore]) -> bool:
    interval = paired_ratio_interval(scores, base)
    if interval is None:  # one document
        return sum(s.nats for s in scores) > sum(s.nats for s in base)
    return interval[0] > 1


@dataclass(frozen=True)
class LimitCheck:
    """Measurements of a model as it was, and with every limit, the first of which is L."""

    length: int
    base: Measured
    limited: list[Measured]
    about: str

    @property
    def finds_passkeys(self) -> bool:
        """Whether the base finds a passkey within L, so that one could be lost."""
        return any(hits for n, hits in self.base.hits.items() if n <= self.length)

    @property
    def warning(self) -> str:
        """What the check could not measure, or nothing."""
        if self.finds_passkeys:
            return ""
        return (
            f"The model finds no passkey in texts of up to L = {self.length:,} tokens, so none "
            "could be lost: half of the check was empty, and W = L, which changes nothing there, "
            "was chosen."
        )

    @property
    def chosen(self) -> Measured:
        """Of those that lose nothing within L the one that finds most passkeys beyond."""
        # Of equals that with the lowest perplexity there, and L where no passkey could be lost.
        if not self.finds_passkeys:
            return self.limited[0]
        beyond = [n for n in self.base.hits if n > self.length]

        def gain(each: Measured) -> tuple[int, float]:
            nats = sum(math.log(perplexity(each.scores[n])) for n in beyond)
            return sum(each.hits[n] for n in beyond), -nats

        return max((m for m in self.limited if not m.lost(self.base, self.length)), key=gain)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: the base, then every limit with what it loses within L."""
        lengths, chosen = list(self.base.hits), self.chosen
        shown = [f"{n:,}" for n in lengths]
        columns = [f"perplexity {shown[0]}", *shown[1:], f"passkeys {shown[0]}", *shown[1:]]
        nothing = "nothing" if self.finds_passkeys else "nothing; no passkey to lose"
        rows = []
        for each in (self.base, *self.limited):
            label = "base" if each is self.base else f"W = {each.max_distance:,}"
            lost = ", ".join(each.lost(self.base, self.length)) or nothing
            rows.append(
                [
                    f"{label} (chosen)" if each is chosen else label,
                    *(f"{perplexity(each.scores[n]):.2f}" for n in lengths),
                    *(f"{each.hits[n]}" for n in lengths),
                    "" if each is self.base else lost,
                ]
            )
        return ["", *columns, "lost"], rows

    def markdown(self) -> str:
        """The check as a paragraph and a table."""
        header, rows = self.table()
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        text = " ".join(filter(None, [f"{self.about}.", RULE, self.warning]))
        return f"L = {self.length:,} tokens. {text}\n\n{table}"


def check_limits(
    model: Model, settings: LimitCheckSettings, engine: Engine, *, length: int
) -> LimitCheck:
    """Measure a rotary model as it is and with distances limited, which converts it in place."""
    lengths = sorted({length, *(settings.check_lengths or (2 * length, 4 * length))})
    if lengths[0] <= ANSWER:
        raise UserError(f"check_lengths must be more than {ANSWER} tokens, got {lengths[0]}")
    windows = WindowSettings(windows=lengths)
    chosen = TextSettings(
        source=settings.check,
        text_field=settings.text_field,
        bad_lines=settings.bad_lines,
        max_documents=DOCUMENTS,
        max_tokens=lengths[-1] + length,
        skip_short=True,
    )
    documents = load_text(chosen, model.tokenizer, at_least=tokens_needed(windows))
    prompts = PasskeySettings(
        [n - ANSWER for n in lengths], settings.check_samples, max_new_tokens=ANSWER
    )

    def measured(limit: int | None) -> Measured:
        name = "base"
        if limit is not None:
            name = f"W = {limit:,}"
            rope_parameters(model.module.config.get_text_config())["max_distance"] = limit
        named = replace(model, name=name, identity=name)
        read = measure_windows(named, documents, windows, RotaryScaling())
        cells = finish([*read, *measure_passkeys(named, prompts, RotaryScaling())], engine)
        scores = ([*map(DocumentScore.of, cell["documents"])] for cell in cells[: len(lengths)])
        hits = (sum(sample["hit"] for sample in cell["samples"]) for cell in cells[len(lengths) :])
        return Measured(
            limit, dict(zip(lengths, scores, strict=True)), dict(zip(lengths, hits, strict=True))
        )

    base = measured(None)
    convert(model.module, "rope", max_distance=length, length=length)
    limited = [measured(max(1, round(share * length))) for share in SHARES]
    tokens = sum(score.tokens for score in base.scores[length])
    about = (
        f"Measured on {tokens:,} tokens of {len(documents)} documents, the same at every length, "
        f"and {settings.check_samples} passkey prompts of each"
    )
    return LimitCheck(length, base, limited, about)
