"""Which way to extend a model's context is best: what ``coca extend --check`` measures.

A method may help beyond the training length L, and lose within it. So both are measured, for the
model as it is and for every method.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import PositiveInt
from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.models import convert
from coca_attention.models.configuration import rope_parameters
from coca_attention.models.extension import Method, extended
from coca_lab.data.documents import BadLines
from coca_lab.engine import Engine, Item
from coca_lab.environment import peak_growth
from coca_lab.evaluation import perplexity
from coca_lab.evaluation.perplexity import PerplexitySettings, read_text
from coca_lab.evaluation.retrieval import PASSKEYS, PasskeySettings
from coca_lab.evaluation.task import Cell, Measurement, Model, RotaryScaling, Task, finish
from coca_lab.intervals import DocumentScore, paired_ratio_interval
from coca_lab.intervals import perplexity as perplexity_of

SHARES = (1.0, 0.5, 0.25)
"""The limits of distances that are tried, as shares of L."""
ANSWER = 32
"""Tokens of an answer at most; prompt and answer together have the length that is asked for."""
STOCK = "Transformers, vLLM, SGLang, llama.cpp"
"""Other engines compute no limited distances, and vLLM reads ``dynamic`` as another function."""
RULE = (
    "In parentheses the change from the base's perplexity at L, on the same tokens, with its 95 % "
    "interval over documents. A method loses perplexity within L if that interval lies above 0 "
    "there, and passkeys if it finds fewer than the base; of those that lose nothing the one that "
    "finds most passkeys beyond L is taken, of equals that with the lowest perplexity there."
)


@dataclass
class CheckSettings:
    """What the methods are measured on."""

    check: str = ""
    """Text on which to measure perplexity and passkeys found before and after, by every method:
    stdlib; a file, folder or glob of .txt, .jsonl or .parquet; or hf:NAME. Of the methods that lose
    nothing within L, the one that finds most beyond it is taken."""
    check_lengths: list[PositiveInt] = field(default_factory=list)
    """Lengths of text to measure at beside L; by default 2 L, 4 L, … up to --to."""
    check_documents: PositiveInt = 20
    """Documents to read, of at least the largest length."""
    check_samples: PositiveInt = 20
    """Passkey prompts of every length."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""


class Candidate(RotaryScaling):
    """A way to read a model, ``base`` as it is or extended by a method, as tasks apply it.

    Attributes:
        method: ``base``, or how it is extended.
        max_distance: W, with method limited.
        length: L, in tokens.
        to: The longest text that is to be read, in tokens.
    """

    def __init__(
        self, method: str = "base", max_distance: int | None = None, length: int = 0, to: int = 0
    ) -> None:
        super().__init__()
        self.method, self.max_distance, self.length, self.to = method, max_distance, length, to

    @property
    def label(self) -> str:
        """The method, and its limit."""
        return self.method + (f", W = {self.max_distance:,}" if self.max_distance else "")

    @property
    def engines(self) -> str:
        """What runs a model that is extended like this."""
        return STOCK if self.method in ("base", "yarn", "ntk") else "Transformers"

    def is_base_within(self, length: int) -> bool:
        """Whether the model computes in texts of up to L tokens what it does as it is."""
        return self.method == "dynamic" or self.max_distance == length

    @property
    def facts(self) -> Cell:
        """What a value depends on beside the model."""
        return {"scaling": self.label, "length": self.length, "to": self.to}

    @property
    def words(self) -> list[str]:
        """What a line of progress says about it."""
        return [self.label]

    @contextmanager
    def applied(self, module: PreTrainedModel, length: int) -> Iterator[None]:
        """The model as the method has it; one whose distances are limited stays converted."""
        method: Any = self.method
        if method == "limited":
            if not hasattr(module.config.get_text_config(), "coca_form"):
                convert(module, "rope", length=self.length)
            rope = rope_parameters(module.config.get_text_config())
            rope["max_distance"] = self.max_distance
        changes = method not in ("base", "limited")
        with extended(module, method, length=self.length, to=self.to) if changes else nullcontext():
            yield

    def parameters(self, module: PreTrainedModel, length: int) -> None:
        """None: cells of a check do not name them."""


@dataclass(frozen=True)
class Measured:
    """What a model does with one candidate, by length in tokens."""

    candidate: Candidate
    scores: dict[int, list[DocumentScore]]
    """Nats are infinite where they overflow."""
    hits: dict[int, int]
    """Passkeys found."""
    seconds: float = 0.0
    """Time to read a text of the largest length."""
    megabytes: float = 0.0
    """Memory that this takes beside the weights."""

    def lost(self, base: "Measured", length: int) -> list[str]:
        """What is lost in texts of up to L tokens (`RULE`): perplexity, passkeys, or nothing."""
        if self.candidate.is_base_within(length):
            return []
        within = [n for n in base.hits if n <= length]
        worse = any(_is_worse(self.scores[n], base.scores[n]) for n in within)
        fewer = any(self.hits[n] < base.hits[n] for n in within)
        return [*["perplexity"] * worse, *["passkeys"] * fewer]

    def gain(self, lengths: Sequence[int]) -> tuple[int, float]:
        """What is found in texts of some lengths: more passkeys, then less perplexity, is more."""
        nats = sum(math.log(perplexity_of(self.scores[n])) for n in lengths)
        return sum(self.hits[n] for n in lengths), -nats


def _is_worse(scores: list[DocumentScore], base: list[DocumentScore]) -> bool:
    interval = paired_ratio_interval(scores, base)
    if interval is None:  # one document
        return sum(s.nats for s in scores) > sum(s.nats for s in base)
    return interval[0] > 1


@dataclass(frozen=True)
class Check:
    """Measurements of a model as it is, and extended in every way."""

    length: int
    base: Measured
    others: list[Measured]
    about: str

    @property
    def beyond(self) -> list[int]:
        """The lengths above L."""
        return [n for n in self.base.hits if n > self.length]

    @property
    def chosen(self) -> Measured:
        """The best of those that lose nothing within L; if all do, the best of them."""
        kept = [m for m in self.others if not m.lost(self.base, self.length)] or self.others
        return max(kept, key=lambda each: each.gain(self.beyond))

    @property
    def warnings(self) -> list[str]:
        """What the check could not measure, and what speaks against the choice."""
        found = []
        if not any(hits for n, hits in self.base.hits.items() if n <= self.length):
            found.append(
                f"The model finds no passkey in texts of up to L = {self.length:,} tokens, so none "
                "could be lost: that half of the check was empty."
            )
        lost = self.chosen.lost(self.base, self.length)
        if lost:
            found.append(f"{self.chosen.candidate.label} loses {' and '.join(lost)} within L.")
        if self.base.gain(self.beyond) >= self.chosen.gain(self.beyond):
            found.append("Beyond L no method is better than the model as it is.")
        return found

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows of two tables: perplexity, and all else."""
        lengths, chosen = list(self.base.hits), self.chosen
        columns = [f"{n:,}" for n in lengths]
        reading, finding = [], []
        for each in (self.base, *self.others):
            label = each.candidate.label + (" (chosen)" if each is chosen else "")
            reading.append([label, *(self._perplexity(each, n) for n in lengths)])
            lost = ", ".join(each.lost(self.base, self.length)) or "nothing"
            cost = f"{each.seconds:.3g} s", f"{each.megabytes:,.0f} MB", each.candidate.engines
            hits = (f"{each.hits[n]}" for n in lengths)
            finding.append([label, *hits, "" if each is self.base else lost, *cost])
        found = [f"passkeys {columns[0]}", *columns[1:], "loses within L"]
        last = f"{columns[-1]} tokens"
        return [
            ([f"perplexity, L = {self.length:,}", *columns], reading),
            (["", *found, f"time for {last}", "memory", "runs in"], finding),
        ]

    def _perplexity(self, each: Measured, length: int) -> str:
        """Perplexity, and in parentheses its change from the base's at L."""
        value, change = perplexity_of(each.scores[length]), ""
        base = self.base.scores[self.length]
        if each.scores[length] is not base and (
            x := paired_ratio_interval(each.scores[length], base)
        ):
            change = f" ({x[0] - 1:+.1%} to {x[1] - 1:+.1%})"
        return f"{value:,.2f}{change}"

    def markdown(self) -> str:
        """The check as a paragraph and tables."""
        parts = [" ".join([f"{self.about}.", RULE, *self.warnings])]
        for header, rows in self.tables():
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts)


def check_lengths(settings: CheckSettings, length: int, to: int) -> list[int]:
    """Lengths to measure at: L, and by default its doubles up to ``to``."""
    doubles = [length << n for n in range(1, 20) if length << n < to]
    lengths = sorted({length, *(settings.check_lengths or [*doubles, to])})
    if lengths[0] <= ANSWER:
        raise UserError(f"check_lengths must be more than {ANSWER} tokens, got {lengths[0]}")
    if lengths[-1] <= length:
        raise UserError(f"check_lengths need one above L = {length:,} tokens, got {lengths[-1]:,}")
    return lengths


def check_extensions(
    model: Model,
    settings: CheckSettings,
    engine: Engine,
    *,
    methods: Sequence[Method],
    length: int,
    to: int,
    max_distance: int | None = None,
) -> Check:
    """Measure a rotary model as it is and extended.

    Args:
        model: The model, whose weights are loaded from its path.
        settings: What to measure on.
        engine: Keeps what is measured, so that an interrupted check goes on.
        methods: What to try.
        length: L, in tokens.
        to: The longest text to read, in tokens.
        max_distance: W of the method limited; by default L and shares of it (`SHARES`).

    Raises:
        UserError: If the text is too short, or the model has no passkey prompts of these lengths.
    """
    lengths = check_lengths(settings, length, to)
    limits = [max_distance] if max_distance else [max(1, round(s * length)) for s in SHARES]
    every = [("base", None), *((m, None) for m in methods if m != "limited")]
    every += [("limited", limit) for limit in limits] if "limited" in methods else []
    candidates = [Candidate(*each, length, to) for each in every]
    measurements = []
    for candidate in candidates:
        own, *others = _measure(model, settings, lengths, candidate)
        if candidate.is_base_within(length):  # then the base's values are there already
            same = _measure(model, settings, lengths, candidates[0])[1:]
            within = [n <= length for n in (*lengths, *lengths)]
            others = [a if w else b for w, a, b in zip(within, same, others, strict=True)]
        measurements.append([own, *others])
    engine.run([item for each in measurements for one in each for item in one.items])
    results: list[Measured] = []
    for candidate, each in zip(candidates, measurements, strict=True):
        cost, *cells = finish(each, engine)
        read, answers = cells[: len(lengths)], cells[len(lengths) :]
        scores = [[*map(DocumentScore.of, cell["documents"])] for cell in read]
        hits = [sum(sample["hit"] for sample in cell["samples"]) for cell in answers]
        figures = dict(zip(lengths, scores, strict=True)), dict(zip(lengths, hits, strict=True))
        results.append(Measured(candidate, *figures, *cost["cost"]))
    scores = results[0].scores[length]
    about = (
        f"Measured on the last {sum(score.tokens for score in scores):,} tokens of {len(scores)} "
        f"documents, the same at every length, and {settings.check_samples} passkey prompts of "
        "every length"
    )
    return Check(length, results[0], results[1:], about)


def _measure(
    model: Model, settings: CheckSettings, lengths: list[int], way: Candidate
) -> list[Measurement]:
    """The cost of a text of the largest length; perplexity at every length; passkeys alike."""
    if way.method == "limited":  # with weights of its own, because they are converted
        model = replace(model, identity=f"{model.identity} limited")
    text = PerplexitySettings(
        source=settings.check,
        text_field=settings.text_field,
        bad_lines=settings.bad_lines,
        max_documents=settings.check_documents,
        max_tokens=lengths[-1] + 1,
        skip_short=True,
        windows=lengths,
        stride=lengths[0],
    )
    asked = [length - ANSWER for length in lengths]
    prompts = PasskeySettings(asked, samples=settings.check_samples, max_new_tokens=ANSWER)
    cost = Task("cost", "", PerplexitySettings, measure_cost)
    return [
        each
        for task, of in ((cost, text), (perplexity.TASK, text), (PASSKEYS, prompts))
        for each in task.measurements(model, of, way)
    ]


def measure_cost(
    model: Model, settings: PerplexitySettings, scaling: RotaryScaling
) -> list[Measurement]:
    """One more reading of a text, for the seconds and the megabytes that it takes."""
    tokens = read_text(model, settings)[0].tokens[: max(settings.windows)]

    def work(_: list[None]) -> list[list[float]]:
        module = model.loaded()
        ids = tokens[None].to(module.device)
        with scaling.applied(module, len(tokens)), torch.inference_mode():
            started = time.perf_counter()
            peak = peak_growth(
                lambda: module(input_ids=ids, use_cache=False, logits_to_keep=1), str(module.device)
            )
            return [[time.perf_counter() - started, peak]]

    item = Item([[len(tokens), scaling.facts]], work, [None], len(tokens), model.name)
    return [Measurement([item], lambda values: [{"cost": values[0]}])]
