"""Which way to extend a model's context is best: what ``coca extend --check`` measures.

A method may help beyond the training length L, and lose within it. Every method reads the same
documents, in which numbers are hidden. One reading has the perplexity at every length, and the
numbers are asked for from its cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, Literal

from transformers import PreTrainedModel

from coca_attention.errors import UserError
from coca_attention.method_names import MethodName
from coca_attention.models import METHODS, applied
from coca_lab.engine import Engine, Item
from coca_lab.evaluation.marked import (
    MarkedText,
    ask_for_numbers,
    hide_numbers,
    read_marked,
)
from coca_lab.evaluation.perplexity import load_text
from coca_lab.evaluation.task import Model
from coca_lab.fingerprints import code_fingerprint, fingerprint
from coca_lab.intervals import DocumentScore, paired_ratio_interval
from coca_lab.intervals import perplexity as perplexity_of
from coca_lab.loading import check_vocabulary
from coca_lab.settings.commands import CheckSettings
from coca_lab.settings.sources import TextSettings
from coca_lab.weights import quantised_by

SHARES = (1.0, 0.5, 0.25)
"""The limits of distances that are tried, as shares of L."""
SCORED_TOKENS = 1024
"""Tokens at the end of a text whose perplexity is measured, at most."""
RULE = (
    "In parentheses the 95 % interval over documents of the change from what the model as it is "
    "does on the same tokens with the last L tokens. A method loses perplexity within L if that "
    "interval lies above 0 there, and numbers if it finds fewer than the base by a sign test at "
    "5 %. Of those that lose nothing, best is the one that finds most numbers beyond L, of equals "
    "that with the lowest perplexity there; of those that the same tests do not tell from it, the "
    "one that runs in most engines is taken."
)


@dataclass(frozen=True)
class Candidate:
    """A way to read a model: ``base`` as it is, or extended by a method.

    Attributes:
        method: ``base``, or how it is extended.
        near: W, with method limited; S, with shifted.
        length: L, in tokens.
        to: The longest text that is to be read, in tokens.
        options: Other options of the method, by name and value.
        quantised: How the model's weights are quantised, empty if they are not.
    """

    method: Literal["base"] | MethodName = "base"
    near: int | None = None
    length: int = 0
    to: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    quantised: str = ""

    @property
    def label(self) -> str:
        """The method, and its limit."""
        return self.method + (f", W = {self.near:,}" if self.near else "")

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the method, its limit among them."""
        return dict(self.options) | ({"near": self.near} if self.near is not None else {})

    @property
    def engines(self) -> tuple[str, ...]:
        """What runs a model that is extended like this."""
        engines = METHODS["none" if self.method == "base" else self.method].engines
        unread = {"": (), "modelopt": ("Transformers", "llama.cpp")}
        without = unread.get(self.quantised, ("llama.cpp",))  # which reads its own format alone
        return tuple(name for name in engines if name not in without)

    def readings(self, lengths: Sequence[int]) -> list[list[int]]:
        """The lengths that one reading of a text has, for every reading that it takes.

        Texts of up to L tokens are left out if the model reads them as it does without extension.
        """
        if self.method == "dynamic":  # what it computes depends on how long the text is
            return [[n] for n in lengths if n > self.length]
        same = (self.near or 0) >= self.length
        return [[n for n in lengths if n > self.length or not same]]

    @contextmanager
    def applied(self, model: Model) -> Iterator[PreTrainedModel]:
        """The model with its weights, as the method has it."""
        module = model.loaded()
        if self.method == "base":
            yield module
            return
        with applied(module, self.method, length=self.length, to=self.to, **self.settings):
            yield module


@dataclass(frozen=True)
class MarkedReading:
    """A reading of a text with one candidate up to the largest of some lengths, in tokens."""

    model: Model
    candidate: Candidate
    text: MarkedText
    lengths: Sequence[int]
    scored: int

    @property
    def item(self) -> Item:
        """The work, whose value has scores and what is found by length, and what it cost."""
        text, read = self.text, self.text.stops[max(self.lengths)]
        about = [text.ids.tolist(), text.hidden.tolist(), [*text.questions.items()]]
        asked = [asdict(self.candidate), fingerprint(about), [*self.lengths], self.scored]
        key = ["extend", code_fingerprint(read_marked), self.model.identity, *asked]
        label = f"{self.candidate.label}, {read:,} tokens of {text.id}"
        return Item([key], self._measure, [None], read, label)

    def _measure(self, _: list[None]) -> list[dict[str, Any]]:
        text, tokenizer = self.text, self.model.tokenizer
        with self.candidate.applied(self.model) as module:
            cache, scores, cost = read_marked(module, text, self.lengths, self.scored)
            for n, score in reversed([*zip(self.lengths, scores, strict=True)]):
                score["found"] = ask_for_numbers(module, tokenizer, text, n, cache)
        return [{"scores": scores, **cost}]


@dataclass(frozen=True)
class Measured:
    """What a model does with one candidate, by length in tokens."""

    candidate: Candidate
    scores: dict[int, list[DocumentScore]]
    """Nats are infinite where they overflow."""
    found: dict[int, list[bool]]
    """Of the numbers of all documents."""
    seconds: float = 0.0
    """Time to read a text of the largest length."""
    megabytes: float | None = None
    """Memory that this takes beside the weights, on a GPU."""

    def loses(self, other: "Measured", lengths: Sequence[int]) -> list[str]:
        """What it clearly does worse than another (`RULE`): perplexity, numbers, or nothing."""
        worse = any(_is_worse(self.scores[n], other.scores[n]) for n in lengths)
        more, fewer, chance = self.compared(other, lengths)
        lost = {"perplexity": worse, "numbers": fewer > more and chance < 0.05}
        return [name for name, is_lost in lost.items() if is_lost]

    def compared(self, other: "Measured", lengths: Sequence[int]) -> tuple[int, int, float]:
        """Numbers that only it and only another finds, and p of the sign test between them."""
        from scipy.stats import binomtest  # here, for its import takes a second

        pairs = [p for n in lengths for p in zip(self.found[n], other.found[n], strict=True)]
        more, fewer = sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)
        return more, fewer, float(binomtest(more, more + fewer).pvalue) if more + fewer else 1.0

    def gain(self, lengths: Sequence[int]) -> tuple[int, float]:
        """What is found in texts of some lengths: more numbers, then less perplexity, is more."""
        nats = sum(math.log(perplexity_of(self.scores[n])) for n in lengths)
        return sum(sum(self.found[n]) for n in lengths), -nats


def _is_worse(scores: list[DocumentScore], base: list[DocumentScore]) -> bool:
    interval = paired_ratio_interval(scores, base)
    if interval is None:  # one document
        return sum(s.nats for s in scores) > sum(s.nats for s in base)
    return interval[0] > 1


@dataclass(frozen=True)
class ExtensionCheck:
    """Measurements of a model as it is, and extended in every way."""

    length: int
    base: Measured
    last: dict[int, list[DocumentScore]]
    """Of the base, by length beyond L, if it reads only the last L tokens of a text."""
    others: list[Measured]
    about: str

    def lost(self, each: Measured) -> list[str]:
        """What is lost in texts of up to L tokens."""
        return each.loses(self.base, [n for n in self.base.scores if n <= self.length])

    @property
    def best(self) -> Measured:
        """The best beyond L of those that lose nothing within L; if all do, of all."""
        return max(self._kept, key=lambda each: each.gain([*self.last]))

    @property
    def chosen(self) -> Measured:
        """Of those that are not clearly worse than the best, that which runs in most engines."""
        best, beyond = self.best, [*self.last]
        equal = [each for each in self._kept if not each.loses(best, beyond)]
        return max(equal, key=lambda each: (len(each.candidate.engines), each.gain(beyond)))

    @property
    def _kept(self) -> list[Measured]:
        return [each for each in self.others if not self.lost(each)] or self.others

    @property
    def reason(self) -> str:
        """Why the chosen one is."""
        chosen, best, beyond = self.chosen, self.best, [*self.last]
        label, (hits, _) = chosen.candidate.label, chosen.gain(beyond)
        count = sum(len(chosen.found[n]) for n in beyond)
        if chosen is best:
            return (
                f"{label} is taken: it finds {hits} of {count} numbers beyond L, none finds more, "
                "and of equals it has the lowest perplexity."
            )
        most, chance = best.gain(beyond)[0], chosen.compared(best, beyond)[2]
        return (
            f"{label} is taken: it finds {hits} of {count} numbers beyond L and "
            f"{best.candidate.label} {most}, which may be chance (p = {chance:.2g}), and runs in "
            f"more engines: {', '.join(chosen.candidate.engines)}."
        )

    @property
    def warnings(self) -> list[str]:
        """What the check could not measure, and what speaks against the choice."""
        said, chosen = [], self.chosen
        if not any(any(found) for n, found in self.base.found.items() if n <= self.length):
            said.append(
                f"The model finds no number in texts of up to L = {self.length:,} tokens, so none "
                "could be lost: that half of the check was empty."
            )
        if lost := self.lost(chosen):
            said.append(f"{chosen.candidate.label} loses {' and '.join(lost)} within L.")
        if self.base.gain([*self.last]) >= chosen.gain([*self.last]):
            said.append("Beyond L no method is better than the model as it is.")
        return said

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows of three tables: perplexity, numbers that are found, and costs."""
        lengths = [*self.base.scores]
        columns, longest = [f"{n:,}" for n in lengths], f"{lengths[-1]:,} tokens"
        reading, finding, costs = [], [], []
        memory = ["memory"] if self.base.megabytes is not None else []
        for each in (self.base, *self.others):
            label = each.candidate.label + (" (chosen)" if each is self.chosen else "")
            reading.append([label, *(self._perplexity(each.scores[n], n) for n in lengths)])
            hits = (f"{sum(each.found[n])} of {len(each.found[n])}" for n in lengths)
            lost = "" if each is self.base else ", ".join(self.lost(each)) or "nothing"
            finding.append([label, *hits, lost])
            sizes = [f"{each.megabytes:,.0f} MB" for _ in memory]
            engines = ", ".join(each.candidate.engines)
            costs.append([label, f"{each.seconds:.3g} s", *sizes, engines])
        row = [perplexity_of(self._reference(n)) for n in lengths]
        reading.insert(1, ["base, last L tokens", *(f"{value:,.2f}" for value in row)])
        return [
            ([f"perplexity, L = {self.length:,}", *columns], reading),
            (["numbers found", *columns, "loses within L"], finding),
            ([longest, "time", *memory, "runs in"], costs),
        ]

    def _reference(self, length: int) -> list[DocumentScore]:
        """What the model as it is does with the last L tokens of a text, or all if it has fewer."""
        return self.last.get(length) or self.base.scores[length]

    def _perplexity(self, scores: list[DocumentScore], length: int) -> str:
        """Perplexity, and in parentheses its change from the reference on the same tokens."""
        value, reference = f"{perplexity_of(scores):,.2f}", self._reference(length)
        if scores is reference or (x := paired_ratio_interval(scores, reference)) is None:
            return value
        return f"{value} ({100 * (x[0] - 1):+.1f} to {100 * (x[1] - 1):+.1f} %)"

    def markdown(self) -> str:
        """The check as a paragraph and tables."""
        parts = [" ".join([f"{self.about}.", RULE, self.reason, *self.warnings])]
        for header, rows in self.tables():
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts)


def check_lengths(settings: CheckSettings, length: int, to: int) -> list[int]:
    """Lengths to measure at: L, and by default its doubles up to ``to``."""
    doubles = [length << n for n in range(1, 20) if length << n < to]
    lengths = sorted({length, *(settings.check_lengths or [*doubles, to])})
    if lengths[-1] <= length:
        raise UserError(f"check_lengths need one above L = {length:,} tokens, got {lengths[-1]:,}")
    return lengths


def check_extensions(
    model: Model,
    settings: CheckSettings,
    engine: Engine,
    *,
    methods: Sequence[MethodName],
    length: int,
    to: int,
    near: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> ExtensionCheck:
    """Measure a rotary model as it is and extended.

    Args:
        model: The model, whose weights are loaded from its path.
        settings: What to measure on.
        engine: Keeps what is measured, so that an interrupted check goes on.
        methods: What to try.
        length: L, in tokens.
        to: The longest text to read, in tokens.
        near: W of the method limited; by default L and shares of it (`SHARES`).
        options: Other options of the one method that is tried.

    Raises:
        UserError: If the text is too short, or numbers cannot be hidden in it.
    """
    lengths = check_lengths(settings, length, to)
    limits = [near] if near else [max(1, round(s * length)) for s in SHARES]
    quantised = quantised_by(model.path, model.module.config) or "" if model.path else ""
    base = Candidate("base", None, length, to, quantised=quantised)
    given = tuple(sorted((options or {}).items()))
    candidates = [base]
    for method in methods:
        if method != "limited":
            own = near if "near" in METHODS[method].options else None
            candidates.append(replace(base, method=method, near=own, options=given))
    if "limited" in methods:
        candidates += [replace(base, method="limited", near=limit) for limit in limits]
    source = TextSettings(
        settings.check,
        settings.text_field,
        settings.bad_lines,
        max_documents=settings.check_documents,
        max_tokens=lengths[-1],
        skip_short=True,
    )
    documents = load_text(source, model.tokenizer, at_least=lengths[-1])
    largest = max(int(document.tokens.max()) for document in documents)
    check_vocabulary(model.module, model.tokenizer, largest)
    texts = hide_numbers(documents, model.tokenizer, lengths, settings.check_numbers)
    scored = min(SCORED_TOKENS, texts[0].stops[lengths[0]] // 4)
    last = [
        MarkedReading(model, base, text.last(n, text.stops[length]), [n], scored)
        for text in texts
        for n in lengths
        if n > length
    ]
    own = [
        [
            MarkedReading(model, each, text, group, scored)
            for text in texts
            for group in each.readings(lengths)
        ]
        for each in candidates
    ]
    engine.run([each.item for each in chain(last, *own)])
    first, *others = map(partial(_measured, engine), candidates, own)
    others = [
        replace(x, scores=first.scores | x.scores, found=first.found | x.found) for x in others
    ]
    tokens = sum(score.tokens for score in first.scores[length])
    about = (
        f"Measured on the last {tokens:,} tokens before each length of {len(texts)} documents, and "
        f"{settings.check_numbers} numbers hidden in each; memory, on a GPU, includes what scoring "
        "takes"
    )
    return ExtensionCheck(length, first, _measured(engine, base, last).scores, others, about)


def _measured(engine: Engine, candidate: Candidate, readings: Sequence[MarkedReading]) -> Measured:
    """What readings have measured, by length; their median time, and their largest memory."""
    scores, found = dict[int, list[DocumentScore]](), dict[int, list[bool]]()
    longest, costs = max(n for each in readings for n in each.lengths), list[dict[str, Any]]()
    for each in readings:
        value = engine.store.get(each.item.keys[0])
        for length, score in zip(each.lengths, value["scores"], strict=True):
            document = DocumentScore.of({"id": each.text.id, **score})
            scores.setdefault(length, []).append(document)
            found.setdefault(length, []).extend(score["found"])
        if longest in each.lengths:
            costs.append(value)
    sizes = [cost["megabytes"] for cost in costs if "megabytes" in cost]
    seconds = median(cost["seconds"] for cost in costs)
    return Measured(candidate, scores, found, seconds, max(sizes, default=None))
