"""Which method to take: what may be said of a loss within the training length, and the choice.

A method may help beyond the training length L and lose within it. What is not seen to lose has not
been shown to lose nothing: with three documents a method with a fifth more perplexity may pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from coca_attention.models.methods import PACKAGE, UNTRIED
from coca_lab.evaluation.needles import figures, scores_of
from coca_lab.evaluation.task import Cell
from coca_lab.intervals import DocumentScore, differences, mean_nats, nats_interval, student
from coca_lab.settings.commands import Margins

RULE = (
    "A method can be taken if no loss is shown in texts of up to L tokens, the training length: "
    "the 95% intervals of what it loses, in perplexity and in nats a digit, end below the margins. "
    "Of these, the one is taken that gives digits of numbers farther back than L the highest "
    "probability; if the documents show no difference between it and others, the one of them that "
    "runs in most engines without this package. None is taken if the documents do not show that "
    "the best gives these digits a higher probability than a guess and than the model as it is."
)


Word = Literal["no loss shown", "loses", "cannot tell"]
"""What documents say about a loss within L, as docs/methods.md defines it."""
GUESS = math.log(10)
"""Nats of a digit that is guessed."""
MOST_DOCUMENTS = 100_000
"""Beyond so many it is not said how many are needed."""


@dataclass(frozen=True)
class Loss:
    """What documents say about a loss.

    Attributes:
        word: What they say.
        mean: Nats per token or digit that are lost.
        interval: Its 95 % interval; None with fewer than two documents.
        documents: How many there are.
        needed: About how many could tell; None where that is not known.
    """

    word: Word
    mean: float
    interval: tuple[float, float] | None
    documents: int
    needed: int | None = None

    def __str__(self) -> str:
        if self.word != "cannot tell":
            return self.word
        plural = "" if self.documents == 1 else "s"
        needed = f", about {self.needed:,} are needed" if self.needed else ""
        return f"cannot tell with {self.documents} document{plural}{needed}"


def loss_of(scores: Sequence[DocumentScore], base: Sequence[DocumentScore], margin: float) -> Loss:
    """What the same documents say about a loss of one reading against another.

    Args:
        scores: Of the method.
        base: Of the model as it is.
        margin: Nats per token or digit that do not matter.
    """
    pairs = differences(scores, base)
    interval = nats_interval(pairs)
    mean = mean_nats(pairs)
    count = len(pairs)
    if interval is None:
        return Loss("cannot tell", mean, None, count)
    low, high = interval
    if high < margin:
        return Loss("no loss shown", mean, interval, count)
    if low > 0:
        return Loss("loses", mean, interval, count)
    # With more documents the interval closes around the mean; it has to part it from the margin,
    # or from 0 where the mean is above the margin.
    room = margin - mean if mean < margin else mean
    spread = (high - mean) / student(max(count - 1, 1)) * math.sqrt(count)
    needed = 2
    while student(needed - 1) * spread / math.sqrt(needed) >= room:
        needed += max(1, needed // 50)
        if needed >= MOST_DOCUMENTS:
            return Loss("cannot tell", mean, interval, count)
    return Loss("cannot tell", mean, interval, count, needed)


@dataclass(frozen=True)
class Read:
    """What a model reads with one method.

    Attributes:
        method: Its name; the model as it is has another object.
        engines: What runs the result.
        length: L, in tokens.
        perplexity: Scores of documents by length in tokens.
        needles: Documents of the cells of needles by length.
        exact: Whether it computes within L what the model as it is does, so that nothing is lost.
    """

    method: str
    engines: Sequence[str]
    length: int
    perplexity: Mapping[int, list[DocumentScore]]
    needles: Mapping[int, list[Cell]]
    exact: bool = False

    def losses(self, base: "Read", margins: Margins) -> dict[str, Loss]:
        """What documents say about losses within L, by how much of what is lost where."""
        found = {}
        if self.exact:
            return found
        for length, scores in sorted(self.perplexity.items()):
            if length <= self.length:
                margin = math.log1p(margins.perplexity)
                loss = loss_of(scores, base.perplexity[length], margin)
                found[f"{math.expm1(loss.mean):.1%} of perplexity at {length:,}"] = loss
        for length, scores in self.near.items():
            loss = loss_of(scores, base.near[length], margins.needles)
            found[f"{loss.mean:.2f} nats a digit of needles at {length:,}"] = loss
        return found

    def word(self, base: "Read", margins: Margins) -> Word:
        """The worst that is said of a loss within L."""
        words = {loss.word for loss in self.losses(base, margins).values()}
        if "loses" in words:
            return "loses"
        return "cannot tell" if "cannot tell" in words else "no loss shown"

    def verdict(self, base: "Read", margins: Margins) -> str:
        """The same, with what is lost, or how many documents could tell."""
        losses = self.losses(base, margins)
        lost = [what for what, loss in losses.items() if loss.word == "loses"]
        if lost:
            return f"loses {', '.join(lost)}"
        unclear = [loss for loss in losses.values() if loss.word == "cannot tell"]
        if unclear:
            return str(max(unclear, key=lambda loss: loss.needed or math.inf))
        return "no loss shown"

    @property
    def whole(self) -> list[DocumentScore]:
        """The perplexity of the longest texts."""
        return self.perplexity[max(self.perplexity)]

    @property
    def near(self) -> dict[int, list[DocumentScore]]:
        """Of every length up to L, the scores of the needles."""
        return {n: scores_of(each) for n, each in self.needles.items() if n <= self.length}

    def found(self, *, beyond: bool) -> tuple[int, int]:
        """Numbers found whole in all texts above L, up to L back or beyond; and how many of."""
        longer = [each for n, each in self.needles.items() if n > self.length]
        counted = [figures(each, self.length, beyond) for each in longer]
        found = sum(each["found"] for each in counted)
        return found, sum(each["needles"] for each in counted)

    @property
    def back(self) -> list[DocumentScore]:
        """Of every document, the score of its needles up to L back in all texts above L."""
        return self._far(beyond=False)

    @property
    def far(self) -> list[DocumentScore]:
        """Of every document, the score of its needles beyond L in texts of all lengths."""
        return self._far(beyond=True)

    def _far(self, beyond: bool) -> list[DocumentScore]:
        longer = [each for n, each in self.needles.items() if n > self.length]
        return pooled([scores_of(each, self.length, beyond) for each in longer])


def pooled(lengths: Iterable[list[DocumentScore]]) -> list[DocumentScore]:
    """Of every document, its score in texts of all lengths."""
    nats: dict[str, float] = {}
    digits: dict[str, int] = {}
    for scores in lengths:
        for score in scores:
            nats[score.id] = nats.get(score.id, 0.0) + score.nats
            digits[score.id] = digits.get(score.id, 0) + score.tokens
    return [DocumentScore(name, nats[name], digits[name]) for name in nats]


def _above_zero(pairs: Sequence[DocumentScore]) -> bool:
    """Whether the 95 % interval of differences lies above 0."""
    interval = nats_interval(pairs)
    return interval is not None and interval[0] > 0


def in_words(engines: Sequence[str]) -> str:
    """Engines that run a model, those that were not tried apart."""
    tried = ", ".join(name for name in engines if name not in UNTRIED)
    untried = ", ".join(name for name in engines if name in UNTRIED)
    return f"{tried} (untried: {untried})" if untried else tried


def _digit(scores: Sequence[DocumentScore]) -> str:
    """The probability of a digit, and its nats."""
    nats = mean_nats(scores)
    return f"{math.exp(-nats):.0%} ({nats:.2f} nats)"


@dataclass(frozen=True)
class Choice:
    """The method to take, and why.

    Attributes:
        base: The model as it is.
        alone: As it is, with only the last L tokens of every text: what one has without a method.
        others: With every method.
        margins: Which loss does not matter.
    """

    base: Read
    alone: Read
    others: Sequence[Read]
    margins: Margins = field(default_factory=Margins)

    @property
    def candidates(self) -> list[Read]:
        """Those that show no loss within L."""
        return [
            each for each in self.others if each.word(self.base, self.margins) == "no loss shown"
        ]

    @property
    def best(self) -> Read | None:
        """The candidate to which needles beyond L are most probable; None without candidates."""
        return min(self.candidates, key=lambda each: mean_nats(each.far), default=None)

    @property
    def taken(self) -> Read | None:
        """Of those that documents do not part from the best, the one that most engines run.

        None where the best is not shown to do better beyond L than a guess and than the model as
        it is: the text supports no choice.
        """
        best = self.best
        if best is None or not self.finds or not self.helps:
            return None
        level = [
            each
            for each in self.candidates
            if each is best or not _above_zero(differences(each.far, best.far))
        ]
        # What runs in Transformers runs there with this package, too.
        engines = [len({*each.engines}.difference(PACKAGE)) for each in level]
        most_run = [
            each for each, count in zip(level, engines, strict=True) if count == max(engines)
        ]
        return min(most_run, key=lambda each: mean_nats(each.far))

    @property
    def finds(self) -> bool:
        """Whether the best method is better than a guess beyond L, by its interval if any."""
        is_asked = any(score.tokens for score in self.base.far)  # farther back than L
        if self.best is None or not is_asked:
            return False
        _, most = nats_interval(self.best.far) or (0.0, mean_nats(self.best.far))
        return most < GUESS

    @property
    def helps(self) -> bool:
        """Whether the best method is better beyond L than the model as it is, in the same way."""
        if self.best is None:
            return False
        gained = differences(self.base.far, self.best.far)
        least, _ = nats_interval(gained) or (mean_nats(gained), 0.0)
        return least > 0

    @property
    def reason(self) -> str:
        """Why it is taken, in words."""
        best = self.best
        taken = self.taken
        if best is None:
            return 'No method has "no loss shown" within L, so none is taken.'
        if self.finds and not self.helps:
            return (
                "The documents do not show that beyond L a method is better than the model as it "
                f"is, so none is taken: {best.method}, the best of those with no loss shown, gives "
                f"a digit there a probability of {_digit(best.far)}; the model as it is "
                f"{_digit(self.base.far)}, and it may have been made for longer texts."
            )
        if taken is None:
            return (
                "The documents do not show that a method finds more beyond L than a guess, so none "
                f"is taken: {best.method}, the best of those with no loss shown, gives a digit "
                f"there a probability of {_digit(best.far)}, a guess has 10%."
            )
        said = (
            f"{taken.method} is taken: it gives a digit beyond L a probability of "
            f"{_digit(taken.far)}"
        )
        if taken is not best:
            said += (
                f", and runs in {in_words(taken.engines)}. {best.method} gives "
                f"{_digit(best.far)}, but the documents do not show that it is better. The"
            )
        elif len(self.candidates) > 1:
            said += ", the best of the methods with no loss shown. The"
        elif len(self.others) > 1:
            said += ", the only method with no loss shown. The"
        else:
            said += ", and no loss is shown; it is the only method compared. The"
        return f"{said} {self.alone.method} give {_digit(self.alone.far)}."

    @property
    def warnings(self) -> list[str]:
        """What could not be measured, and what speaks against the choice."""
        said = []
        near = [mean_nats(scores) for scores in self.base.near.values()]
        if near and min(near) > GUESS:
            said.append(
                f"The model does not find numbers even within L: {min(near):.2f} nats a digit, "
                f"where a guess has {GUESS:.2f}. So needles cannot compare methods for it."
            )
        taken = self.taken
        if taken is None:
            return said
        if not _above_zero(differences(self.alone.far, taken.far)):
            said.append(
                f"The documents do not show that beyond L {taken.method} is better than the "
                f"{self.alone.method}."
            )
        lost = differences(taken.back, self.alone.back)
        if _above_zero(lost):
            said.append(
                f"In longer texts, numbers up to L back have {mean_nats(lost):.2f} nats a digit "
                f"more with {taken.method} than with the {self.alone.method}."
            )
        for name, read in {"model as it is": self.base, self.alone.method: self.alone}.items():
            lost = differences(taken.whole, read.whole)
            if _above_zero(lost):
                said.append(
                    "The perplexity of the longest texts is "
                    f"{math.expm1(mean_nats(lost)):.1%} higher with {taken.method} than that of "
                    f"the {name}."
                )
        return said
