"""What a cell of a result file holds: the one declaration of every task's results.

A task's cells are checked against it as they are made, and the report reads nothing else. Fields
have the names that they have in files, old files included; other fields than the declared ones are
kept as they are. None is a figure that overflowed, which JSON cannot represent.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from coca_lab.intervals import DocumentScore

Whole = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
AboveZero = Annotated[float, Field(gt=1e-300, le=1e300)]
Nats = Annotated[float, Field(ge=0, le=1e300)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
ATTEND_LAST = "attend-last"
"""The scaling of cells whose model, as it is, reads one window alone: the last tokens."""
Content = dict[str, Any]
"""An object of a JSON file."""
Facts = dict[Any, Any]
"""What a figure depends on besides the model, by name."""


class Record(BaseModel):
    """A part of a result file; other fields than its own are kept as they are."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class CheckedCell(Record):
    """A result of a task: what those of all tasks have in common.

    Attributes:
        task: Name of the task.
        model: What the results call the model.
        file: The file that it was read from; files themselves do not have it.
        attention: The model's form of attention.
        training_length: Tokens of its training context.
        seconds: How long it took to compute.
    """

    task: str
    model: str = ""
    file: str = ""
    attention: str | None = None
    training_length: Whole | None = None
    seconds: Number | None = None

    @property
    def facts(self) -> Facts:
        """What it depends on besides the model; cells that differ in a fact are shown apart."""
        return {}

    def _known(self, *names: str) -> Facts:
        """Those of these fields that the file has; old ones lack some."""
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class Figure(CheckedCell):
    """A figure of a model by a method, of a seed and a size if it is one of a study's models.

    Attributes:
        scaling: The method by which the model reads farther, with its options.
        factor: T / L of the method.
        rope_parameters: The rotary parameters that it gives.
        training_seed: Seed of the model's training.
        size: The model's size in a study.
        parameters: The model's parameters.
        conditions: In words, of figures that were not measured here.
    """

    scaling: Name = "none"
    factor: AboveZero | None = None
    rope_parameters: Any = None
    training_seed: Integer | None = None
    size: str = ""
    parameters: Whole | None = None
    conditions: str | None = None


class ScoredDocument(Record):
    """The score of a document: nats, and tokens that were scored."""

    id: str | int = ""
    nats: Number | None
    tokens: Natural

    @property
    def score(self) -> DocumentScore:
        return DocumentScore.of(vars(self))


class PositionRange(ScoredDocument):
    """The score of targets with so many tokens before them."""

    first: Natural
    last: Whole


class Repeats(Record):
    """Scores of the targets that end an n-gram which stands earlier, but only farther back."""

    n: Whole
    beyond: Natural
    documents: list[ScoredDocument]


class Perplexity(Figure):
    """The perplexity of a text, read through windows of one length."""

    window: Whole
    perplexity: AboveZero | None
    ci95: Interval | None = None
    nats: Number | None = None
    stride: Whole | None = None
    targets: str = ""
    text: Any = None
    tokens: Whole | None = None
    documents: list[ScoredDocument] = []
    by_position: list[PositionRange] | None = None
    repeats: Repeats | None = None

    @property
    def facts(self) -> Facts:
        """The documents, the tokens scored of each, and the stride."""
        facts = self._known("conditions", "targets", "text")
        if self.scaling != ATTEND_LAST:  # whose stride is its own
            facts |= self._known("stride")
        facts["documents"] = [(each.id, each.tokens) for each in self.documents]
        return facts


class Prompts(Figure):
    """The share of what prompts of one length ask for that a model finds."""

    length: Whole
    wilson95: Interval | None = None
    seed: Integer | None = None
    max_new_tokens: Whole | None = None
    samples: list[Content] = []

    @property
    def facts(self) -> Facts:
        """The prompts; the tokenizer shows in the distances."""
        named = ("key", "expected", "depth", "depths", "distance", "distances")
        prompts = [[sample.get(name) for name in named] for sample in self.samples]
        facts = self._known("conditions", "seed")
        facts["prompts", self.length] = prompts
        return facts


class Passkey(Prompts):
    """The share of passkeys found; None for ``depths`` is random ones."""

    accuracy: Fraction
    depths: Whole | None = None

    @property
    def facts(self) -> Facts:
        """Also whether keys are at depths that are drawn, or at so many in turn."""
        facts = super().facts
        if "depths" in self.model_fields_set:
            facts["depths"] = self.depths or "random"
        return facts


class Ruler(Prompts):
    """The score of one of RULER's tasks, around a text (``filler``, its hash)."""

    kind: str = ""
    score: Fraction
    chat: bool = False
    thinking: str | None = None
    filler: str | None = None

    @property
    def facts(self) -> Facts:
        """Each task has its own length of answers, and its own text around what is asked for."""
        facts = self._known("conditions", "seed", "chat", "thinking")
        if self.max_new_tokens is not None:
            facts["answer", self.kind] = self.max_new_tokens
        facts["filler", self.kind, self.length] = self.filler
        facts["prompts", self.kind, self.length] = super().facts["prompts", self.length]
        return facts


class NeedleFigures(Record):
    """Nats a digit of hidden numbers, and how many are found."""

    nats: Nats | None
    ci95: Interval | None = None
    found: Natural
    needles: Natural


class AskedNeedle(Record):
    """A number that was asked for."""

    distance: Natural
    nats: Number | None
    found: bool


class NeedleDocument(Record):
    """The numbers that were hidden in a document."""

    id: str | int
    needles: list[AskedNeedle]


class Needles(Figure):
    """How probable numbers are that are hidden in texts of one length.

    ``ranges`` has the figures of those at most ``near`` tokens back and of those ``beyond``.
    """

    length: Whole
    nats: Nats | None
    ci95: Interval | None = None
    found: Natural
    needles: Natural
    near: Whole | None = None
    ranges: dict[str, NeedleFigures] = {}
    text: str = ""
    seed: Integer | None = None
    count: Whole | None = None
    digits: Whole
    documents: list[NeedleDocument]

    @property
    def facts(self) -> Facts:
        """The texts, and what counts as near."""
        return self._known("near") | {("text", self.length): self.text}


class Harness(CheckedCell):
    """A task of lm-evaluation-harness."""

    name: str
    metrics: dict[str, Number | str | None]
    harness: str
    limit: AboveZero | None = None

    @property
    def facts(self) -> Facts:
        """The version, and how many questions were asked: all, if there is no limit."""
        return {"harness": self.harness, "limit": self.limit}


class Probability(Record):
    """The probability of a digit of the hidden numbers: a geometric mean, and its interval.

    Attributes:
        value: The mean.
        ci95: Its interval over documents; None with fewer than `FEWEST_DOCUMENTS`.
        found: How many of the numbers are found whole; None in older files.
        needles: How many there are.
    """

    value: Fraction
    ci95: Interval | None = None
    found: Natural | None = None
    needles: Natural | None = None


class MethodReading(Record):
    """What ``coca extend --check`` says of a method, or of the model as it is.

    Attributes:
        method: The method, or how it is read without one.
        word: What is said of a loss within L; empty without a method.
        verdict: The same, with what is lost, or how many documents could tell.
        perplexity: Of the longest texts.
        back: Of the digits up to L back, in texts of more than L tokens.
        far: Of those farther back.
        runs_in: What runs the result, in words.
        taken: Whether it is the method that is taken.
    """

    method: Name
    word: str = ""
    verdict: str = ""
    perplexity: AboveZero | None
    back: Probability | None = None
    far: Probability | None = None
    runs_in: str
    taken: bool = False


class CheckRecord(Record):
    """Which method a check takes, why, and what it compared; L is the ``training_length``.

    ``left_out`` are lines that say which methods were not measured, and why; older files have none.
    """

    decision: str
    training_length: Whole
    readings: list[MethodReading]
    left_out: list[str] = []


CELLS: dict[str, type[CheckedCell]] = {
    "perplexity": Perplexity,
    "needles": Needles,
    "passkey": Passkey,
    "ruler": Ruler,
    "harness": Harness,
}
"""By the name of the task. Cells of tasks without an entry are `CheckedCell`."""


def cell_type(task: str) -> type[CheckedCell]:
    """The declaration of a task's cells."""
    return CELLS.get(task, CheckedCell)
